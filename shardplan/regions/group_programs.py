"""The programs of a placed step: one for each group, to plan its ops together, and one for each segment, to run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardplan.errors import PlacementError
from shardplan.graph.updates import HANDED_ON
from shardplan.ir import Op, Operand, Program
from shardplan.regions.assignment import Assignment
from shardplan.regions.segments import Segment, segments_of


@dataclass(frozen=True, slots=True)
class SentTensor:
    """A tensor of the step that goes from one group to another. There it has the layout of tensor ``like``: itself, or the
    input held there whose next value it is.
    """

    tensor: int
    source: int
    target: int
    like: int


@dataclass(frozen=True, slots=True)
class GroupProgram:
    """A program of some ops of a step. Its tensor n is the tensor ``tensors[n]`` of the step."""

    program: Program
    tensors: tuple[int, ...]

    @property
    def inputs(self) -> tuple[int, ...]:
        """The tensors of the step that are its inputs."""
        return tuple(self.tensors[t] for t in self.program.inputs)

    @property
    def outputs(self) -> tuple[int, ...]:
        """The tensors of the step that are its outputs."""
        return tuple(self.tensors[t] for t in self.program.outputs if isinstance(t, int))


@dataclass(frozen=True, slots=True)
class Boundary:
    """The tensors of the step that a segment reads from outside, and those that it makes for others."""

    reads: tuple[int, ...]
    makes: tuple[int, ...]


@dataclass(frozen=True)
class StepSplit:
    """A step cut into segments, in an order in which they may run."""

    assignment: Assignment
    segments: tuple[Segment, ...]

    @cached_property
    def transfers(self) -> tuple[SentTensor, ...]:
        """The transfers between groups: each tensor once for each group that reads it."""
        assignment, program = self.assignment, self.assignment.program
        found: dict[tuple[int, int], SentTensor] = {}  # by tensor and target
        for op in program.ops:
            group = assignment.of.get(op.id)
            for t in op.tensors:
                if group is not None and assignment.at.get(t, group) != group:
                    found[t, group] = SentTensor(t, assignment.at[t], group, t)
        for t, i in zip(program.outputs, program.feedback, strict=True):
            if i is not None and isinstance(t, int) and t in assignment.at:
                source, target = assignment.at[t], assignment.home[program.inputs[i]]
                if source != target:
                    found.setdefault((t, target), SentTensor(t, source, target, program.inputs[i]))
        return tuple(found.values())

    @cached_property
    def results(self) -> tuple[tuple[int, int, int] | None, ...]:
        """For each output of the step, (the group that holds it in the end, its tensor, the tensor whose layout it has there);
        None for a literal.
        """
        program, at, home = self.assignment.program, self.assignment.at, self.assignment.home
        found: list[tuple[int, int, int] | None] = []
        for t, i in zip(program.outputs, program.feedback, strict=True):
            if not isinstance(t, int):
                found.append(None)
            elif t not in at:
                found.append((self.segments[0].group if self.segments else 0, t, t))
            else:
                found.append((at[t], t, t) if i is None else (home[program.inputs[i]], t, program.inputs[i]))
        return tuple(found)

    @cached_property
    def boundaries(self) -> tuple[Boundary, ...]:
        """The boundary of each segment. The first one also makes the results of the step that depend on no input."""
        at, returned = self.assignment.at, self.assignment.program.returned
        ops = [[self.op[i] for i in s.ops] for s in self.segments]
        maker = {t: n for n, own in enumerate(ops) for op in own for t in op.outputs}
        known = at.keys() | self.assignment.everywhere
        read = [dict.fromkeys(t for op in own for t in op.tensors if t in known) for own in ops]
        reads = [tuple(t for t in own if maker.get(t) != n) for n, own in enumerate(read)]
        used = {t for own in reads for t in own} | returned
        makes = [tuple(t for op in own for t in op.outputs if t in used) for own in ops]
        if makes:
            makes[0] += tuple(sorted(t for t in returned if t not in known))
        return tuple(Boundary(*pair) for pair in zip(reads, makes, strict=True))

    @cached_property
    def group_parts(self) -> tuple[GroupProgram, ...]:
        """The program of each group. A value that leaves a segment is a result, with the layout of one."""
        return tuple(map(self._group_part, range(len(self.assignment.groups))))

    @cached_property
    def segment_parts(self) -> tuple[GroupProgram, ...]:
        """The program of each segment, with the tensors and ops of its group's program."""
        return tuple(map(self._segment_part, self.segments, self.boundaries))

    @cached_property
    def op(self) -> Mapping[int, Op]:
        """The ops of the step, by id."""
        return {op.id: op for op in self.assignment.program.ops}

    def _group_part(self, group: int) -> GroupProgram:
        own = [n for n, s in enumerate(self.segments) if s.group == group]
        makes = tuple(dict.fromkeys(t for n in own for t in self.boundaries[n].makes))
        reads = dict.fromkeys(t for n in own for t in self.boundaries[n].reads)
        held = [t for t in self.assignment.program.inputs if self.assignment.home.get(t) == group]
        received = [t for t in reads if self.assignment.at.get(t, group) != group]
        return self.part({i for n in own for i in self.segments[n].ops}, (*held, *received), makes)

    def part(self, ids: Collection[int], inputs: Sequence[int], outputs: Sequence[int]) -> GroupProgram:
        """The program of some ops and of the free ops that they read, with its tensors renumbered."""
        program = self.assignment.program
        ops = self.with_free(ids, outputs)
        tensors = tuple(dict.fromkeys((*inputs, *(t for op in ops for t in (*op.tensors, *op.outputs)), *outputs)))
        number = {t: n for n, t in enumerate(tensors)}
        made = {t: f"{op.primitive} at {op.source}" for op in program.ops for t in op.outputs}
        handed_on = {t: HANDED_ON + text for t, text in made.items()}
        paths = dict(zip(program.inputs, program.input_paths, strict=True))
        returned = sorted(enumerate(program.outputs), key=lambda row: program.feedback[row[0]] is not None)
        results = {t: n for n, t in returned if isinstance(t, int)}  # preferably as the next value of an input
        place = {t: n for n, t in enumerate(inputs)}
        replaced = {t: program.inputs[i] for t, n in results.items() if (i := program.feedback[n]) is not None}
        return GroupProgram(
            Program(
                tensors=tuple(replace(program.tensors[t], id=n) for t, n in number.items()),
                ops=tuple(
                    replace(op, inputs=_numbered(op.inputs, number), outputs=tuple(number[t] for t in op.outputs)) for op in ops
                ),
                inputs=tuple(number[t] for t in inputs),
                outputs=tuple(number[t] for t in outputs),
                constants=tuple((number[t], value) for t, value in program.constants if t in number),
                input_paths=tuple(paths[t] if t in paths else f"received: {made[t]}" for t in inputs),
                output_paths=tuple(program.output_paths[results[t]] if t in results else handed_on[t] for t in outputs),
                feedback=tuple(place.get(replaced[t]) if t in replaced else None for t in outputs),
            ),
            tensors,
        )

    def _segment_part(self, segment: Segment, boundary: Boundary) -> GroupProgram:
        whole = self.group_parts[segment.group]
        local = {t: n for n, t in enumerate(whole.tensors)}
        ids = {op.id for op in self.with_free(segment.ops, boundary.makes)}
        program = replace(
            whole.program,
            ops=tuple(op for op in whole.program.ops if op.id in ids),
            inputs=tuple(local[t] for t in boundary.reads),
            outputs=tuple(local[t] for t in boundary.makes),
            input_paths=tuple(f"value {t}" for t in boundary.reads),
            output_paths=tuple(f"value {t}" for t in boundary.makes),
            feedback=(None,) * len(boundary.makes),
        )
        return GroupProgram(program, whole.tensors)

    def with_free(self, ids: Collection[int], wanted: Sequence[int]) -> list[Op]:
        """These ops and the free ops that they or some wanted tensors need, in the order of the step."""
        needed, kept = set(wanted), list[Op]()
        of = self.assignment.of
        for op in reversed(self.assignment.program.ops):
            if op.id in ids or (op.id not in of and not needed.isdisjoint(op.outputs)):
                kept.append(op)
                needed.update(op.tensors)
        return kept[::-1]


def split(assignment: Assignment) -> StepSplit:
    """A placed step cut into segments.

    Raises:
        PlacementError: if no op of the step depends on an input.
    """
    segments = segments_of(assignment)
    if not segments:
        raise PlacementError("no op of this step depends on its arguments, so there is nothing to place")
    return StepSplit(assignment, segments)


def _numbered(operands: Sequence[Operand], number: Mapping[int, int]) -> tuple[Operand, ...]:
    return tuple(number[i] if isinstance(i, int) else i for i in operands)
