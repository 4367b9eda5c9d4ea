"""From a plan's choices to the instructions of a device, op by op.

The step's ops are walked in their order. An op with a use has its operands moved into the layouts that it needs, computes on
shares, and its results are moved into the layouts they are stored in; an op inside a group of one layout follows its results.
Values that depend on no input are made where they are read, in the reader's layout. A copy that several ops read is made at its
first reader; one for the backward pass is tied to a value of that pass by a barrier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from shardplan.collectives.step import Step
from shardplan.errors import ShardplanError
from shardplan.graph import Node
from shardplan.ir import PAIRS, Collective, Constant, Layout, Op, Program, Reducer, Use, Where
from shardplan.schedule.cuts import Cuts, operand_layouts, reducer_of, taking, whole_layout
from shardplan.schedule.frame import Frame, Later, only_empty, waiting
from shardplan.schedule.instructions import (
    Block,
    Compute,
    Cond,
    Cut,
    Fill,
    Move,
    Scan,
    Source,
    While,
)
from shardplan.schedule.planned import PlannedProgram


class Builder:
    """Spells out programs and bodies for a planned step; `shardplan.schedule.spelling` uses it."""

    def __init__(self, planned: PlannedProgram) -> None:
        self.planned, self.graph, self.cuts = planned, planned.graph, Cuts(planned.sizes)
        self.count = 0
        self.arguments: frozenset[int] = frozenset()
        self.layouts: dict[int, Layout | None] = {}

    def new(self) -> int:
        """The number of a new value."""
        self.count += 1
        return self.count - 1

    # -- bodies ------------------------------------------------------------------------------------------------------

    def run(self, frame: Frame, program: Program, arguments: Sequence[Source]) -> list[Source]:
        """Spells out a program or a body on these arguments; its results."""
        for t, value in program.constants:
            frame.values[t] = Constant(value, program.tensors[t].dtype)
        frame.values.update(zip(program.inputs, arguments, strict=True))
        self.layouts |= {x: self.layout(frame, t) for t, x in zip(program.inputs, arguments, strict=True) if isinstance(x, int)}
        frame.waiting = waiting(program)
        for op in program.ops:
            self.step(frame, op)
        return [self.value(frame, o) for o in program.outputs]

    def layout(self, frame: Frame, local: int) -> Layout | None:
        """The stored layout of a tensor of a frame's program."""
        return self.planned.layouts[frame.ids[local]]

    def value(self, frame: Frame, operand: int | Constant) -> Source:
        """A tensor in its stored layout; a free one whole."""
        if isinstance(operand, Constant):
            return operand
        value = frame.values[operand]
        return self.force(frame, operand, value, None) if isinstance(value, Later) else value

    def force(self, frame: Frame, local: int, later: Later, layout: Layout | None) -> Source:
        """A free value in a layout (None: whole), made anew for each layout that reads it."""
        node = self.planned.nodes[frame.where, later.op.id]
        key = (local, layout)
        if key in frame.free:
            return frame.free[key]
        inside = None if layout is None or layout.partial else self.cuts.following(node, layout)
        cuts = inside or ()
        wanted = operand_layouts(node, cuts, self.planned.names)
        inputs: list[Source] = []
        whole: set[int] = set()
        for slot, i in enumerate(later.op.inputs):
            value = frame.values[i] if isinstance(i, int) else i
            if isinstance(value, Later):
                assert isinstance(i, int)
                value = self.force(frame, i, value, wanted[slot])
                whole |= {slot} if wanted[slot] is None else set()
            else:
                whole.add(slot)
            inputs.append(value)
        results = tuple(self.new() for _ in later.op.outputs)
        frame.out.append(Compute(node, tuple(inputs), results, taking(cuts, whole)))
        made: Source = results[later.result]
        self.layouts[made] = layout if inside is not None else None
        if layout is not None and inside is None:
            assert not layout.partial, "a term of a sum is made by an op that hands terms on"
            made = self.move(frame, made, frame.ids[local], whole_layout(layout), layout, node.op.source)
        frame.free[key] = made
        return made

    # -- ops ---------------------------------------------------------------------------------------------------------

    def step(self, frame: Frame, op: Op) -> None:
        """Spells out one op of a frame."""
        match op.control:
            case "scan":
                self.scan(frame, op)
            case "while":
                self.while_(frame, op)
            case "cond":
                self.cond(frame, op)
            case "remat":
                self.remat(frame, op)
            case None:
                self.plain(frame, op)

    def plain(self, frame: Frame, op: Op) -> None:
        """An op without a body."""
        if self._is_free(frame, op):
            frame.values.update((t, Later(op, r)) for r, t in enumerate(op.outputs))
            return
        if only_empty(op, [self.graph.tensors[frame.ids[t]] for t in op.outputs]):
            self.empty(frame, op)
            return
        node = self.planned.nodes[frame.where, op.id]
        use = self.planned.uses.get(node.id)
        if use is not None:
            self.used(frame, node, use)
            return
        layouts = [self.layout(frame, t) for t in op.outputs]
        layout = next((at for at in layouts if at is not None), None)
        cuts = () if layout is None else self.cuts.following(node, layout)
        inputs, whole = self.read(frame, node, cuts or (), None)
        results = tuple(self.new() for _ in op.outputs)
        frame.out.append(Compute(node, tuple(inputs), results, taking(cuts or (), whole), op.acts))
        self.layouts |= zip(results, [None] * len(layouts) if op.acts or cuts is None else layouts, strict=True)
        frame.values.update(zip(op.outputs, results, strict=True))
        if op.acts:
            self.told(frame, op, results, layouts)
        elif cuts is None:
            assert len(whole) == len(inputs), "an op inside a group reads at its own index"
            for t, x, at in zip(op.outputs, results, layouts, strict=True):
                frame.values[t] = self.move(frame, x, frame.ids[t], None, at, op.source)

    def empty(self, frame: Frame, op: Op) -> None:
        """An op without elements in its results: nothing is moved for it."""
        frame.values.update((t, self.zeros(frame, t, self.layout(frame, t))) for t in op.outputs)

    def zeros(self, frame: Frame, local: int, layout: Layout | None) -> int:
        """Zeros: for a sum to which nothing has been added yet, or for a value without elements, whose op reads nothing."""
        result, shape = self.new(), self.shape(frame, local)
        frame.out.append(Fill(result, frame.ids[local], shape, layout or Layout.whole(len(shape))))
        return result

    def used(self, frame: Frame, node: Node, use: Use) -> None:
        """An op that is cut as a plan says: operands moved to where it needs them, results to where they are stored."""
        op, cuts = node.op, self.cuts.planned(node, use)
        inputs, whole = self.read(frame, node, cuts, use)
        cuts = taking(cuts, whole)
        if terms := {i: need.partial for i, need in enumerate(use.needs) if need is not None and need.partial}:
            cuts = tuple(
                replace(c, terms=frozenset(i for i, fs in terms.items() if not set(fs).isdisjoint(c.factors))) for c in cuts
            )
        reducer = reducer_of(node, use)
        paired = reducer in PAIRS
        results = tuple(self.new() for _ in range(len(op.outputs) + paired))
        frame.out.append(Compute(node, tuple(inputs), results, cuts, op.acts))
        if op.acts:
            self.told(frame, op, results, use.stored)
            return
        for r, t in enumerate(op.outputs):
            give, stored = use.gives[r], use.stored[r]
            target = stored if stored is not None else Layout.whole(len(self.shape(frame, t)))
            frame.values[t] = self.move(
                frame, results[r], frame.ids[t], give, target, op.source, reducer, extreme=results[-1] if paired else None
            )

    def read(self, frame: Frame, node: Node, cuts: Sequence[Cut], use: Use | None) -> tuple[list[Source], set[int]]:
        """The operands of an op with these cuts, moved as ``use`` says, and the slots of those that every device has whole."""
        inputs: list[Source] = []
        whole: set[int] = set()
        for slot, i in enumerate(node.op.inputs):
            value = frame.values[i] if isinstance(i, int) else i
            if isinstance(value, Later):
                assert isinstance(i, int)
                wanted = operand_layouts(node, cuts, self.planned.names)[slot]
                value = self.force(frame, i, value, wanted)
                whole |= {slot} if wanted is None else set()
            elif not isinstance(i, int) or (self.layout(frame, i) if use is None else use.needs[slot]) is None:
                whole.add(slot)
                if node.signature.manual is not None and isinstance(i, int):
                    wanted = operand_layouts(node, cuts, self.planned.names)[slot]
                    value = self.move(frame, value, frame.ids[i], None, wanted, node.op.source)
            elif use is not None:
                value = self.operand(frame, node, use, slot, i)
            inputs.append(value)
        return inputs, whole

    def told(self, frame: Frame, op: Op, results: Sequence[int], layouts: Sequence[Layout | None]) -> None:
        """Gives the results of an op with effects, which only the first device has, to all devices, as sums with zeros."""
        if op.ordered and math.prod(self.planned.sizes) > 1:
            raise ShardplanError(
                f"{op.primitive} at {op.source} is ordered, which JAX allows on one device alone: use ordered=False"
            )
        everywhere = tuple(range(len(self.planned.sizes)))
        for t, value, layout in zip(op.outputs, results, layouts, strict=True):
            tensor = self.graph.tensors[frame.ids[t]]
            whole = ((),) * len(tensor.shape)
            reducer: Reducer = "or" if tensor.dtype == "bool" else "sum"
            target = Layout(whole) if layout is None else layout
            frame.values[t] = self.move(frame, value, frame.ids[t], Layout(whole, everywhere), target, op.source, reducer)

    def shape(self, frame: Frame, local: int) -> tuple[int, ...]:
        """The whole shape of a tensor of a frame's program."""
        return self.graph.tensors[frame.ids[local]].shape

    def _follows(self, frame: Frame, operand: int | Constant) -> bool:
        """Whether an operand has no layout of its own: a literal, a scalar, or a value that depends on no argument."""
        return not isinstance(operand, int) or self.layout(frame, operand) is None

    def _is_free(self, frame: Frame, op: Op) -> bool:
        """Whether the op makes values (not scalars) that depend on no input."""
        makes = all(self._follows(frame, t) and math.prod(self.shape(frame, t)) > 1 for t in op.outputs)
        return makes and not op.handle.effects and all(self._follows(frame, i) for i in op.inputs)

    # -- moves -------------------------------------------------------------------------------------------------------

    def operand(self, frame: Frame, node: Node, use: Use, slot: int, local: int) -> Source:
        """An operand in the layout that the op needs, through the copy that it reads."""
        need, at = use.needs[slot], self.layout(frame, local)
        value = frame.values[local]
        assert need is not None
        assert at is not None
        if isinstance(value, Constant):
            assert not at.used, "what is cut is no literal"
            value = frame.values[local] = self.literal(frame, value, frame.ids[local])
        assert isinstance(value, int)
        number = self.planned.reads.get((node.id, slot))
        if number is not None:
            key = number, frame.ids[local]
            if key not in frame.copies:
                frame.copies[key] = self.copy(frame, node, number, value, at, local)
            value, at = frame.copies[key], self.planned.copies[number].layout
        if at != need:
            first = frame.moved.setdefault((value, need), node.backward)
            if node.backward and not first:
                value = self.tied(frame, node, value, local)  # the copy of the forward pass is not kept until now
                frame.moved[value, need] = True
        return self.move(frame, value, frame.ids[local], at, need, node.op.source)

    def tied(self, frame: Frame, node: Node, value: int, local: int) -> int:
        """A value behind a barrier, so that it is not moved long before another operand of an op is there."""
        if value in frame.ties.behind:
            return value
        others = (frame.values[i] for i in node.op.inputs if isinstance(i, int) and i != local)
        late = next((x for x in others if isinstance(x, int)), None)
        return value if late is None else frame.ties.tie(frame.out, value, late, self.new)

    def copy(self, frame: Frame, node: Node, number: int, value: int, at: Layout, local: int) -> int:
        """The resharded copy that several ops read, made at its first reader."""
        copy = self.planned.copies[number]
        origin = (copy.source, frame.ids[local])
        if origin in frame.copies:
            assert copy.source is not None
            value, at = frame.copies[origin], self.planned.copies[copy.source].layout
        elif copy.backward and copy.layout != at:
            value = self.tied(frame, node, value, local)  # so that the forward copy is not kept in its place
        moved = self.move(frame, value, frame.ids[local], at, copy.layout, node.op.source)
        assert isinstance(moved, int)
        return moved

    def move(
        self,
        frame: Frame,
        value: Source,
        tensor: int,
        before: Layout | None,
        after: Layout | None,
        line: str,
        reducer: Reducer = "sum",
        *,
        extreme: int | None = None,
    ) -> Source:
        """A value of a tensor in another layout (None: whole)."""
        if before is None and after is None:
            return value
        shape = self.graph.tensors[tensor].shape
        whole = Layout.whole(len(shape))
        before, after = before or whole, after or whole
        if before == after:
            return value
        if isinstance(value, Constant):
            value = self.literal(frame, value, tensor)
        result = self.new()
        steps = self._steps(shape, self.graph.tensors[tensor].nbytes, before, after, paired=extreme is not None)
        frame.out.append(Move(value, result, tensor, shape, before, after, steps, line, reducer, extreme))
        return result

    def _steps(self, shape: tuple[int, ...], nbytes: int, before: Layout, after: Layout, *, paired: bool) -> tuple[Step, ...]:
        """The planned steps; pairs are reduced first, by one all-reduce, since their places and extremes travel together."""
        between = self.planned.programs.between
        if not paired or not before.partial:
            return between(shape, nbytes, before, after)
        reduced = replace(before, partial=())
        over = tuple(sorted(before.partial))
        local = nbytes / math.prod(self.planned.sizes[f] for f in before.used)
        seconds = self.planned.programs.resharder.seconds(Collective.ALL_REDUCE, over, local)
        return (Step(Collective.ALL_REDUCE, over, local, before, reduced, seconds), *between(shape, nbytes, reduced, after))

    def literal(self, frame: Frame, value: Constant, tensor: int) -> int:
        """A constant as a value that can be moved."""
        result = self.new()
        frame.out.append(Fill(result, tensor, self.graph.tensors[tensor].shape, None, value))
        return result

    # -- control flow ------------------------------------------------------------------------------------------------

    def inner(self, frame: Frame, op: Op, body: int) -> Frame:
        """The frame of a body that may run another number of times: it has no copies of its own yet, and sees outer values."""
        where: Where = (*frame.where, (op.id, body))
        return Frame(where, self.graph.bodies[where], [])

    def entering(
        self, frame: Frame, op: Op, skip: int, inside: Frame, inner: Sequence[int], stacked_from: int, fixed: int = 0
    ) -> list[Source]:
        """The operands of a body in the layouts of its inputs; from ``stacked_from`` on they are stacked over the loop.

        Zeros stand for the free values among the first ``fixed``: `remade` makes those inside.
        """
        values: list[Source] = []
        for i, (operand, t) in enumerate(zip(op.inputs[skip:], inner, strict=True)):
            if i < fixed and self._later(frame, operand):
                values.append(Constant(0, "int32"))
                continue
            target = self.layout(inside, t)
            value = self.value(frame, operand)
            if isinstance(operand, int):
                at = self.layout(frame, operand)
                wanted = Layout(((), *target.dims), target.partial) if target is not None and i >= stacked_from else target
                if wanted is not None and wanted.partial and at is None:
                    value = self.zeros(frame, operand, wanted)
                else:
                    value = self.move(frame, value, frame.ids[operand], at, wanted, op.source)
            values.append(value)
        return values

    def handed(self, frame: Frame, inside: Frame, value: Source, local: int | Constant, to: Layout | None, tensor: int) -> Source:
        """A result of a body, in the layout in which it leaves the body."""
        before = self.layout(inside, local) if isinstance(local, int) else None
        return self.move(frame, value, tensor, before, to, "loop")

    def scan(self, frame: Frame, op: Op) -> None:
        """A scan. Its body reads values that do not change from outside, and makes free values among them itself."""
        body = op.bodies[0]
        consts, carry = int(op.params["num_consts"]), int(op.params["num_carry"])
        inside = self.inner(frame, op, 0)
        values = self.entering(frame, op, 0, inside, body.inputs, consts + carry, consts)
        start, stacked = values[consts : consts + carry], values[consts + carry :]
        parameters = [self.new() for _ in body.inputs[consts:]]
        arguments = [*self.remade(frame, inside, op, values[:consts], body.inputs[:consts]), *parameters]
        results = self.run(inside, body, arguments)
        entry = body.inputs[consts : consts + carry]
        after = [
            self.handed(inside, inside, x, o, self.layout(inside, t), inside.ids[t])
            for x, o, t in zip(results[:carry], body.outputs, entry, strict=False)
        ]
        block = Block(tuple(parameters), tuple(inside.out), (*after, *results[carry:]))
        made = tuple(self.new() for _ in op.outputs)
        frame.out.append(Scan(op, tuple(start), tuple(stacked), block, made))
        for n, (t, value) in enumerate(zip(op.outputs, made, strict=True)):
            tensor = frame.ids[t]
            if n < carry:
                left = self.layout(inside, entry[n])
            else:
                o = body.outputs[n]
                inner_layout = self.layout(inside, o) if isinstance(o, int) else None
                left = None if inner_layout is None else Layout(((), *inner_layout.dims), inner_layout.partial)
            self.layouts[value] = left
            frame.values[t] = self.move(frame, value, tensor, left, self.layout(frame, t), op.source)

    def _later(self, frame: Frame, operand: int | Constant) -> bool:
        return isinstance(operand, int) and isinstance(frame.values[operand], Later)

    def remade(self, frame: Frame, inside: Frame, op: Op, fixed: Sequence[Source], inner: Sequence[int]) -> list[Source]:
        """The values that do not change in a loop. Free values among them are made in its body: there they take no memory
        outside.
        """
        here = replace(frame, out=inside.out, free={})
        found: list[Source] = []
        for operand, value, t in zip(op.inputs, fixed, inner, strict=False):
            later = frame.values[operand] if isinstance(operand, int) else None
            if isinstance(later, Later):
                assert isinstance(operand, int)
                value = self.force(here, operand, later, self.layout(inside, t))
            found.append(value)
        return found

    def while_(self, frame: Frame, op: Op) -> None:
        """A while loop. Under ``vmap`` it runs while any test holds, and changes only the elements for which it holds."""
        test, body = op.bodies
        a, b = int(op.params["cond_nconsts"]), int(op.params["body_nconsts"])
        inside, at_test = self.inner(frame, op, 1), self.inner(frame, op, 0)
        values = self.entering(frame, op, a, inside, body.inputs, len(body.inputs))
        fixed, start = values[:b], values[b:]
        batched = isinstance(test.outputs[0], int) and bool(test.tensors[test.outputs[0]].shape)
        tested = [self.value(frame, i) for i in op.inputs[:a]]
        parameters = [self.new() for _ in start]
        (holds,) = self.run(at_test, test, [*tested, *parameters])
        at = self.layout(at_test, test.outputs[0]) if isinstance(test.outputs[0], int) else None
        if batched:
            assert isinstance(test.outputs[0], int)
            holds = self.move(at_test, holds, at_test.ids[test.outputs[0]], at, None, op.source)
        carried = [self.new() for _ in start]
        results = self.run(inside, body, [*fixed, *carried])
        after = [
            self.handed(inside, inside, x, o, self.layout(inside, t), inside.ids[t])
            for x, o, t in zip(results, body.outputs, body.inputs[b:], strict=True)
        ]
        made = tuple(self.new() for _ in op.outputs)
        test_block = Block(tuple(parameters), tuple(at_test.out), (holds,))
        block = Block(tuple(carried), tuple(inside.out), tuple(after))
        entries = tuple(self.layout(inside, t) for t in body.inputs[b:]) if batched else ()
        shapes = tuple(self.shape(inside, t) for t in body.inputs[b:]) if batched else ()
        frame.out.append(While(op, tuple(start), test_block, block, made, batched, shapes, entries))
        for t, value, entry in zip(op.outputs, made, body.inputs[b:], strict=True):
            self.layouts[value] = left = self.layout(inside, entry)
            frame.values[t] = self.move(frame, value, frame.ids[t], left, self.layout(frame, t), op.source)

    def cond(self, frame: Frame, op: Op) -> None:
        """A conditional; every branch leaves its results in the layouts outside."""
        arguments = [self.value(frame, i) for i in op.inputs[1:]]
        branches: list[Block] = []
        for number, body in enumerate(op.bodies):
            inside = self.inner(frame, op, number)
            parameters = [self.new() for _ in arguments]
            results = self.run(inside, body, parameters)
            left = [
                self.handed(inside, inside, x, o, self.layout(frame, t), frame.ids[t])
                for x, o, t in zip(results, body.outputs, op.outputs, strict=True)
            ]
            branches.append(Block(tuple(parameters), tuple(inside.out), tuple(left)))
        made = tuple(self.new() for _ in op.outputs)
        index = None if op.params.get("branches_platforms") is not None else self.value(frame, op.inputs[0])
        frame.out.append(Cond(op, index, tuple(arguments), tuple(branches), made))
        self.layouts |= {x: self.layout(frame, t) for t, x in zip(op.outputs, made, strict=True)}
        frame.values.update(zip(op.outputs, made, strict=True))

    def remat(self, frame: Frame, op: Op) -> None:
        """A differentiated remat is its body behind a barrier, as JAX lowers it: so saved and recomputed values stay apart.

        The barrier waits for the values that the backward pass has made since the barrier before, unmoved: a compiler that
        delays gradients of weights would keep their operands, block after block.
        """
        body = op.bodies[0]
        where: Where = (*frame.where, (op.id, 0))
        values = [self.value(frame, i) for i in op.inputs]
        copies = dict(frame.copies)
        if op.again:
            # resharded copies of its inputs go through the barrier as well: otherwise the body would read the copies from before
            # it
            entered = {frame.ids[i] for i in op.inputs if isinstance(i, int)}
            entering = {key: x for key, x in frame.copies.items() if key[1] in entered}
            early = frame.ties.entered(frame.out, [x for x in values if isinstance(x, int) and x in self.arguments], self.new)
            own = [x for x in values if isinstance(x, int) and x not in early]
            read = body.returned.union(*(inner.tensors for inner in body.ops))
            late = [x for i, x in zip(body.inputs, values, strict=True) if i not in read]
            late += [frame.values[t] for t in frame.waiting.get(op.id, ())]
            behind = frame.ties.held(frame.out, [*own, *entering.values()], [x for x in late if isinstance(x, int)], self.new)
            renamed = dict(zip(own, behind, strict=False)) | early
            values = [renamed[x] if isinstance(x, int) else x for x in values]
            copies |= dict(zip(entering, behind[len(own) :], strict=False))
        inside = Frame(where, self.graph.bodies[where], frame.out, copies=copies, moved=frame.moved, ties=frame.ties)
        results = self.run(inside, body, values)
        frame.copies.update({key: x for key, x in inside.copies.items() if key not in frame.copies})
        for t, o, value in zip(op.outputs, body.outputs, results, strict=True):
            frame.values[t] = self.handed(frame, inside, value, o, self.layout(frame, t), frame.ids[t])
