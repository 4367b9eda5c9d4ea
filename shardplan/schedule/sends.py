"""The collectives that a schedule sends: every instruction with its devices, its bytes and how often a training step runs it.

This is the prediction that a compiled program is compared with, one for one: each collective stands in a named scope that the
backend gives it too. Devices are numbered row-major over the mesh's axes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import assert_never

import numpy as np

from shardplan.collectives.divided import read
from shardplan.collectives.dsl import Reduction
from shardplan.collectives.issued import Groups, Issued, Send
from shardplan.collectives.laying import Laying, smallest_part
from shardplan.collectives.step import Step
from shardplan.cost import Network, priced_bytes, wire_bytes
from shardplan.cost.network import binomial_rounds
from shardplan.ir import PAIRS, Collective, Layout, Reducer, Split, itemsize
from shardplan.schedule.changes import DimChange, later_splits, splits_buffer
from shardplan.schedule.copies import Copies
from shardplan.schedule.instructions import (
    Block,
    Bundle,
    Compute,
    Cond,
    Cut,
    Instruction,
    Move,
    Reblock,
    Scan,
    Schedule,
    While,
    blocks_of,
    with_blocks,
)
from shardplan.schedule.planned import PlannedProgram

_Sender = Callable[[Collective, Groups, int], Send]
"""Makes an instruction of its kind, its groups and the elements of a device's operand."""


def sends(schedule: Schedule, planned: PlannedProgram) -> tuple[Send, ...]:
    """All collectives of a schedule, in its order; bodies of loops with their trips, each branch of a conditional."""
    return tuple(s for i in _Reader(planned, branches=True).block(schedule.body, 1.0) for s in i.sends)


def issued(schedule: Schedule, planned: PlannedProgram, windows: Mapping[int, float] | None = None) -> tuple[Issued, ...]:
    """The priced collectives of a schedule, in its order; of the branches of a conditional the dearest alone.

    ``windows`` are those of `shardplan.schedule.movement_windows`; without them nothing is hideable.
    """
    return tuple(_Reader(planned, branches=False, windows=windows or {}).block(schedule.body, 1.0))


def unbundled(schedule: Schedule, planned: PlannedProgram) -> tuple[Issued, ...]:
    """`issued` as if nothing travelled together: a collective for each value."""

    def alone(block: Block) -> Block:
        parts = [i.moves if isinstance(i, Bundle) else (with_blocks(i, alone),) for i in block.instructions]
        return replace(block, instructions=tuple(itertools.chain.from_iterable(parts)))

    return issued(replace(schedule, body=alone(schedule.body)), planned)


def issuer(planned: PlannedProgram) -> Callable[[Instruction], tuple[Issued, ...]]:
    """A function that gives the priced collectives of one execution of an instruction, without those of its bodies.

    Ask it for the instructions in the order of the schedule: a reduction of pairs comes before its move.
    """
    reader = _Reader(planned, branches=False)

    def of(instruction: Instruction) -> tuple[Issued, ...]:
        return () if blocks_of(instruction) else tuple(reader.block(Block((), (instruction,), ()), 1.0))

    return of


class _Reader:
    def __init__(self, planned: PlannedProgram, *, branches: bool, windows: Mapping[int, float] | None = None) -> None:
        self.planned, self.sizes, self.branches, self.windows = planned, planned.sizes, branches, windows or {}
        self.resharder = planned.programs.resharder
        assert isinstance(self.resharder.network, Network)
        self.network = self.resharder.network
        self.copies = Copies(planned)
        self.groups = cache(self._groups)
        self.extremes: dict[int, int] = {}

    def block(self, block: Block, times: float) -> Iterator[Issued]:
        """The collectives of a body."""
        for instruction in block.instructions:
            match instruction:
                case Move():
                    yield from self.beside(instruction.result, self.move(instruction, times))
                case Bundle():
                    yield from self.beside(instruction.moves[0].result, self.bundle(instruction, times))
                case Compute(node=node, results=results):
                    if len(results) > len(node.outputs):
                        self.extremes[results[-1]] = itemsize(node.signature.call.dtypes[0])
                    yield from self.halos(instruction, times)
                case Reblock():
                    yield from self.beside(instruction.result, self.reblock(instruction, times))
                case Scan():
                    yield from self.block(instruction.body, times * float(instruction.op.params["length"]))
                case While():
                    yield from self.loop(instruction, times)
                case Cond():
                    branches = [list(self.block(branch, times)) for branch in instruction.branches]
                    platforms = instruction.op.params.get("branches_platforms")
                    if self.branches:
                        yield from itertools.chain.from_iterable(branches)
                    elif platforms is not None and None in platforms:  # the others are for insides of kernels
                        yield from branches[list(platforms).index(None)]
                    else:
                        yield from max(branches, key=_seconds)
                case _:
                    pass

    def beside(self, result: int, found: Iterator[Issued]) -> Iterator[Issued]:
        """The collectives of one movement, one after the other: together they hide behind its window; copies never do."""
        window_s = self.windows.get(result, 0.0)
        for one in found:
            hideable_s = min(one.seconds - one.copied_s, window_s)
            window_s -= hideable_s
            yield replace(one, hideable_s=hideable_s) if hideable_s else one

    def loop(self, loop: While, times: float) -> Iterator[Issued]:
        """The collectives of a while loop, counted for one iteration; a body with a batched test evaluates the test again."""
        for block in (loop.test, *([loop.test] if loop.batched else []), loop.body):
            for one in self.block(block, times):
                yield replace(one, sends=tuple(replace(s, known=False) for s in one.sends))

    def move(self, move: Move, times: float) -> Iterator[Issued]:
        """The collectives of a move; the collectives of step n are in its scope number n."""
        size, buffered = 0, False
        for n, step in enumerate(move.steps):
            change = DimChange.of(step)
            if splits_buffer(step, move):
                splits = list(later_splits(move, n))
                blocks, ways = math.prod(self.ways(factors) for _, factors in splits), self.ways(change.gained)
                size = self.local_size(move, step.before, padded=[dim for dim, _ in splits])
                size, buffered = -(-size // blocks // ways) * ways * blocks, True  # a block's elements are padded
            if not buffered:
                size = self.local_size(move, step.before, step.after)  # a dim that is about to be split is padded
            copied_s = 0.0 if buffered else self.copies.ordering_s(move, step)
            yield from _with_copies(self.hop(f"{move.scope}.{n}", step, move, size, times), copied_s)
            buffered = buffered and len(step.after.dims) > len(move.shape)
            if buffered:
                size = size * self.ways(change.lost) // self.ways(change.gained)

    def hop(self, scope: str, step: Step, move: Move, size: int, times: float) -> Iterator[Issued]:
        """The collectives of one step on ``size`` elements of a device."""
        dtype = self.planned.graph.tensors[move.tensor].dtype
        own = list(self.step(step, move, size, dtype, partial(_send, scope, times, move.tensor, move.line)))
        if step.program and (step.kind == Collective.ALL_GATHER or move.reducer == "sum"):  # no other reducer has programs
            yield self.issued(own, step, size * itemsize(dtype))
        else:
            yield from (self.issued([send], replace(step, kind=send.kind, program=""), send.nbytes) for send in own)

    def bundle(self, bundle: Bundle, times: float) -> Iterator[Issued]:
        """The collectives of moves that travel together, each with the seconds of its copies to and from the buffer."""
        size = sum(self.local_size(move, step.before) for move, step in zip(bundle.moves, bundle.steps, strict=True))
        sent = self.hop(bundle.scope, bundle.step, bundle.moves[0], size, times)
        for one in _with_copies(sent, self.copies.packing_s(bundle)):
            yield replace(one, along=tuple((move.tensor, move.line) for move in bundle.moves[1:]))

    def shift(self, send: Send, over: tuple[int, ...], layout: Layout) -> Issued:
        """The collective in which every device sends to its neighbour."""
        return self.issued([send], Step(Collective.SHIFT, over, send.nbytes, layout, layout, 0.0), send.nbytes)

    def issued(self, own: Sequence[Send], step: Step, operand_bytes: int) -> Issued:
        """A step priced for these bytes of a device's operand, with its instructions."""
        nbytes = priced_bytes(step.kind, self.ways(step.over), operand_bytes)
        seconds = self.resharder.seconds_with(step.kind, step.over, nbytes, step.program)
        return Issued(
            step=replace(step, nbytes=nbytes, seconds=seconds),
            seconds=seconds,
            times=own[0].times,
            wire_bytes=sum(send.wire_bytes for send in own),
            tensor=own[0].tensor,
            source=own[0].line,
            sends=tuple(own),
        )

    def local_size(self, move: Move, layout: Layout, after: Layout | None = None, *, padded: Sequence[int] = ()) -> int:
        """Elements of a device's block; dims that a step is about to split are padded."""
        size = 1
        for d, (n, extent, factors) in enumerate(zip(move.shape, move.extents, layout.dims, strict=False)):
            splits = bool(factors) or d in padded or (after is not None and bool(after.dims[d]))
            size *= extent // self.ways(factors) if splits else n
        return size

    def reblock(self, reblock: Reblock, times: float) -> Iterator[Issued]:
        """The exchanges between neighbours when the blocks of a dim change their extent; all other dims stay as they lie.

        Rows that go further than to the next device (``heads`` after the first) are priced as if they went to the next.
        """
        sizes = [
            p // self.ways(fs) if fs else n for n, p, fs in zip(reblock.shape, reblock.extents, reblock.layout.dims, strict=True)
        ]
        row = math.prod(n for d, n in enumerate(sizes) if d != reblock.dim)
        width = itemsize(self.planned.graph.tensors[reblock.tensor].dtype)
        over = reblock.layout.dims[reblock.dim]
        for n, rows in enumerate(reblock.heads(self.ways(over))):
            scope = f"{reblock.scope}.{n}"
            send = _send(scope, times, reblock.tensor, reblock.line, width, Collective.PERMUTE, (), rows * row)
            yield self.shift(send, over, reblock.layout)

    def ways(self, factors: Sequence[int]) -> int:
        """How many devices there are along some factors."""
        return math.prod(self.sizes[f] for f in factors)

    def step(
        self, step: Step, move: Move, size: int, dtype: str, at: Callable[[int, Collective, Groups, int], Send]
    ) -> Iterator[Send]:
        """The instructions of one step; ``at`` takes the bytes of an element, then the arguments of a `_Sender`."""
        width = itemsize(dtype)
        match step.kind:
            case Collective.SLICE:
                return
            case Collective.PERMUTE:
                yield at(width, Collective.PERMUTE, (), size)
            case Collective.ALL_REDUCE:
                if move.reducer in PAIRS:
                    assert move.extreme is not None, "places are reduced with their extremes"
                    yield at(self.extremes[move.extreme], Collective.ALL_REDUCE, self.groups(step.over), size)
                    yield at(itemsize("int32"), Collective.ALL_REDUCE, self.groups(step.over), size)
                    return
                if move.reducer in ("max", "min") and dtype.startswith(("float", "bfloat")):
                    width = max(width, itemsize("int32"))  # they compare as integers, of at least 32 bits
                yield from self.all_reduce(step, move.reducer, size, dtype, partial(at, width))
            case Collective.REDUCE_SCATTER | Collective.ALL_GATHER if step.program and (
                step.kind == Collective.ALL_GATHER or move.reducer == "sum"
            ):
                yield from self.of_program(*self.program(step), size, partial(at, width))
            case Collective.REDUCE_SCATTER if move.reducer != "sum":
                yield at(width, Collective.ALL_TO_ALL, self.groups(step.over), size)
            case Collective.REDUCE_SCATTER | Collective.ALL_GATHER | Collective.ALL_TO_ALL:
                yield at(width, step.kind, self.groups(step.over), size)
            case Collective.SHIFT:
                raise AssertionError("shifts are of halos")
            case _:
                assert_never(step.kind)

    def all_reduce(self, step: Step, reducer: Reducer, size: int, dtype: str, send: _Sender) -> Iterator[Send]:
        """An all-reduce, or the collectives that stand for it."""
        if reducer == "sum" and step.program:
            program, laying = self.program(step)
            divisor = smallest_part(program, laying.shape)
            yield from self.of_program(program, laying, -(-size // divisor) * divisor, send)
        elif reducer == "prod" or (reducer in ("and", "or") and dtype != "bool"):
            yield send(Collective.ALL_GATHER, self.groups(step.over), size)
        else:
            yield send(Collective.ALL_REDUCE, self.groups(step.over), size)

    def program(self, step: Step) -> tuple[Reduction, Laying]:
        """A step's program, and how it lies on the mesh."""
        program, of = read(self.network, step.over, step.program)
        return program, of.laying(self.planned.names)

    def of_program(self, program: Reduction, laying: Laying, size: int, send: _Sender) -> Iterator[Send]:
        """The collective instructions of a program on ``size`` elements a device."""
        key = "steps", program, laying, self.planned.names
        if key not in self.network.memo:
            self.network.memo[key] = _program_steps(program, laying, self.planned.names, self.sizes)
        return _of_program(self.network.memo[key], size, send)

    def _groups(self, over: tuple[int, ...]) -> Groups:
        """The groups of devices along some factors."""
        devices = np.arange(math.prod(self.sizes)).reshape(self.sizes)
        rest = [f for f in range(len(self.sizes)) if f not in over]
        rows = devices.transpose(*rest, *sorted(over)).reshape(-1, self.ways(over))
        return tuple(tuple(map(int, row)) for row in rows)

    def extent(self, compute: Compute, c: Cut) -> int:
        """The true extent of the loop that is cut."""
        description = compute.node.signature.description
        assert description is not None, "only what is described is cut"
        return description.loops[c.loop].extent

    def halos(self, compute: Compute, times: float) -> Iterator[Issued]:
        """The exchanges between neighbours for an op: the first cut's blocks first, each with the halos of those before it."""
        signature = compute.node.signature
        strategies = [signature.cut(c.loop, c.ways) for c in compute.cuts]
        shapes = [list(shape) for shape in signature.call.operands]
        for strategy, c in zip(strategies, compute.cuts, strict=True):
            assert strategy is not None, "a plan cuts what may be cut"
            for i, place in enumerate(strategy.operands):
                if isinstance(place, Split):
                    shapes[i][place.dim] = -(-shapes[i][place.dim] * c.extent // (self.extent(compute, c) * c.ways))
        for number, (strategy, c) in enumerate(zip(strategies, compute.cuts, strict=True)):
            assert strategy is not None
            for i, place in enumerate(strategy.operands):
                if not isinstance(place, Split) or place.halo == (0, 0):
                    continue
                width = itemsize(signature.call.dtypes[i])
                if i not in c.whole:
                    row = math.prod(n for d, n in enumerate(shapes[i]) if d != place.dim)
                    for side, n in zip(("lo", "hi"), place.halo, strict=True):
                        if n:
                            scope = f"{compute.scope}.{number}.{i}.{side}"
                            tensor, line = compute.node.inputs[i], compute.node.op.source
                            send = _send(scope, times, tensor, line, width, Collective.PERMUTE, (), row * n)
                            yield self.shift(send, c.factors, Layout.whole(len(shapes[i])))
                shapes[i][place.dim] += sum(place.halo)


def _with_copies(found: Iterator[Issued], copied_s: float) -> Iterator[Issued]:
    """Collectives of one step, the first of them with the seconds of the copies beside them."""
    for one in found:
        yield replace(one, seconds=one.seconds + copied_s, copied_s=copied_s) if copied_s else one
        copied_s = 0.0


def _seconds(found: Sequence[Issued]) -> float:
    return sum(i.seconds * i.times for i in found)


def _send(scope: str, times: float, tensor: int, line: str, width: int, kind: Collective, groups: Groups, size: int) -> Send:
    """An instruction on ``size`` elements of ``width`` bytes."""
    members = len(groups[0]) if groups else 2  # of a permute only the bytes count
    wire = wire_bytes(kind, members, priced_bytes(kind, members, size * width))
    return Send(scope, kind, groups, size * width, wire, times, tensor, line)


@dataclass(frozen=True, slots=True)
class _ProgramStep:
    """A step of a program on a mesh, in groups of so many ``members``. With ``masters``, some devices are in no group, and
    permutes stand for the collective; else every device is in one of ``groups``.
    """

    collective: Collective
    members: int
    masters: bool
    groups: Groups


def _program_steps(
    program: Reduction, laying: Laying, names: tuple[str, ...], sizes: tuple[int, ...]
) -> tuple[_ProgramStep, ...]:
    """The steps of a program, each with its groups of devices, on a mesh with these axes."""
    inside = [names.index(axis) for axis in laying.names]
    rest = [f for f in range(len(sizes)) if f not in inside]
    devices = np.arange(math.prod(sizes)).reshape(sizes).transpose(*rest, *inside).reshape(-1, math.prod(laying.sizes))
    found: list[_ProgramStep] = []
    for step in program.steps:
        among = np.array(laying.groups(step))  # [groups, members], at one place along the other axes
        masters = among.size < math.prod(laying.sizes)
        groups = () if masters else tuple(map(tuple, devices[:, among].reshape(-1, among.shape[1]).tolist()))
        found.append(_ProgramStep(step.collective, among.shape[1], masters, groups))
    return tuple(found)


def _of_program(program: Sequence[_ProgramStep], size: int, send: _Sender) -> Iterator[Send]:
    """The collective instructions of a program on ``size`` elements a device, as `shardplan.collectives.lower` runs it."""
    for step in program:
        members, masters = step.members, step.masters
        rounds = len(binomial_rounds(members))
        match step.collective:
            case Collective.REDUCE | Collective.BROADCAST:
                yield from itertools.repeat(send(Collective.PERMUTE, (), size), rounds)
            case Collective.ALL_REDUCE if masters:
                chunk = -(-size // members)
                yield from itertools.repeat(send(Collective.PERMUTE, (), chunk), 2 * (members - 1))
            case Collective.REDUCE_SCATTER if masters:
                yield from itertools.repeat(send(Collective.PERMUTE, (), size // members), members - 1)
            case Collective.ALL_GATHER if masters:
                yield from itertools.repeat(send(Collective.PERMUTE, (), size), members - 1)
            case Collective.ALL_REDUCE:
                yield send(Collective.ALL_REDUCE, step.groups, size)
            case Collective.REDUCE_SCATTER:
                yield send(Collective.REDUCE_SCATTER, step.groups, size)
            case Collective.ALL_GATHER:
                yield send(Collective.ALL_GATHER, step.groups, size)
        if step.collective == Collective.REDUCE_SCATTER:
            size //= members
        elif step.collective == Collective.ALL_GATHER:
            size *= members
