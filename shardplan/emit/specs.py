"""The ``specs`` backend: the step evaluated again under sharding constraints, which XLA's partitioner turns into collectives.

Each op with a table of its own has its operands constrained to the layouts that its strategy needs, and its results to their
stored layouts. This holds in the forward and the backward pass and inside loop bodies; elementwise ops in between follow. Values
that depend on no input are computed anew for each layout in which they are read. A weight that is gathered again for the backward
pass goes through an optimization barrier, so that XLA cannot reuse the first copy. Partial sums that are kept are arrays of their
terms (`emit.stacked`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardplan import _jax
from shardplan.emit.calls import Exchanges, Pairs, Share, on_shares, reduced
from shardplan.emit.extremes import as_floats, as_integers
from shardplan.emit.shares import share_of
from shardplan.emit.stacked import map_terms, partition_spec, stacked_shape, summed, term_factors
from shardplan.emit.stepping import steps_to
from shardplan.graph import Node
from shardplan.ir import Constant, Layout, Op, Program, Reducer, Use, Where
from shardplan.schedule.planned import PlannedProgram
from shardplan.tdl.rewrite import cuttable, in_row_major_order
from shardplan.tdl.xla_quirks import loses_nan


@dataclass(frozen=True, slots=True)
class _Later:
    """A free value: it depends on no input and is computed when it is read."""

    op: Op
    result: int


@dataclass(slots=True)
class _Frame:
    """The values of one program; ``copies`` holds resharded copies by number and tensor, ``made`` free values by layout."""

    where: Where
    ids: tuple[int, ...]
    values: dict[int, Any]
    copies: dict[tuple[int | None, int], Any]
    made: dict[tuple[int, Layout | None], Any]


class SpecsEmitter:
    """Evaluates a traced program under the constraints of a plan on one mesh."""

    def __init__(self, planned: PlannedProgram, mesh: Mesh) -> None:
        self.planned, self.mesh = planned, mesh

    def __call__(self, *flat: Any) -> list[Any]:
        """The step on flat arguments; flat results."""
        with _jax.on_mesh(self.mesh):
            return self.run(self.planned.program, (), flat)

    def constrain(self, x: Any, layout: Layout | None) -> Any:
        """A value constrained to a layout; unchanged if it is a scalar or has no layout."""
        if layout is None or not np.ndim(x):
            return x
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, partition_spec(layout, self.planned.names)))

    # -- programs ----------------------------------------------------------------------------------------------------

    def run(
        self, program: Program, where: Where, arguments: Sequence[Any], copies: dict[tuple[int | None, int], Any] | None = None
    ) -> list[Any]:
        """Evaluates a program or a body; a body that runs once shares the ``copies`` of the program around it."""
        frame = _Frame(where, self.planned.graph.bodies[where], {}, {} if copies is None else copies, {})
        for t, value in program.constants:
            frame.values[t] = value
        for t, value in zip(program.inputs, arguments, strict=True):
            frame.values[t] = self.constrain(value, self.layout(frame, t))
        for op in program.ops:
            self.step(frame, op)
        return [self.value(frame, o) for o in program.outputs]

    def layout(self, frame: _Frame, local: int) -> Layout | None:
        """The stored layout of a tensor of a frame's program."""
        return self.planned.layouts[frame.ids[local]]

    def value(self, frame: _Frame, operand: int | Constant) -> Any:
        """The value of an operand: a tensor in its stored layout, a free value in none."""
        if isinstance(operand, Constant):
            return jax.numpy.asarray(operand.value, dtype=operand.dtype) if np.ndim(operand.value) == 0 else operand.value
        found = frame.values[operand]
        return self.force(frame, operand, found, None) if isinstance(found, _Later) else found

    def force(self, frame: _Frame, local: int, later: _Later, layout: Layout | None) -> Any:
        """A free value, computed once for each layout in which it is read."""
        node = self.planned.nodes[frame.where, later.op.id]
        layout = layout if node.signature.aligned else None  # computed whole on every device
        key = (local, layout)
        if key not in frame.made:
            inputs = []
            for i in later.op.inputs:
                value = frame.values[i] if isinstance(i, int) else i
                if isinstance(value, _Later):
                    same = isinstance(i, int) and self._shape(frame, i) == self._shape(frame, local)
                    inputs.append(self.force(frame, i, value, layout if same else None))  # type: ignore[arg-type]
                else:
                    inputs.append(_literal(value))
            made = self.bind(later.op, inputs) if node.signature.aligned else self.whole(node, inputs)
            frame.made[key] = self.constrain(made[later.result], layout)
        return frame.made[key]

    def _shape(self, frame: _Frame, local: int) -> tuple[int, ...]:
        return self.planned.graph.tensors[frame.ids[local]].shape

    # -- ops ---------------------------------------------------------------------------------------------------------

    def step(self, frame: _Frame, op: Op) -> None:
        """Evaluates one op of a frame."""
        match op.control:
            case "scan":
                results = self.scan(frame, op)
            case "while":
                results = self.while_(frame, op)
            case "cond":
                results = self.cond(frame, op)
            case "remat":
                results = self.remat(frame, op)
            case None:
                self.plain(frame, op)
                return
        for t, value in zip(op.outputs, results, strict=True):
            frame.values[t] = self.constrain(value, self.layout(frame, t))

    def plain(self, frame: _Frame, op: Op) -> None:
        """Evaluates an op without a body, its operands and results in the layouts of its strategy."""
        if self._is_free(frame, op):
            for r, t in enumerate(op.outputs):
                frame.values[t] = _Later(op, r)
            return
        node = self.planned.nodes[frame.where, op.id]
        use = self.planned.uses.get(node.id)
        follow = next((at for t in op.outputs if (at := self.layout(frame, t)) is not None), None)
        inputs: list[Any] = []
        for slot, i in enumerate(op.inputs):
            if isinstance(i, Constant):
                inputs.append(_literal(i))
                continue
            found = frame.values[i]
            if isinstance(found, _Later):
                inputs.append(self.force(frame, i, found, self._free_layout(frame, i, op, use, follow)))
            elif use is None or use.needs[slot] is None:
                inputs.append(found)
            else:
                inputs.append(self.operand(frame, node, use, slot, i))
        share = share_of(node, use, self.planned)
        if share is not None:
            outputs = self.shared(node, share, inputs)
        elif use is None and not node.signature.aligned:
            assert not any(self._partial(frame, i) for i in op.inputs), "only aligned ops pass terms on"
            outputs = self.whole(node, inputs)
        else:
            outputs = self.apply(frame, op, use, inputs)
        for r, (t, value) in enumerate(zip(op.outputs, outputs, strict=True)):
            if use is not None:
                value = self.result(use, share, r, value)
            elif use is None and frame.ids[t] in self.planned.held:
                value = self.constrain(value, self.layout(frame, t))
            frame.values[t] = value

    def apply(self, frame: _Frame, op: Op, use: Use | None, inputs: Sequence[Any]) -> list[Any]:
        """An op's results, with a leading axis for each factor whose terms it passes on."""
        bind = partial(self.bind, op, constant=self._constant(frame, op))
        signature = self.planned.nodes[frame.where, op.id].signature
        if use is not None and loses_nan(signature.call, any(g.partial for g in use.gives)):
            (x,) = inputs
            largest = any(reducer == "max" for reducer in signature.reducers)
            (found,) = bind([as_integers(x, "max" if largest else "min")])
            return [as_floats(found, x.dtype)]
        partials = (
            [self._partial(frame, i) for i in op.inputs] if use is None else [() if n is None else n.partial for n in use.needs]
        )
        over = tuple(sorted({f for fs in partials for f in fs}))
        assert use is None or over == term_factors(use), "an op that does not run on shares passes on all terms that it reads"
        return map_terms(lambda *xs: bind(xs), inputs, partials, over) if over else bind(inputs)

    def _constant(self, frame: _Frame, op: Op) -> bool:
        """Whether the first operand depends on no argument."""
        return not op.inputs or self._follows(frame, op.inputs[0])

    def _follows(self, frame: _Frame, operand: int | Constant) -> bool:
        """Whether an operand has no layout of its own: a literal, a scalar, or a value that depends on no argument."""
        return not isinstance(operand, int) or self.layout(frame, operand) is None

    def _partial(self, frame: _Frame, operand: int | Constant) -> tuple[int, ...]:
        layout = self.layout(frame, operand) if isinstance(operand, int) else None
        return () if layout is None else layout.partial

    def _is_free(self, frame: _Frame, op: Op) -> bool:
        """Whether all results are free: values (not scalars) that depend on no input."""
        makes = all(self._follows(frame, t) and math.prod(self._shape(frame, t)) > 1 for t in op.outputs)
        return makes and not op.handle.effects and all(self._follows(frame, i) for i in op.inputs)

    def _free_layout(self, frame: _Frame, i: int, op: Op, use: Use | None, follow: Layout | None) -> Layout | None:
        """The layout for a free operand: the result's if it has the result's shape, else None."""
        if use is not None and op.outputs and not use.gives[0].partial:
            follow = use.gives[0]
        if follow is None or self._shape(frame, i) != self._shape(frame, op.outputs[0]):
            return None
        return replace(follow, partial=())  # it multiplies each term, and is no term itself

    def operand(self, frame: _Frame, node: Node, use: Use, slot: int, local: int) -> Any:
        """An operand in the layout that the op needs, taken from the copy that the op reads."""
        need = use.needs[slot]
        assert need is not None
        tensor = self.planned.graph.tensors[frame.ids[local]]
        value, at = frame.values[local], self.layout(frame, local)
        assert at is not None
        number = self.planned.reads.get((node.id, slot))
        if number is not None:
            key = number, frame.ids[local]
            if key not in frame.copies:
                frame.copies[key] = self.copy(frame, node, number, value, at, local)
            value, at = frame.copies[key], self.planned.copies[number].layout
        return self.move(value, tensor.shape, tensor.nbytes, at, need)

    def copy(self, frame: _Frame, node: Node, number: int, value: Any, at: Layout, local: int) -> Any:
        """The resharded copy that several ops read, made at its first reader."""
        tensor = self.planned.graph.tensors[frame.ids[local]]
        copy = self.planned.copies[number]
        target, origin = copy.layout, (copy.source, frame.ids[local])
        if origin in frame.copies:
            assert copy.source is not None
            value, at = frame.copies[origin], self.planned.copies[copy.source].layout
        elif copy.backward and target != at:
            # tied to a value of the backward pass, so that XLA does not keep the forward copy instead
            later = [frame.values[i] for i in node.op.inputs if isinstance(i, int) and i != local]
            late = next((x for x in later if not isinstance(x, _Later)), None)
            value = lax.optimization_barrier((value, late))[0] if late is not None else value
        return self.move(value, tensor.shape, tensor.nbytes, at, target)

    def move(self, value: Any, shape: tuple[int, ...], nbytes: int, before: Layout, after: Layout) -> Any:
        """A value resharded, with one constraint for each step of the planned program."""
        if before == after:
            return self.constrain(value, after)
        if before.partial:
            return self.collected(value, before.partial, before, after)
        for step in self.planned.programs.between(shape, nbytes, before, after):
            value, before = self.stepped(value, before, step.after), step.after
        return value

    def stepped(self, value: Any, before: Layout, after: Layout) -> Any:
        """A value that is constrained to ``before``, constrained to ``after``."""
        for layout in steps_to(before, after, self.planned.sizes):
            value = self.constrain(value, layout)
        return value

    def collected(self, value: Any, terms: tuple[int, ...], before: Layout, after: Layout) -> Any:
        """A partial sum with terms over the factors ``terms``, reduced and moved into another layout.

        It is reduced first and then cut: asked for both at once, XLA takes another axis of the same size and permutes.
        """
        left = replace(before, partial=after.partial)
        return self.stepped(self.constrain(summed(value, terms, after.partial), left), left, after)

    def result(self, use: Use, share: Share | None, r: int, value: Any) -> Any:
        """A result reduced and moved into its stored layout; ``share`` says how the op ran on shares, None if it did not."""
        give, stored = use.gives[r], use.stored[r]
        terms = term_factors(use) if share is None else share.kept[r]
        if stored is None:
            return summed(value, terms, ())
        if give == stored:
            return self.constrain(value, stored)
        tensor_bytes = int(np.prod(value.shape)) * value.dtype.itemsize
        if share is not None and share.sums[r]:
            return self.move(value, tuple(value.shape), tensor_bytes, share.left[r], stored)
        if give.partial:
            return self.collected(value, terms, give, stored)
        return self.move(self.constrain(value, give), tuple(value.shape), tensor_bytes, give, stored)

    def bind(self, op: Op, inputs: Sequence[Any], *, constant: bool = False) -> list[Any]:
        """The results of the op's primitive on these values; ``constant`` as in `cuttable`."""
        eqn = op.handle
        params = eqn.params if "manual" not in op.params else {**eqn.params, "mesh": self.mesh}
        with _jax.settings_of(eqn):
            made = eqn.primitive.bind(
                *cuttable(op.primitive, inputs, params, constant=constant), **eqn.primitive.get_bind_params(params)
            )
        return in_row_major_order(op.primitive, made if eqn.primitive.multiple_results else [made])

    def whole(self, node: Node, inputs: Sequence[Any]) -> list[Any]:
        """An op that each device computes whole, from whole operands, so that the partitioner decides nothing."""
        spec = PartitionSpec()
        made = _jax.shard_mapped(lambda *xs: tuple(self.bind(node.op, xs)), mesh=self.mesh, in_specs=spec, out_specs=spec)
        return list(made(*inputs))

    def shared(self, node: Node, share: Share, inputs: Sequence[Any]) -> list[Any]:
        """An op that each device runs on its own share."""
        op, description = node.op, node.signature.description
        assert description is not None
        call = on_shares(description, share, self.mesh, Exchanges(self.reduced, self.permuted), primitive=op.handle.primitive)
        return list(call(*inputs))

    def reduced(self, x: Any, extreme: Any, reducer: Reducer, axes: tuple[str, ...], dim: int | None) -> Any:
        """The sum (or other reduction) of the devices' results of an op on shares."""
        return reduced(x, extreme, reducer, axes, dim)

    def permuted(self, x: Any, axes: tuple[str, ...], pairs: Pairs) -> Any:
        """The edge of an operand that a neighbour sends to an op on shares."""
        return lax.ppermute(x, axes, pairs)

    # -- control flow ------------------------------------------------------------------------------------------------

    def entering(
        self, frame: _Frame, op: Op, skip: int, where: Where, inner: Sequence[int], lifts: Sequence[int], fixed: int = 0
    ) -> list[Any]:
        """The operands of a body in the layouts of its inputs; ``lifts`` says which are stacked over a loop.

        The first ``fixed`` operands do not change in the loop. None stands for a free value among them: `remade` computes it
        inside the loop, where it takes no memory.
        """
        ids = self.planned.graph.bodies[where]
        values: list[Any] = []
        for i, (operand, t, lift) in enumerate(zip(op.inputs[skip:], inner, lifts, strict=True)):
            target = self.planned.layouts[ids[t]]
            if i < fixed and isinstance(operand, int) and isinstance(frame.values[operand], _Later):
                values.append(None)
                continue
            value = self.value(frame, operand)
            if target is not None and isinstance(operand, int):
                outer = self.planned.graph.tensors[frame.ids[operand]]
                wanted = Layout(((), *target.dims)) if lift else target
                at = self.layout(frame, operand)
                if wanted.partial and at is None:  # a partial sum starts from zero
                    value = jax.numpy.zeros(stacked_shape(outer.shape, wanted, self.planned.sizes), value.dtype)
                value = self.constrain(value, wanted) if at is None else self.move(value, outer.shape, outer.nbytes, at, wanted)
            values.append(value)
        return values

    def scan(self, frame: _Frame, op: Op) -> list[Any]:
        """A scan whose body is evaluated under constraints; operands and carries are in the body's layouts."""
        body, where = op.bodies[0], (*frame.where, (op.id, 0))
        consts, carry = op.params["num_consts"], op.params["num_carry"]
        lifts = [0] * (consts + carry) + [1] * (len(body.inputs) - consts - carry)
        values = self.entering(frame, op, 0, where, body.inputs, lifts, consts)
        fixed, start, stacked = values[:consts], values[consts : consts + carry], values[consts + carry :]
        ids = self.planned.graph.bodies[where]

        def iteration(state: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            results = self.run(body, where, [*self.remade(frame, op, fixed, [ids[t] for t in body.inputs]), *state, *slices])
            after = [
                self.handed(x, self.planned.layouts[ids[o]] if isinstance(o, int) else None, self.planned.layouts[ids[t]])
                for x, o, t in zip(results[:carry], body.outputs, body.inputs[consts:], strict=False)
            ]
            return [_as(x, s) for x, s in zip(after, state, strict=True)], results[carry:]

        end, ys = lax.scan(
            iteration, start, stacked, length=op.params["length"], reverse=op.params["reverse"], unroll=op.params.get("unroll", 1)
        )
        inside = [self.planned.layouts[ids[t]] for t in body.inputs[consts : consts + carry]]
        left = [self.handed(x, at, self.layout(frame, t)) for x, at, t in zip(end, inside, op.outputs, strict=False)]
        return [*left, *ys]

    def remade(self, frame: _Frame, op: Op, fixed: Sequence[Any], inner: Sequence[int]) -> list[Any]:
        """The operands that do not change in a loop; free values among them are computed here, inside the loop."""
        here = replace(frame, made={})  # values computed inside a loop do not exist outside
        found: list[Any] = []
        for operand, value, t in zip(op.inputs, fixed, inner, strict=False):
            if value is None:
                assert isinstance(operand, int)
                value = self.constrain(self.value(here, operand), self.planned.layouts[t])
            found.append(value)
        return found

    def handed(self, value: Any, before: Layout | None, after: Layout | None) -> Any:
        """A value that a loop carries, in its next layout; a partial sum is reduced unless that layout is partial too."""
        if before is not None and before.partial and after is not None:
            return self.collected(value, before.partial, before, after)
        return self.constrain(value, after)

    def while_(self, frame: _Frame, op: Op) -> list[Any]:
        """A while loop, like `scan`. Under ``vmap`` it runs while any test holds, and updates only elements whose test holds."""
        test, body = op.bodies
        a, b = op.params["cond_nconsts"], op.params["body_nconsts"]
        where, at_test = (*frame.where, (op.id, 1)), (*frame.where, (op.id, 0))
        tested = [self.value(frame, i) for i in op.inputs[:a]]
        values = self.entering(frame, op, a, where, body.inputs, [0] * len(body.inputs))
        fixed, start = values[:b], values[b:]
        ids = self.planned.graph.bodies[where]
        inside = [self.planned.layouts[ids[t]] for t in body.inputs[b:]]
        batched = isinstance(test.outputs[0], int) and bool(test.tensors[test.outputs[0]].shape)

        def holds(state: Sequence[Any]) -> Any:
            return self.run(test, at_test, [*tested, *state])[0]

        def iteration(state: Sequence[Any]) -> list[Any]:
            after = [_as(x, s) for x, s in zip(self.run(body, where, [*fixed, *state]), state, strict=True)]
            if not batched:
                return after
            on = holds(state)
            return [self.constrain(_where(on, x, s, at), at) for x, s, at in zip(after, state, inside, strict=True)]

        return list(lax.while_loop(lambda state: jax.numpy.any(holds(state)) if batched else holds(state), iteration, start))

    def cond(self, frame: _Frame, op: Op) -> list[Any]:
        """A conditional; every branch leaves its results in the layouts outside. JAX selects the branch for a platform."""
        values = [self.value(frame, i) for i in op.inputs[1:]]

        def branch(index: int, body: Program) -> Callable[..., list[Any]]:
            where = (*frame.where, (op.id, index))

            def run(*arguments: Any) -> list[Any]:
                results = self.run(body, where, arguments)
                return [self.constrain(x, self.layout(frame, t)) for x, t in zip(results, op.outputs, strict=True)]

            return run

        branches = [branch(b, body) for b, body in enumerate(op.bodies)]
        platforms = op.params.get("branches_platforms")
        if platforms is not None:  # branches for other platforms must not be lowered: they may hold those platforms' kernels
            named = {name: made for names, made in zip(platforms, branches, strict=True) for name in names or ("default",)}
            return list(lax.platform_dependent(*values, **named))
        index = self.value(frame, op.inputs[0])
        return list(lax.switch(index.astype("int32"), branches, *values))

    def remat(self, frame: _Frame, op: Op) -> list[Any]:
        """A remat op: if differentiated, its body runs behind a barrier, as JAX lowers it, so that nothing saved is reused."""
        values = [self.value(frame, i) for i in op.inputs]
        copies = frame.copies
        if op.again:
            # resharded copies of its operands go through the barrier as well: else the body would read the copies made before it
            entered = {frame.ids[i] for i in op.inputs if isinstance(i, int)}
            entering = {key: x for key, x in frame.copies.items() if key[1] in entered}
            values, behind = lax.optimization_barrier((values, list(entering.values())))
            copies = {**frame.copies, **dict(zip(entering, behind, strict=True))}
        results = self.run(op.bodies[0], (*frame.where, (op.id, 0)), values, copies)
        frame.copies.update({key: x for key, x in copies.items() if key not in frame.copies})
        return results


def _literal(value: Any) -> Any:
    return np.asarray(value.value, dtype=jax.numpy.dtype(value.dtype)) if isinstance(value, Constant) else value


def _where(on: Any, x: Any, otherwise: Any, layout: Layout | None) -> Any:
    """A selection along the leading dims of a value; the dims of its terms come before these."""
    terms = 0 if layout is None else len(layout.partial)
    shape = (1,) * terms + on.shape + (1,) * (np.ndim(x) - terms - on.ndim)
    return lax.select(jax.numpy.broadcast_to(on.reshape(shape), np.shape(x)), x, otherwise)


def _as(x: Any, like: Any) -> Any:
    """A carry in the dtype that it started with; only weak types can differ here."""
    return x if getattr(x, "dtype", None) == like.dtype else lax.convert_element_type(x, like.dtype)
