"""A step in microbatches on groups of devices, planned: its pieces and tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardplan.graph import flatten
from shardplan.ir import Constant, Layout, Program, Tensor
from shardplan.regions.group_programs import StepSplit
from shardplan.regions.loops import LoopSplit
from shardplan.regions.segment_plans import GroupChoices, segment_piece
from shardplan.regions.tasks import WHOLE, GroupMesh, Key, Piece, PlacedTaskGraph, Result, Task, Transfer
from shardplan.schedule import Ends
from shardplan.search.coarsening.tensor_roles import mark


def looped_graph(split: LoopSplit, groups: Sequence[GroupChoices], donated: frozenset[int]) -> PlacedTaskGraph:
    """The pieces of a step in microbatches with the choices of their groups, and its tasks."""
    builders = [_Group(split, g, own) for g, own in enumerate(groups)]
    pieces: list[Piece] = []
    tasks: list[Task] = []
    for b in builders:
        b.add(pieces, tasks)
    return PlacedTaskGraph(
        tensors=(*split.program.tensors, *split.body.tensors, *_moved_stacks(split)),
        groups=tuple(b.mesh for b in builders),
        pieces=tuple(pieces),
        tasks=tuple(tasks),
        transfers=tuple(_transfers(split)),
        inputs=tuple((split.held[t], (t, WHOLE)) for t in split.program.inputs),
        results=tuple(None if at is None else Result(at[0], (at[1], WHOLE), at[2]) for at in split.after.results),
        donated=donated,
    )


def _moved_stacks(split: LoopSplit) -> list[Tensor]:
    """The stacks of the loop in the layouts in which microbatches are taken out or put in: first those of the inputs of its
    body, then those of its results. Positions without a stack have empty tensors.
    """
    ends = [*map(split.of_outer.get, split.body.inputs), *split.loop.outputs]
    empty = Tensor(-1, (0,), "int8", 1)
    return [split.program.tensors[t] if isinstance(t, int) else empty for t in ends]


def _transfers(split: LoopSplit) -> list[Transfer]:
    """Every transfer of a step, each value once for each group that reads it."""
    at = {**split.held, **split.before.assignment.maker}
    found: dict[tuple[Key, int], Transfer] = {}
    for part in (split.before, split.after):
        for m in part.transfers:
            key = (m.tensor, WHOLE)
            found.setdefault((key, m.target), Transfer(key, m.source, m.target, m.like))
    for t, readers in split.readers.items():
        source = split.of_outer[t]
        for group in readers:
            if isinstance(source, int) and source in at and at[source] != group:
                key = (source, WHOLE)
                found.setdefault((key, group), Transfer(key, at[source], group, source))
    offset = len(split.program.tensors)
    for m in split.inside.transfers:
        for k in range(split.count):
            key = (offset + m.tensor, k)
            found[key, m.target] = Transfer(key, m.source, m.target, offset + m.tensor)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class _Names:
    """The numbers of the tensors of a group's program, and of the body of its loop, by the numbers of the step."""

    outer: Mapping[int, int]
    inner: Mapping[int, int]


class _Group:
    """The pieces and tasks of one group. Tensors of the body have numbers from ``offset`` on in the graph of tasks, except for
    ``shared`` ones: these are tensors of the step, in the same layouts there. ``takes`` has, for each slice of the body, the
    stack that it is taken from and the number of that stack in the layout in which slices are taken without communication;
    ``makes`` has the same for each result of the body and the stack that it is put into.
    """

    def __init__(self, split: LoopSplit, group: int, own: GroupChoices) -> None:
        self.split, self.group, self.own, self.replicate = split, group, own, split.replicate
        self.offset = len(split.program.tensors)
        self.part, self.body = split.group_program(group)
        self.names = _Names(*({t: n for n, t in enumerate(p.tensors)} for p in (self.part, self.body)))
        self.loops = bool(self.body.program.ops)
        self.inner_own = own.below(((split.loop.id, 0),)) if self.loops else own
        layouts = dict(zip(self.part.tensors, own.layouts(), strict=True))
        self.carries = {t: o for t, o in zip(split.carry_inputs, split.body.outputs, strict=False) if t in self.names.inner}
        inner: dict[int, Layout | None] = {}
        if self.loops:
            for t, layout in zip(self.body.tensors, self.inner_own.layouts(), strict=True):
                inner[t] = self._even(layout, split.body.tensors[t])
            for t, o in self.carries.items():
                assert isinstance(o, int), "an accumulator is made by an op"
                inner[o] = inner[t]
        self.inner = inner
        consts = ((t, split.of_outer[t]) for t in split.body.inputs[: split.consts] if t in inner)
        self.shared = {t: s for t, s in consts if isinstance(s, int) and inner[t] == layouts.get(s)}
        beyond = self.offset + len(split.body.tensors)
        self.takes = {
            t: (s, beyond + n)
            for n, t in enumerate(split.body.inputs)
            if n >= split.consts + split.carries and t in inner and isinstance(s := split.of_outer[t], int)
        }
        self.makes = {
            o: (t, beyond + len(split.body.inputs) + n)
            for n, (t, o) in enumerate(zip(split.loop.outputs, split.body.outputs, strict=True))
            if n >= split.carries and isinstance(o, int) and split.held[t] == group
        }
        stacks = {number: self._stacked(t) for own in (self.takes, self.makes) for t, (_, number) in own.items()}
        within = {self.offset + t: at for t, at in inner.items()}
        self.mesh = GroupMesh(split.groups[group], own.cluster, own.factors, layouts | within | stacks)

    def _even(self, layout: Layout | None, tensor: Tensor) -> Layout | None:
        """A layout in which a value crosses between pieces: dims that do not divide are whole."""
        if layout is None:
            return None
        dims: list[tuple[int, ...]] = []
        for n, factors in zip(tensor.shape, layout.dims, strict=True):
            ways = math.prod(self.own.factors[f].size for f in factors)
            dims.append(factors if n % ways == 0 else ())
        return replace(layout, dims=tuple(dims))

    def _stacked(self, t: int) -> Layout | None:
        """The layout of a stack of a value of the body, each in its layout there."""
        at = self.inner[t]
        return None if at is None else replace(at, dims=((), *at.dims))

    def add(self, pieces: list[Piece], tasks: list[Task]) -> None:
        """Adds everything that the group runs."""
        self._outside(self.split.before, "before", pieces, tasks)
        if self.loops:
            self._enter(pieces, tasks)
            self._segments(pieces, tasks)
            self._leave(pieces, tasks)
        self._outside(self.split.after, "after", pieces, tasks)

    def _task(self, piece: Piece, reads: Sequence[Key], makes: Sequence[Key], pieces: list[Piece], tasks: list[Task]) -> None:
        """Adds a piece that runs once."""
        tasks.append(Task(len(pieces), WHOLE, tuple(reads), tuple(makes)))
        pieces.append(piece)

    # -- outside of the loop -------------------------------------------------------------------------------------------

    def _outside(self, split: StepSplit, when: str, pieces: list[Piece], tasks: list[Task]) -> None:
        for n, (segment, boundary) in enumerate(zip(split.segments, split.boundaries, strict=True)):
            if segment.group != self.group:
                continue
            ops = {op.id for op in split.with_free(segment.ops, boundary.makes)}
            program = self._outer(ops, boundary.reads, boundary.makes)
            name = f"segment {n} {when} the loop of group {self.group}"
            piece = segment_piece(name, self.group, program, (boundary.reads, boundary.makes), self.own, None, self.replicate)
            self._task(piece, _whole(boundary.reads), _whole(boundary.makes), pieces, tasks)

    def _outer(self, ops: set[int], reads: Sequence[int], makes: Sequence[int]) -> Program:
        """A part of the group's program."""
        whole, number = self.part.program, self.names.outer
        return replace(
            whole,
            ops=tuple(op for op in whole.ops if op.id in ops and op.id != self.split.loop.id),
            inputs=tuple(number[t] for t in reads),
            outputs=tuple(number[t] for t in makes),
            input_paths=tuple(f"value {t}" for t in reads),
            output_paths=tuple(f"value {t}" for t in makes),
            feedback=(None,) * len(makes),
        )

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _body(self, ops: set[int], reads: Sequence[int], makes: Sequence[int]) -> Program:
        """A part of the body of the group's loop."""
        whole, number = self.body.program, self.names.inner
        return replace(
            whole,
            ops=tuple(op for op in whole.ops if op.id in ops),
            inputs=tuple(number[t] for t in reads),
            outputs=tuple(number[t] for t in makes),
            input_paths=tuple(f"value {t}" for t in reads),
            output_paths=tuple(f"value {t}" for t in makes),
            feedback=(None,) * len(makes),
        )

    def _ends(self, reads: Sequence[int], makes: Sequence[int]) -> Ends:
        """The layouts in which values of the body enter and leave a piece, if they differ from the plan's."""
        number, layouts = self.names.inner, self.inner_own.layouts()
        ins, outs = ({number[t]: self.inner[t] for t in own if self.inner[t] != layouts[number[t]]} for own in (reads, makes))
        return Ends(ins, outs)

    def _enter(self, pieces: list[Piece], tasks: list[Task]) -> None:
        """The values that enter the loop: those that it reads whole, the starts of its accumulators, and the microbatches cut
        out of stacks.
        """
        split, offset = self.split, self.offset
        values = self._starts()
        starts = set(values)
        free = {t: s for t in self.body.inputs if isinstance(s := split.of_outer.get(t), int) and s in split.free}
        made = tuple(dict.fromkeys(s for t, s in free.items() if t not in starts))
        if made:
            ops = {op.id for op in self.part.program.ops if op.id not in split.outer and op.id != split.loop.id}
            piece = segment_piece(
                f"constants of group {self.group}", self.group, self._outer(ops, (), made), ((), made), self.own, None,
                self.replicate,
            )  # fmt: skip
            self._task(piece, (), _whole(made), pieces, tasks)
        if starts:
            own = tuple(sorted(starts))
            made, start = tuple(offset + t for t in own), tuple(values[t] for t in own)
            piece = Piece(f"start of group {self.group}", self.group, (), made, "start", start=start)
            self._task(piece, (), [self._first(t) for t in own], pieces, tasks)
        sliced = set(split.body.inputs[split.consts + split.carries :])
        moved = [
            t for t in self.body.inputs if t in split.of_outer and t not in starts and t not in sliced and t not in self.shared
        ]
        self._moved(moved, pieces, tasks)
        slices: dict[int, list[int]] = {}  # by the chunk that reads them first
        for t in self.body.inputs:
            if t in sliced:
                slices.setdefault(self._first_reader(t), []).append(t)
        for chunk, own in sorted(slices.items()):
            outer = [self._stack_of(t, pieces, tasks) for t in own]
            name, made = f"microbatch of group {self.group}", tuple(offset + t for t in own)
            tasks += [Task(len(pieces), k, _whole(outer), tuple((t, k) for t in made)) for k in range(split.count)]
            pieces.append(Piece(name, self.group, tuple(outer), made, "slice", kind="forward", chunk=chunk))

    def _stack_of(self, t: int, pieces: list[Piece], tasks: list[Task]) -> int:
        """The stack that slices are taken from; it is moved first where it lies in another layout."""
        stack, moved = self.takes[t]
        if self.mesh.layouts.get(stack) == self.mesh.layouts[moved]:
            return stack
        self._move(f"batch of group {self.group}", stack, (stack, moved), pieces, tasks)
        return moved

    def _move(self, name: str, stack: int, ends: tuple[int, int], pieces: list[Piece], tasks: list[Task]) -> None:
        """Moves a stack of the step from the layout of one number to that of another."""
        number = self.names.outer[stack]
        ins, outs = ({number: self.mesh.layouts[end]} for end in ends)
        names = ends[:1], ends[1:]
        piece = segment_piece(
            name, self.group, self._outer(set(), (stack,), (stack,)), names, self.own, Ends(ins, outs), self.replicate
        )
        self._task(piece, _whole(names[0]), _whole(names[1]), pieces, tasks)

    def _first_reader(self, t: int) -> int:
        """The first chunk of the group that reads a slice."""
        pairs = zip(self.split.inside.segments, self.split.inside.boundaries, strict=True)
        return min(s.chunk for s, b in pairs if s.group == self.group and t in b.reads)

    def _starts(self) -> dict[int, Constant]:
        """The inputs of the loop that have one value everywhere: a literal, or the zeros from which an accumulator starts."""
        graph = flatten(self.part.program, replicate=self.replicate)
        roles, numbers = mark(graph), graph.bodies[()]
        found: dict[int, Constant] = {}
        for t in self.body.inputs:
            start = self.split.of_outer.get(t)
            if isinstance(start, Constant):
                found[t] = start
            elif t in self.carries and isinstance(start, int) and numbers[self.names.outer[start]] in roles.zero:
                found[t] = Constant(0, self.split.body.tensors[t].dtype)
        return found

    def _moved(self, inner: Sequence[int], pieces: list[Piece], tasks: list[Task]) -> None:
        """Moves values of the whole step into the layouts in which the loop reads them."""
        outer = [s for t in inner if isinstance(s := self.split.of_outer[t], int)]
        assert len(outer) == len(inner), "a literal is written into the body"
        if not inner:
            return
        number = self.names.inner
        ends = self._ends((), inner)
        ins = {number[t]: self.mesh.layouts.get(s) for t, s in zip(inner, outer, strict=True)}
        reads, makes = tuple(outer), tuple(self.offset + t for t in inner)
        piece = segment_piece(
            f"entry of group {self.group}", self.group, self._body(set(), inner, inner), (reads, makes), self.inner_own,
            Ends(ins, ends.outs), self.replicate,
        )  # fmt: skip
        self._task(piece, _whole(reads), [self._first(t) for t in inner], pieces, tasks)

    def _first(self, t: int) -> Key:
        """An input of the body as it enters the loop."""
        return self.offset + t, 0 if t in self.carries else WHOLE

    def _segments(self, pieces: list[Piece], tasks: list[Task]) -> None:
        """The segments of the body, each once for every microbatch."""
        inside, offset = self.split.inside, self.offset
        nexts = {o: t for t, o in self.carries.items() if isinstance(o, int)}
        whole = set(self.split.body.inputs[: self.split.consts])
        for n, (segment, boundary) in enumerate(zip(inside.segments, inside.boundaries, strict=True)):
            if segment.group != self.group:
                continue
            reads, makes = boundary.reads, boundary.makes
            ops = {op.id for op in inside.with_free(segment.ops, makes)}
            program, ends = self._body(ops, reads, makes), self._ends(reads, makes)
            names = tuple(self.shared.get(t, offset + t) for t in reads), tuple(offset + nexts.get(t, t) for t in makes)
            name = f"segment {n} of group {self.group}"
            piece = segment_piece(name, self.group, program, names, self.inner_own, ends, self.replicate)
            number = len(pieces)
            pieces.append(replace(piece, kind=self.split.kinds[n], chunk=segment.chunk))
            for k in range(self.split.count):
                read = tuple((own, WHOLE if t in whole else k) for own, t in zip(names[0], reads, strict=True))
                made = tuple((offset + nexts[t], k + 1) if t in nexts else (offset + t, k) for t in makes)
                tasks.append(Task(number, k, read, made))

    def _leave(self, pieces: list[Piece], tasks: list[Task]) -> None:
        """The results of the loop: its accumulators in the layouts outside, and stacks of the values that it makes in each
        microbatch.
        """
        split, offset = self.split, self.offset
        carried = list(self.carries)
        outer = [split.loop.outputs[split.carry_inputs.index(t)] for t in carried]
        if carried:
            number = self.names.inner
            ends = self._ends(carried, ())
            outs = {number[t]: self.mesh.layouts.get(s) for t, s in zip(carried, outer, strict=True)}
            names = tuple(offset + t for t in carried), tuple(outer)
            piece = segment_piece(
                f"totals of group {self.group}", self.group, self._body(set(), carried, carried), names, self.inner_own,
                Ends(ends.ins, outs), self.replicate,
            )  # fmt: skip
            self._task(piece, [(offset + t, split.count) for t in carried], _whole(outer), pieces, tasks)
        for o, (stack, made) in self.makes.items():
            alike = self.mesh.layouts.get(stack) == self.mesh.layouts[made]
            end = stack if alike else made
            piece = Piece(f"stack of group {self.group}", self.group, (offset + o,) * split.count, (end,), "stack")
            self._task(piece, [(offset + o, k) for k in range(split.count)], _whole((end,)), pieces, tasks)
            if not alike:
                self._move(f"results of group {self.group}", stack, (made, stack), pieces, tasks)


def _whole(tensors: Sequence[int]) -> tuple[Key, ...]:
    return tuple((t, WHOLE) for t in tensors)
