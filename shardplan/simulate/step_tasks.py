"""From the schedule of a plan to the tasks of a step (FlexFlow, section 5.1)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shardplan.collectives.issued import Issued
from shardplan.cost import Network
from shardplan.ir import Constant, Layout
from shardplan.schedule.instructions import (
    Barrier,
    Block,
    Bundle,
    Compute,
    Cond,
    Fill,
    HostCopy,
    Instruction,
    Move,
    Reblock,
    Scan,
    Schedule,
    Source,
    While,
    blocks_of,
    instructions_of,
)
from shardplan.schedule.passes.prune import reads
from shardplan.schedule.planned import PlannedProgram
from shardplan.schedule.sends import issuer
from shardplan.simulate.engine import NONE, Stream
from shardplan.simulate.tasks import Growing, Label, StepTasks

_MANY = 8
"""A value that would wait for more tasks than this waits for one task that joins them."""

Ids = tuple[int, ...]


def step_tasks(
    schedule: Schedule, planned: PlannedProgram, donated: frozenset[int] = frozenset(), *, iterations: int | None = None
) -> StepTasks:
    """The tasks of a step (FlexFlow, section 5.1). At most ``iterations`` (4 or more; None: all) of a scan are written out.

    Each op with kernels is a task of its priced seconds. Each priced collective is a task on the links of the slowest level that
    it crosses. A loop of unknown trip count runs once; of a conditional, the most expensive branch runs. ``donated`` are the
    positions of donated inputs.
    """
    assert iterations is None or iterations >= 4, "one before the iteration that stands for others, one behind it, and the first"
    return _Builder(planned, iterations).step(schedule, donated)


def longest_scan(block: Block) -> int:
    """The number of iterations of the longest scan; 0 without scans."""
    inner = (int(i.op.params["length"]) for i in instructions_of(block.instructions) if isinstance(i, Scan))
    return max(inner, default=0)


def count_instructions(block: Block) -> int:
    """The number of instructions that a step executes; those of a scan's body count once for each iteration."""
    return sum(
        1 + sum(map(count_instructions, blocks_of(i))) * (int(i.op.params["length"]) if isinstance(i, Scan) else 1)
        for i in block.instructions
    )


@dataclass(slots=True)
class _Frame:
    """The state of a walk over a body: for each value, the tasks that it waits for and the values in memory that hold it.

    A value from outside waits for ``entry``, and the body as a whole keeps it in memory.
    """

    entry: Ids = ()
    waits: dict[int, Ids] = field(default_factory=dict[int, Ids])
    roots: dict[int, Ids] = field(default_factory=dict[int, Ids])


class _Builder:
    def __init__(self, planned: PlannedProgram, iterations: int | None) -> None:
        self.planned, self.iterations = planned, iterations
        self.seconds = planned.op_seconds
        self.issued = issuer(planned)
        self.products = planned.product_names
        network = planned.programs.resharder.network
        assert isinstance(network, Network)
        levels, self.cluster = network.cluster.levels, network.cluster
        crossed = [n for n, level in enumerate(levels) if level.size > 1]
        self.link = {n: 1 + i for i, n in enumerate(crossed)}
        self.streams = (Stream("compute", "compute"), *(Stream(f"{levels[n].name} links", "link") for n in crossed))
        self.labels: dict[Label, int] = {}
        self.sizes: dict[int, float] = {}  # by value: bytes of a device's block
        self.all = Growing()
        self.parameters = 0

    def step(self, schedule: Schedule, donated: frozenset[int]) -> StepTasks:
        """Walks the whole step. The result that replaces a donated argument takes over its memory."""
        graph, frame = self.planned.graph, _Frame()
        body = schedule.body
        for i, (v, t) in enumerate(zip(body.parameters, graph.inputs, strict=True)):
            self.sizes[v] = self.local(t, self.planned.layouts[t])
            frame.roots[v] = (self.all.hold(0.0 if i in graph.offloaded else self.sizes[v], NONE),)
        self.parameters = len(body.parameters)
        self.block(body, frame)
        end = len(self.all.seconds)
        replaced = {i for i in graph.feedback if i is not None and i in donated}
        for i in range(self.parameters):
            if i not in donated or i in replaced:
                self.all.read((i,), end)
        for r, i in zip(body.results, graph.feedback, strict=True):
            roots = frame.roots.get(r, ()) if isinstance(r, int) else ()
            self.all.read(roots, end)
            for root in roots:
                if i in replaced and root >= self.parameters:
                    self.all.nbytes[root] = 0.0
        return self.all.finished(self.streams, tuple(self.labels))

    def local(self, tensor: int, layout: Layout | None) -> float:
        """Bytes of a device's block of a tensor in a layout (None: whole)."""
        used = () if layout is None else layout.used
        return self.planned.graph.tensors[tensor].nbytes / math.prod(self.planned.sizes[f] for f in used)

    # -- instructions ------------------------------------------------------------------------------------------------

    def block(self, block: Block, frame: _Frame) -> None:
        """Adds the tasks of a body."""
        for instruction in block.instructions:
            match instruction:
                case Compute():
                    self.compute(instruction, frame)
                case Move():
                    self.moves(instruction, (instruction,), frame)
                case Bundle():
                    self.moves(instruction, instruction.moves, frame)
                case Reblock():
                    self.reblock(instruction, frame)
                case HostCopy():
                    self.host_copy(instruction, frame)
                case Fill():
                    self.sizes[instruction.result] = self.local(instruction.tensor, instruction.layout)
                    self.give(frame, instruction.result, frame.entry, ())
                case Barrier():
                    waits = self.waiting(frame, instruction.values)
                    for value, result in zip(instruction.values, instruction.results, strict=True):
                        self.sizes[result] = self.sizes.get(value, 0.0)
                        self.give(frame, result, waits, self.roots(frame, (value,)))
                case Scan():
                    self.scan(instruction, frame)
                case While():
                    self.loop(instruction, frame)
                case Cond():
                    self.cond(instruction, frame)

    def compute(self, compute: Compute, frame: _Frame) -> None:
        """Adds an op: first the halo exchanges that it needs, then the op itself, if it takes time."""
        node, signature = compute.node, compute.node.signature
        waits, roots = self.waiting(frame, compute.inputs), self.roots(frame, compute.inputs)
        halos = [self.send(one, waits, roots) for one in self.issued(compute)]
        waits = self.joined((*waits, *halos))
        seconds, task = self.seconds[node.id], NONE
        if seconds > 0:
            label = self.label(Label(self.products.get(node.id, node.op.primitive), str(node.op.source)))
            task = self.all.task(seconds, 0, label, waits)
            self.all.read(roots, task)
            waits = (task,)
        traffic = node.costed.traffic
        into = () if signature.update is None else self.roots(frame, compute.inputs[:1])
        for r, v in enumerate(compute.results):
            self.sizes[v] = self.share(compute, r)
            stored = traffic is None or (r < len(traffic.writes) and traffic.writes[r] > 0)
            if stored and task != NONE:
                self.give(frame, v, waits, into or (self.all.hold(self.sizes[v], task),))
            else:
                self.give(frame, v, waits, roots)

    def share(self, compute: Compute, r: int) -> float:
        """Bytes of a device's share of an op's result."""
        node = compute.node
        if r >= len(node.outputs):
            return 0.0
        nbytes, signature = self.planned.graph.tensors[node.outputs[r]].nbytes, node.signature
        if signature.manual is not None:
            return self.local(node.outputs[r], signature.manual.layouts(self.planned.names)[1][r])
        loops = () if signature.description is None else signature.description.results[r]
        return nbytes / math.prod(c.ways for c in compute.cuts if c.loop in loops)

    def moves(self, instruction: Instruction, moves: Sequence[Move], frame: _Frame) -> None:
        """Adds values that change their layout together. A value that only takes its own block stays in its old memory."""
        sources = [s for m in moves for s in (m.source, m.extreme) if s is not None]
        waits, roots = self.waiting(frame, sources), self.roots(frame, sources)
        sent = NONE
        for one in self.issued(instruction):
            sent = self.send(one, waits, roots)
            waits = (sent,)
        for move in moves:
            before, after = (self.block_bytes(move, layout) for layout in (move.before, move.after))
            self.sizes[move.result] = after
            own = self.roots(frame, (move.source,))
            in_place = before == after and len(own) == 1 and own[0] >= self.parameters
            stays = sent == NONE or in_place
            self.give(frame, move.result, waits, own if stays else (self.all.hold(after, sent),))

    def block_bytes(self, move: Move, layout: Layout) -> float:
        """Bytes of a device's block of a moved tensor; dims that are split are padded."""
        tensor = self.planned.graph.tensors[move.tensor]
        extents = move.extents or move.shape
        size = float(tensor.itemsize)
        for n, extent, factors in zip(move.shape, extents, layout.dims, strict=False):
            size *= extent / math.prod(self.planned.sizes[f] for f in factors) if factors else n
        return size

    def reblock(self, reblock: Reblock, frame: _Frame) -> None:
        """Adds a value whose blocks change their extent."""
        waits, roots = self.waiting(frame, (reblock.source,)), self.roots(frame, (reblock.source,))
        sent = [self.send(one, waits, roots) for one in self.issued(reblock)]
        self.sizes[reblock.result] = self.local(reblock.tensor, reblock.layout)
        held = (self.all.hold(self.sizes[reblock.result], sent[0]),) if sent else roots
        self.give(frame, reblock.result, self.joined((*waits, *sent)), held)

    def host_copy(self, copy: HostCopy, frame: _Frame) -> None:
        """Adds a copy from host memory or into it, beside which the device computes nothing; host memory does not count."""
        waits, roots = self.waiting(frame, (copy.source,)), self.roots(frame, (copy.source,))
        nbytes = self.local(copy.tensor, self.planned.layouts[copy.tensor])
        label = self.label(Label("host_copy", f"into {copy.memory}", int(nbytes)))
        task = self.all.task(nbytes / self.cluster.host_link_bytes_per_s() + self.cluster.device.launch_s, 0, label, waits)
        self.all.read(roots, task)
        fetched = copy.memory == "device"
        self.sizes[copy.result] = nbytes if fetched else 0.0
        self.give(frame, copy.result, (task,), (self.all.hold(nbytes, task),) if fetched else ())

    def send(self, one: Issued, waits: Ids, roots: Ids) -> int:
        """Adds a collective on the links of the slowest level that it crosses, and returns its task."""
        factors = self.planned.factors
        axes = tuple(factors[f].name for f in one.step.factors)
        label = self.label(Label(one.step.kind.hlo, str(one.source), one.step.nbytes, axes))
        task = self.all.task(one.seconds, self.link[min(factors[f].level for f in one.step.factors)], label, waits)
        self.all.read(roots, task)
        return task

    # -- control flow ------------------------------------------------------------------------------------------------

    def enter(self, instruction: Instruction, frame: _Frame) -> tuple[int, Ids]:
        """(a task that waits for all operands of an instruction with bodies, the values in memory that hold them)."""
        values = sorted(reads(instruction))
        return self.all.task(0.0, NONE, NONE, self.waiting(frame, values)), self.roots(frame, values)

    def leave(self, since: Ids, results: Sequence[Source], inside: _Frame) -> int:
        """Adds a task that ends a body: it waits for all tasks since, and reads these results."""
        task = self.all.task(0.0, NONE, NONE, self.all.unread(since) or inside.entry)
        self.all.read(self.roots(inside, results), task)
        return task

    def carried(self, start: Source, size: float, entry: int, frame: _Frame) -> Ids:
        """The memory of a loop's carry: that of its start value, unless this is an argument of the step or a constant."""
        own = tuple(r for r in self.roots(frame, (start,)) if r >= self.parameters)
        return own or (self.all.hold(size, entry),)

    def scan(self, scan: Scan, frame: _Frame) -> None:
        """Adds a scan: its first iteration, and copies of it. Its stacks are in memory from its beginning on."""
        length, carry = int(scan.op.params["length"]), len(scan.start)
        entry, roots = self.enter(scan, frame)
        stack_sizes = [self.slice_bytes(scan, n, length) for n in range(carry, len(scan.results))]
        starts = [self.size(s) for s in scan.start]
        held = [self.carried(s, size, entry, frame) for s, size in zip(scan.start, starts, strict=True)]
        held += [(self.all.hold(size, entry),) for size in stack_sizes]
        inside = _Frame((entry,))
        self.sizes |= dict(zip(scan.body.parameters, starts, strict=False))
        for p, s in zip(scan.body.parameters[carry:], scan.stacked, strict=True):
            self.sizes[p] = self.size(s) / max(length, 1)
        last = entry
        if length:
            since = self.all.sizes
            self.block(scan.body, inside)
            left = self.leave(since, scan.body.results, inside)
            written = length if self.iterations is None else min(length, self.iterations)
            size = left - entry
            self.all.repeat(since, written - 1)
            last = left + (written - 1) * size
            if written < length:
                self.all.fold(last - size, size, length - written)
        self.all.read(roots, last)
        for n, (v, own) in enumerate(zip(scan.results, held, strict=True)):
            self.sizes[v] = starts[n] if n < carry else stack_sizes[n - carry]
            self.all.read(own, last)
            self.give(frame, v, (last,), own)

    def slice_bytes(self, scan: Scan, n: int, length: int) -> float:
        """Bytes of a device's part of the stack that is result ``n`` of a scan."""
        result = scan.body.results[n]
        made = next((i for i in scan.body.instructions if isinstance(result, int) and result in _made(i)), None)
        match made:
            case Compute():
                return length * self.share(made, made.results.index(result))
            case Move():
                return length * self.block_bytes(made, made.after)
            case _:
                return length * (self.sizes.get(result, 0.0) if isinstance(result, int) else 0.0)

    def loop(self, loop: While, frame: _Frame) -> None:
        """Adds one iteration of a while loop: its test, its body, and for a batched test the collectives of a second test."""
        entry, roots = self.enter(loop, frame)
        starts = [self.size(s) for s in loop.start]
        held = [self.carried(s, size, entry, frame) for s, size in zip(loop.start, starts, strict=True)]
        at = entry
        for block in (loop.test, loop.body):
            since, inside = self.all.sizes, _Frame((at,))
            self.sizes |= dict(zip(block.parameters, starts, strict=True))
            self.block(block, inside)
            at = self.leave(since, block.results, inside)
        if loop.batched:
            waits: Ids = (at,)
            for one in (one for i in loop.test.instructions for one in self.issued(i)):
                waits = (self.send(one, waits, ()),)
            at = self.joined(waits)[0]
        self.all.read(roots, at)
        for v, size, own in zip(loop.results, starts, held, strict=True):
            self.sizes[v] = size
            self.all.read(own, at)
            self.give(frame, v, (at,), own)

    def cond(self, cond: Cond, frame: _Frame) -> None:
        """Adds the most expensive branch of a conditional."""
        entry, roots = self.enter(cond, frame)
        branch = self.dearest(cond, entry)
        since, inside = self.all.sizes, _Frame((entry,))
        self.branch(cond, branch, inside)
        last = self.leave(since, (), inside)
        self.all.read(roots, last)
        for v, r in zip(cond.results, branch.results, strict=True):
            self.sizes[v] = self.size(r)
            own = self.roots(inside, (r,))
            self.give(frame, v, (last,), own if own or not isinstance(r, int) else (self.all.hold(self.sizes[v], last),))

    def branch(self, cond: Cond, branch: Block, inside: _Frame) -> None:
        """Adds the tasks of a branch."""
        self.sizes |= {p: self.size(s) for p, s in zip(branch.parameters, cond.arguments, strict=True)}
        self.block(branch, inside)

    def dearest(self, cond: Cond, entry: int) -> Block:
        """The branch that takes longest; if the platform decides, the default branch."""
        platforms = cond.op.params.get("branches_platforms")
        if platforms is not None and None in platforms:
            return cond.branches[list(platforms).index(None)]
        seconds: list[float] = []
        for branch in cond.branches:
            since = self.all.sizes
            self.branch(cond, branch, _Frame((entry,)))
            seconds.append(self.all.seconds_since(since))
            self.all.cut(since)
        return cond.branches[max(range(len(seconds)), key=lambda b: (seconds[b], -b))]

    # -- values ------------------------------------------------------------------------------------------------------

    def give(self, frame: _Frame, value: int, waits: Ids, roots: Ids) -> None:
        """Records the tasks that a value waits for, and the values in memory that hold it."""
        frame.waits[value], frame.roots[value] = waits, roots

    def waiting(self, frame: _Frame, sources: Iterable[Source]) -> Ids:
        """The tasks that must have ended before all of these values exist."""
        return (
            self.joined(t for s in sources if not isinstance(s, Constant) for t in frame.waits.get(s, frame.entry)) or frame.entry
        )

    def joined(self, tasks: Iterable[int]) -> Ids:
        """Distinct tasks; more than `_MANY` are replaced by one task that waits for them."""
        distinct = tuple(sorted(set(tasks)))
        return distinct if len(distinct) <= _MANY else (self.all.task(0.0, NONE, NONE, distinct),)

    def roots(self, frame: _Frame, sources: Iterable[Source]) -> Ids:
        """The values in memory that hold these."""
        own = [r for s in sources if not isinstance(s, Constant) for r in frame.roots.get(s, ())]
        return tuple(dict.fromkeys(own))

    def size(self, source: Source) -> float:
        """Bytes of a device's block of a value; 0 for a literal."""
        return 0.0 if isinstance(source, Constant) else self.sizes.get(source, 0.0)

    def label(self, label: Label) -> int:
        """The number of a label."""
        return self.labels.setdefault(label, len(self.labels))


def _made(instruction: Instruction) -> tuple[int, ...]:
    match instruction:
        case Compute():
            return instruction.results
        case Move():
            return (instruction.result,)
        case _:
            return ()
