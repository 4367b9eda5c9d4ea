"""A step in microbatches on groups of devices: the ops before, in and after its loop, each on its group.

The loop over microbatches is taken apart: each group has the part of its body that it runs, and sends the values of one
microbatch that other groups need as soon as they are made. To be planned, the part of a group is a loop again, whose slices are
the values that it receives, and whose stacks the values that it makes for others: so weights are gathered and gradients reduced
once where that pays. A stack has a place for each microbatch of its value that the group holds beside the present one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardplan.dag.pipelines import PassKind
from shardplan.errors import PlacementError
from shardplan.graph import flatten
from shardplan.graph.updates import HANDED_ON
from shardplan.ir import Op, Operand, Program, Tensor
from shardplan.regions.assignment import Assignment, Group, free_ops
from shardplan.regions.group_programs import GroupProgram, StepSplit
from shardplan.regions.segments import segments_of

MARK = "shardplan_microbatches"
"""The named scope of the loop over microbatches."""


@dataclass(frozen=True)
class LoopSplit:
    """A step whose loop over microbatches is cut into segments, as are the ops before and after it.

    ``outer`` is the group of each op outside of the loop, by op id, ``inner`` the chunk of layers of each op in its body, and
    ``chunks`` the group that runs each chunk. The programs that groups plan count ``in_flight`` [chunks] microbatches between
    their forward and backward passes (None: all). ``homes`` are the groups that hold arguments, by tensor, where they are given.
    ``replicate`` are primitives that may run whole.
    """

    program: Program
    loop: Op
    groups: tuple[Group, ...]
    outer: Mapping[int, int]
    inner: Mapping[int, int]
    chunks: tuple[int, ...]
    in_flight: tuple[int, ...] | None = None
    homes: Mapping[int, int] = field(default_factory=dict[int, int])
    replicate: tuple[str, ...] = ()

    @property
    def body(self) -> Program:
        """The body of the loop."""
        return self.loop.bodies[0]

    @property
    def consts(self) -> int:
        """The number of operands that the loop reads whole."""
        return int(self.loop.params["num_consts"])

    @property
    def carries(self) -> int:
        """The number of carries: values that are added up, and values that are the same in all microbatches."""
        return int(self.loop.params["num_carry"])

    @property
    def count(self) -> int:
        """The number of microbatches."""
        return int(self.loop.params["length"])

    @cached_property
    def carry_inputs(self) -> tuple[int, ...]:
        """The carries as tensors of the body."""
        return self.body.inputs[self.consts : self.consts + self.carries]

    @cached_property
    def of_outer(self) -> Mapping[int, Operand]:
        """The operand of the loop for each input of its body."""
        return dict(zip(self.body.inputs, self.loop.inputs, strict=True))

    @cached_property
    def free(self) -> frozenset[int]:
        """The tensors outside of the loop that depend on no input."""
        ops = free_ops(self.program)
        made = {t for op in self.program.ops if op.id in ops for t in op.outputs}
        return frozenset(made | {t for t, _ in self.program.constants})

    # -- the body ----------------------------------------------------------------------------------------------------

    @cached_property
    def inside(self) -> StepSplit:
        """The body cut into segments. A value that enters the loop whole, or slice by slice, is in each group that reads it."""
        body = self.body
        makers = {t: self.chunks[self.inner[op.id]] for op in body.ops if op.id in self.inner for t in op.outputs}
        held = {t: makers.get(o, 0) if isinstance(o, int) else 0 for t, o in zip(self.carry_inputs, body.outputs, strict=False)}
        everywhere = frozenset(t for t in body.inputs if t not in held)
        names = (tuple(f"value {t} of a microbatch" for t in own) for own in (body.inputs, body.outputs))
        paths, results = names
        program = replace(body, input_paths=paths, output_paths=results, feedback=(None,) * len(body.outputs))
        free = free_ops(body)
        chunk = {op.id: self.inner[op.id] for op in body.ops if op.id not in free}
        of = {i: self.chunks[c] for i, c in chunk.items()}
        assignment = Assignment(program, self.groups, of, held, everywhere, chunk)
        totals = [o for o in body.outputs[: self.carries] if isinstance(o, int)]
        products = {n.op.id for n in flatten(program, replicate=self.replicate).nodes if not n.where and n.signature.multiplies}
        return StepSplit(assignment, segments_of(assignment, totals, products))

    @cached_property
    def kinds(self) -> tuple[PassKind, ...]:
        """The kind of pass that each segment of the body computes.

        A segment is "forward" until its chunk depends on a later one, then "backward" if another chunk waits for it, and
        "weight" once the previous chunk has what it waits for. In the first chunk, all of the backward pass is "both".
        """
        inside = self.inside
        maker = inside.assignment.made_in
        readers: dict[int, set[int]] = {}  # the other chunks that read a tensor
        for segment, boundary in zip(inside.segments, inside.boundaries, strict=True):
            for t in boundary.reads:
                readers.setdefault(t, set()).update({segment.chunk} - {maker.get(t)})
        late: set[int] = set()  # tensors that depend on a later chunk
        served: set[int] = set()  # chunks that have sent what the previous chunk waits for
        found: list[PassKind] = []
        for segment, boundary in zip(inside.segments, inside.boundaries, strict=True):
            chunk = segment.chunk
            makers = [(maker.get(t, chunk), t) for t in boundary.reads]
            waits = any(c > chunk or (c == chunk and t in late) for c, t in makers)
            late.update(boundary.makes if waits else ())
            others = {c for t in boundary.makes for c in readers.get(t, ())}
            if others or not (waits or chunk in served):
                found.append("backward" if waits else "forward")
            else:
                found.append("weight" if chunk in served else "both")
            served.update({chunk} if others and min(others) < chunk else ())
        return tuple(found)

    @cached_property
    def readers(self) -> Mapping[int, tuple[int, ...]]:
        """For each input of the body that every group may have, the groups that read it."""
        found: dict[int, dict[int, None]] = {t: {} for t in self.inside.assignment.everywhere}
        for segment, boundary in zip(self.inside.segments, self.inside.boundaries, strict=True):
            for t in boundary.reads:
                if t in found:
                    found[t][segment.group] = None
        return {t: tuple(own) for t, own in found.items()}

    # -- outside -----------------------------------------------------------------------------------------------------

    @cached_property
    def held(self) -> Mapping[int, int]:
        """The group of each argument of the step and of each result of the loop, by tensor."""
        program = self.program
        makers = {t: self.outer[op.id] for op in program.ops if op.id in self.outer for t in op.outputs}
        makers |= self._loop_results
        homes: dict[int, int] = {}
        for result, i in zip(program.outputs, program.feedback, strict=True):
            if i is not None and isinstance(result, int) and result in makers:
                homes.setdefault(program.inputs[i], makers[result])
        for t, own in self.readers.items():
            source = self.of_outer[t]
            if isinstance(source, int) and own:
                homes.setdefault(source, own[0])
        for op in program.ops:
            for t in op.tensors if op.id in self.outer else ():
                homes.setdefault(t, self.outer[op.id])
        return {**{t: homes.get(t, 0) for t in program.inputs}, **self._loop_results, **self.homes}

    @cached_property
    def _loop_results(self) -> Mapping[int, int]:
        at, body = self.inside.assignment, self.body
        found: dict[int, int] = {}
        for n, (t, o) in enumerate(zip(self.loop.outputs, body.outputs, strict=True)):
            found[t] = at.home[self.carry_inputs[n]] if n < self.carries else at.maker.get(o, 0) if isinstance(o, int) else 0
        return found

    @cached_property
    def before(self) -> StepSplit:
        """The ops that the loop waits for, cut into segments."""
        needed = set(self.loop.tensors)
        ids: set[int] = set()
        for op in reversed(self.program.ops):
            if op.id in self._own and not needed.isdisjoint(op.outputs):
                ids.add(op.id)
                needed.update(op.tensors)
        others = {t for op in self.program.ops if op.id not in ids and op is not self.loop for t in op.tensors}
        read = others | set(self.loop.tensors) | self.program.returned
        made = [t for op in self.program.ops if op.id in ids for t in op.outputs if t in read]
        return self._part_of(ids, self.program.inputs, tuple(made), (None,) * len(made))

    @cached_property
    def after(self) -> StepSplit:
        """The other ops, cut into segments: they run once all microbatches are done."""
        before = self.before.assignment
        ids = self._own - before.of.keys()
        made = tuple(t for t in before.program.outputs if isinstance(t, int))
        inputs = (*self.program.inputs, *made, *self.loop.outputs)
        return self._part_of(ids, inputs, self.program.outputs, self.program.feedback)

    @cached_property
    def _own(self) -> frozenset[int]:
        free = free_ops(self.program)
        return frozenset(op.id for op in self.program.ops if op is not self.loop and op.id not in free)

    def _part_of(
        self, ids: Iterable[int], inputs: tuple[int, ...], outputs: tuple[Operand, ...], feedback: tuple[int | None, ...]
    ) -> StepSplit:
        chosen, free = set(ids), free_ops(self.program)
        ops = tuple(op for op in self.program.ops if op.id in chosen or op.id in free)
        paths = (*self.program.input_paths, *(f"value {t}" for t in inputs[len(self.program.inputs) :]))
        names = self.program.output_paths if outputs is self.program.outputs else tuple(f"value {t}" for t in outputs)
        program = replace(
            self.program, ops=ops, inputs=inputs, outputs=outputs, input_paths=paths, output_paths=names, feedback=feedback
        )
        held = dict(self.held)
        if outputs is self.program.outputs:
            held |= self.before.assignment.maker
        assignment = Assignment(program, self.groups, {i: self.outer[i] for i in chosen}, {t: held[t] for t in inputs})
        return StepSplit(assignment, segments_of(assignment))

    # -- what a group plans --------------------------------------------------------------------------------------------

    def received(self, group: int) -> tuple[int, ...]:
        """The tensors outside of the loop that a group reads and does not hold or make."""
        at = {**self.held, **self.before.assignment.maker, **self.after.assignment.maker}
        read = [
            m.tensor for split in (self.before, self.after) for m in split.transfers if m.target == group and m.like == m.tensor
        ]
        read += [s for t in self.body.inputs if isinstance(s := self.of_outer[t], int) and group in self.readers.get(t, ())]
        return tuple(t for t in dict.fromkeys(read) if at.get(t, group) != group)

    def group_program(self, group: int) -> tuple[GroupProgram, GroupProgram]:
        """(the program of a group as it is planned, the body of its loop). Stacks of values that it receives, or makes for
        others, have the numbers of the body's values plus ``len(program.tensors)``.
        """
        inside = self.inside.group_parts[group]
        body = self._ordered(inside, group)
        stacks = len(self.program.tensors)
        loop_inputs: list[Operand] = []
        for t in body.inputs:
            loop_inputs.append(self.of_outer[t] if t in self.of_outer else stacks + t)
        carried = [n for n, t in enumerate(self.carry_inputs) if self.inside.assignment.home[t] == group]
        others = body.outputs[len(carried) :]
        ys = {o: self.loop.outputs[n] for n, o in enumerate(self.body.outputs) if n >= self.carries and isinstance(o, int)}
        outputs = (*(self.loop.outputs[n] for n in carried), *(ys.get(t, stacks + t) for t in others))
        consts = sum(t in self.body.inputs[: self.consts] for t in body.inputs)
        params = {**self.loop.params, "num_consts": consts, "num_carry": len(carried)}
        trips = self.loop.trips
        loop = replace(self.loop, inputs=tuple(loop_inputs), outputs=outputs, params=params, bodies=(body.program,), trips=trips)
        before, after = (self._ops_of(split, group, loop) for split in (self.before, self.after))
        held = [t for t in self.program.inputs if self.held[t] == group]
        received = [*self.received(group), *(t for t in loop.tensors if t >= stacks)]
        makes = [t for split in (self.before, self.after) for n, s in enumerate(split.segments) if s.group == group
                 for t in split.boundaries[n].makes]  # fmt: skip
        results = tuple(dict.fromkeys((*makes, *outputs)))
        ops = (*before, *((loop,) if body.program.ops else ()), *(op for op in after if op not in before))
        stacked = {t for t in (*loop.inputs[consts + len(carried) :], *outputs[len(carried) :]) if isinstance(t, int)}
        return self._numbered(group, ops, (*held, *received), results, stacked), body

    def _ordered(self, inside: GroupProgram, group: int) -> GroupProgram:
        """The body of a group's loop. It takes values of the whole step, carries, and slices; it gives carries and stacks."""
        inputs, boundaries = self.body.inputs, self.inside.boundaries
        own = [n for n, s in enumerate(self.inside.segments) if s.group == group]
        read = {t for n in own for t in boundaries[n].reads}
        whole = [t for t in inputs[: self.consts] if t in read]
        carries = [t for t in self.carry_inputs if self.inside.assignment.home[t] == group]
        slices = [t for t in inputs[self.consts + self.carries :] if t in read]
        received = sorted(t for t in read if self.inside.assignment.at.get(t, group) != group)
        out = [o for t, o in zip(self.carry_inputs, self.body.outputs, strict=False) if t in carries and isinstance(o, int)]
        sent = {t for n, s in enumerate(self.inside.segments) if s.group != group for t in boundaries[n].reads}
        sent |= {o for o in self.body.outputs if isinstance(o, int)}
        makes = [
            t
            for t in dict.fromkeys(t for n in own for t in boundaries[n].makes)
            if t not in out and (t in sent or self._held_beside(t, group))
        ]
        ids = {i for n in own for i in self.inside.segments[n].ops}
        return self.inside.part(ids, (*whole, *carries, *slices, *received), (*out, *makes))

    def _ops_of(self, split: StepSplit, group: int, loop: Op) -> list[Op]:
        own = {i for s in split.segments if s.group == group for i in s.ops}
        wanted = [t for n, s in enumerate(split.segments) if s.group == group for t in split.boundaries[n].makes]
        wanted += [t for t in loop.tensors if t in self.free]
        return split.with_free(own, wanted)

    def _numbered(
        self, group: int, ops: Sequence[Op], inputs: Sequence[int], outputs: Sequence[int], stacked: Collection[int]
    ) -> GroupProgram:
        """A program of these ops of a group, tensors renumbered; ``stacked`` are those that the loop slices or stacks."""
        tensors = tuple(dict.fromkeys((*inputs, *(t for op in ops for t in (*op.tensors, *op.outputs)), *outputs)))
        number = {t: n for n, t in enumerate(tensors)}
        paths = dict(zip(self.program.inputs, self.program.input_paths, strict=True))
        names = {t: p for t, p in zip(self.program.outputs, self.program.output_paths, strict=True) if isinstance(t, int)}
        place = {t: n for n, t in enumerate(inputs)}
        back = {
            t: self.program.inputs[i]
            for t, i in zip(self.program.outputs, self.program.feedback, strict=True)
            if i is not None and isinstance(t, int)
        }
        program = Program(
            tensors=tuple(replace(self._tensor(t, group), id=n) for t, n in number.items()),
            ops=tuple(
                replace(
                    op,
                    inputs=tuple(number[i] if isinstance(i, int) else i for i in op.inputs),
                    outputs=tuple(number[t] for t in op.outputs),
                )
                for op in ops
            ),
            inputs=tuple(number[t] for t in inputs),
            outputs=tuple(number[t] for t in outputs),
            constants=tuple((number[t], value) for t, value in self.program.constants if t in number),
            input_paths=tuple(paths.get(t, f"received: value {t}") for t in inputs),
            output_paths=tuple(names.get(t, f"{HANDED_ON}value {t}") for t in outputs),
            feedback=tuple(place.get(back[t]) if t in back else None for t in outputs),
            stacks=frozenset(number[t] for t in stacked if t in number),
        )
        return GroupProgram(program, tensors)

    def _tensor(self, t: int, group: int) -> Tensor:
        """A tensor of a group's program."""
        stacks = len(self.program.tensors)
        if t < stacks:
            return self.program.tensors[t]
        own = self.body.tensors[t - stacks]
        return replace(own, shape=(max(1, self._held_beside(t - stacks, group)), *own.shape))

    def _held_beside(self, t: int, group: int) -> int:
        """The most microbatches of a value of the body that a group holds beside the one that it computes.

        With that one, they are those in flight if a later pass reads the value, else one; and one more if it is received.
        """
        if self.in_flight is None:
            return self.count - 1
        inside = self.inside
        own = [
            (kind, segment.chunk, boundary)
            for kind, segment, boundary in zip(self.kinds, inside.segments, inside.boundaries, strict=True)
            if segment.group == group
        ]
        first = [c for kind, c, b in own if kind == "forward" and (t in b.makes or t in b.reads)]
        kept = first and any((kind != "forward" or c != first[0]) and t in b.reads for kind, c, b in own)
        most = self.in_flight[first[0]] if kept else 1
        return min(self.count, most + (inside.assignment.at.get(t, group) != group)) - 1


def loop_of(program: Program) -> Op:
    """The loop over microbatches of a step.

    Raises:
        PlacementError: for a step without one.
    """
    found = [op for op in program.ops if op.control == "scan" and op.scope.split("/")[-1] == MARK]
    if len(found) != 1:
        raise PlacementError("a pipeline needs a loop over microbatches: plan with microbatches=2 or more")
    return found[0]
