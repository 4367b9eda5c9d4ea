"""A step that runs its microbatches one after the other, and adds up their results."""

# pyright: basic
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardplan import _jax
from shardplan.cost import Network
from shardplan.emit.blocks import Blocks
from shardplan.emit.explicit import ExplicitEmitter
from shardplan.emit.reductions import TWO_TERMS
from shardplan.emit.transfers import Transfers
from shardplan.emit.walk import Values
from shardplan.errors import MicrobatchError
from shardplan.frontend.argnums import leaves_of, positions
from shardplan.frontend.trace import Traced, trace
from shardplan.ir import Collective, Microbatches, Op, Program, Reducer
from shardplan.microbatches.early_sums import early_sums, without
from shardplan.microbatches.phases import Phases, phases
from shardplan.microbatches.time_cut import instructions, time_cut
from shardplan.microbatches.whole_ops import operand_of, whole_op
from shardplan.regions.loops import MARK
from shardplan.schedule import Barrier, Block, Compute, Cond, Instruction, Move, PlannedProgram, Scan, While

AT_ONCE = "plan it with microbatches=1"


def microbatched(program: Program, parts: Microbatches, replicate: Sequence[str] = (), remedy: str = AT_ONCE) -> Program:
    """The program of a step as a scan over microbatches, with the arguments and results of the step. ``remedy`` is for its error.

    Raises:
        MicrobatchError: if the step cannot be cut so, with the source line that stands in the way.
    """
    if parts.count == 1:
        return program
    if program.meshed:
        raise MicrobatchError(
            "the step names mesh axes (a sharding constraint or jax.shard_map), which a microbatch does not have: remove them, "
            "or plan with microbatches=1"
        )
    planned = time_cut(program, parts.count, parts.batch, replicate)
    try:
        accumulating, first, early = _cut(program, planned, parts, replicate)
    except MicrobatchError as error:
        shapes = [program.tensors[t].shape for t in program.inputs]
        lengths, replaced = {shapes[i][0] for i in parts.batch}, {i for i in program.feedback if i is not None}
        state = [i for i in sorted(replaced.difference(parts.batch)) if shapes[i] and shapes[i][0] in lengths]
        as_state = f" (taken for state, as results have their shapes: {_few(program, state)})" if state else ""
        text = (
            f"{error}; {remedy}. Taken for the batch: {_few(program, parts.batch)}; batch_argnums names other arguments{as_state}"
        )
        raise MicrobatchError(text) from error

    def step(*leaves: Any) -> list[Any]:
        values = dict(program.constants) | dict(zip(program.inputs, leaves, strict=True))
        for op in first:
            with _jax.traced_at(op.handle, op.scope):
                values.update(zip(op.outputs, whole_op(op, [operand_of(values, x) for x in op.inputs]), strict=True))
        return accumulating(*leaves, *(values[t] for t in early))

    shapes = [_jax.shape_struct(t.shape, t.dtype) for t in (program.tensors[t] for t in program.inputs)]
    traced = trace(step, *shapes).program
    return replace(traced, input_paths=program.input_paths, output_paths=program.output_paths, feedback=program.feedback)


def _cut(
    program: Program, planned: PlannedProgram, parts: Microbatches, replicate: Sequence[str]
) -> tuple[_Accumulating, Sequence[Op], Sequence[int]]:
    """(the step in microbatches, the ops that run before it, the tensors that these ops hand to it)."""
    try:
        return _accumulating(planned, parts.count), (), ()
    except MicrobatchError:  # perhaps because of a sum that depends on the data alone
        early = early_sums(program, planned)
        if not early:
            raise
        first, rest = without(program, early)
        return _accumulating(time_cut(rest, parts.count, parts.batch, replicate), parts.count), first, early


def _few(program: Program, inputs: Sequence[int]) -> str:
    """The paths of the first of these inputs, as text."""
    paths = [program.input_paths[i] for i in inputs]
    return ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")


def checked_microbatches(traced: Traced, count: int, arguments: Sequence[int] | int | None) -> Microbatches:
    """The microbatches that a user asks for. ``arguments`` are the arguments that are cut; by default, the arrays that are not
    state and whose first dim is the most frequent one.

    Raises:
        MicrobatchError: for an invalid count, or if no argument is a batch.
        ShardplanError: for a number that names no argument.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise MicrobatchError(f"microbatches={count!r}: give a whole number from 1 on")
    program, trees = traced.program, traced.in_tree
    named = None if arguments is None else leaves_of(trees, positions(arguments, len(trees.children()), "batch_argnums"))
    if count == 1:
        return Microbatches()
    state = {i for i in program.feedback if i is not None}
    tensors = [program.tensors[t] for t in program.inputs]
    able = [i for i, t in enumerate(tensors) if t.shape and not t.dtype.startswith("key")]
    if named is not None:
        found = tuple(i for i in able if i in named)
    else:
        data = [i for i in able if i not in state]
        sizes = Counter(tensors[i].shape[0] for i in data)
        most = max(sizes, key=lambda n: (sizes[n], n), default=0)
        found = tuple(i for i in data if tensors[i].shape[0] == most)
    if not found:
        replaced = [i for i in able if i in state]
        why = f" (taken for state, as results have their shapes: {_few(program, replaced)})" if replaced else ""
        raise MicrobatchError(f"no argument is a batch{why}: name those that are with batch_argnums")
    return Microbatches(count, found)


def _accumulating(planned: PlannedProgram, count: int) -> _Accumulating:
    body = instructions(planned)
    ends = (planned.graph.inputs, planned.graph.outputs)
    layouts, results = ([planned.layouts[t] if t >= 0 else None for t in own] for own in ends)
    return _Accumulating(planned, phases(body, layouts, results), body, count)


class _Accumulating:
    def __init__(self, planned: PlannedProgram, parts: Phases, body: Any, count: int) -> None:
        self.planned, self.parts, self.body, self.count = planned, parts, body, count
        layouts = [planned.layouts[t] for t in planned.graph.inputs]
        self.split = [t for t, at in zip(body.parameters, layouts, strict=True) if at is not None and at.used]

    def __call__(self, *leaves: Any) -> list[Any]:
        """The flat results."""
        values = dict(zip(self.body.parameters, leaves, strict=True))
        fixed = {v: x for v, x in values.items() if v not in self.split}
        outer = _Outer(self.planned, 0)
        fixed = outer.run(self.parts.before, fixed)
        sliced = [_in_microbatches(values[v], self.count) for v in self.split]

        def each(index: Any, *slices: Any) -> tuple[list[Any], list[Any], list[Any]]:
            part = _Part(self.planned, index)
            own = part.run(self.parts.each, {**fixed, **dict(zip(self.split, slices, strict=True))})
            totals, kept, blocks = (
                [jnp.asarray(own[v]) for v in row] for row in (self.parts.totals, self.parts.kept, self.parts.blocks)
            )
            return totals, kept, blocks

        shapes = jax.eval_shape(each, jnp.int32(0), *[x[0] for x in sliced])
        totals = [_start(s, r) for s, r in zip(shapes[0], self.parts.totals.values(), strict=True)]
        kept = [_any(s) for s in shapes[1]]

        def microbatch(state: Any, own: Any) -> tuple[Any, Any]:
            terms, same, blocks = each(*own)
            added = [TWO_TERMS[r](a, t) for a, t, r in zip(state[0], terms, self.parts.totals.values(), strict=True)]
            return (added, same), blocks

        with jax.named_scope(MARK):
            (totals, kept), blocks = lax.scan(microbatch, (totals, kept), (jnp.arange(self.count, dtype=jnp.int32), *sliced))
        done = {**fixed, **dict(zip(self.parts.totals, totals, strict=True)), **dict(zip(self.parts.kept, kept, strict=True))}
        for (v, dim), x in zip(self.parts.blocks.items(), blocks, strict=True):
            done[v] = _joined(x, dim)
        done = outer.run(self.parts.after, done)
        return [outer.value(done, s) for s in self.body.results]


class _Part(ExplicitEmitter):
    """Runs instructions for one microbatch: its number stands for the place on the axis of microbatches."""

    def __init__(self, planned: PlannedProgram, index: Any) -> None:
        self.planned, self.index = planned, index
        network = planned.programs.resharder.network
        assert isinstance(network, Network)
        self.transfers = _Slices(network, planned.names, planned.sizes, index)
        self.blocks = Blocks(planned.names, _no_neighbour, lambda _: index)

    def run(self, chosen: Sequence[Instruction], values: dict[int, Any]) -> dict[int, Any]:
        """The values once these instructions have run."""
        values = dict(values)
        with self.blocks.body():
            for i in chosen:
                self.instruction(i, values)
        return values

    def compute(self, compute: Compute, inputs: Sequence[Any]) -> Sequence[Any]:
        """An op on a microbatch, with its own source line and scope."""
        op = compute.node.op
        with _jax.traced_at(op.handle, op.scope):
            return super().compute(compute, inputs)

    def results(self, instruction: Instruction, values: Values) -> Sequence[Any]:
        """The results of an instruction; control flow has its own source line and scope, too."""
        if not isinstance(instruction, Scan | While | Cond):
            return super().results(instruction, values)
        with _jax.traced_at(instruction.op.handle, instruction.op.scope):
            return super().results(instruction, values)

    def once(self, compute: Compute, inputs: Sequence[Any]) -> Sequence[Any]:
        """An op with effects that depends on no microbatch."""
        return self.compute(replace(compute, once=False), inputs)

    def move(self, x: Any, move: Move, extreme: Any) -> Any:
        """A block out of a whole value. Any other value stays as it is: terms are added up later."""
        slices = all(step.kind is Collective.SLICE for step in move.steps)
        return self.transfers.move(x, move, extreme) if slices else x


class _Outer(_Part):
    """Runs instructions once a step. Equal ops on the same values share their results, and barriers are dropped: otherwise the
    loop would read two casts of a weight, one for the forward pass and one for its recomputation.
    """

    def __init__(self, planned: PlannedProgram, index: Any) -> None:
        super().__init__(planned, index)
        self._made: dict[tuple[int, ...], tuple[Sequence[Any], Sequence[Any]]] = {}  # by signature and operands: both are kept

    def compute(self, compute: Compute, inputs: Sequence[Any]) -> Sequence[Any]:
        """The results of an op, or those of an equal one."""
        node = compute.node
        if node.op.acts:
            return super().compute(compute, inputs)
        key = node.signature.id, *map(id, inputs)
        if key not in self._made:
            self._made[key] = inputs, super().compute(compute, inputs)
        return self._made[key][1]

    def block(self, block: Block, arguments: Sequence[Any], outer: Mapping[int, Any]) -> list[Any]:
        """The results of a block, which shares with no other: its values belong to its own trace."""
        made, self._made = self._made, {}
        try:
            return super().block(block, arguments, outer)
        finally:
            self._made = made

    def barred(self, xs: Sequence[Any], barrier: Barrier) -> Sequence[Any]:
        """The values themselves."""
        return xs


class _Slices(Transfers):
    def __init__(self, network: Network, names: Sequence[str], sizes: Sequence[int], index: Any) -> None:
        super().__init__(network, names, sizes)
        self._index = index

    def sliced(self, x: Any, dim: int, factors: Sequence[int]) -> Any:
        """A microbatch's block along a dim."""
        size = x.shape[dim] // self.ways(factors)
        return lax.dynamic_slice_in_dim(x, self._index * size, size, dim)


def _no_neighbour(*_: Any) -> Any:
    raise MicrobatchError("an op needs its neighbours' values in the batch, which run at other times: plan with microbatches=1")


def _in_microbatches(x: Any, count: int) -> Any:
    """[count, rows, ...]: the microbatches of an array [count * rows, ...]."""
    return x.reshape(count, x.shape[0] // count, *x.shape[1:])


def _joined(x: Any, dim: int) -> Any:
    """The blocks [count, ...] of an array, joined along a dim."""
    x = jnp.moveaxis(x, 0, dim)
    return x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])


def _start(shape: Any, reducer: Reducer) -> Any:
    """The value from which a reduction of terms starts."""
    match reducer:
        case "sum" | "or":
            value: Any = 0
        case "prod":
            value = 1
        case "and":
            value = -1 if jnp.issubdtype(shape.dtype, jnp.integer) else True
        case "max":
            value = -np.inf if jnp.issubdtype(shape.dtype, jnp.inexact) else _bounds(shape.dtype)[0]
        case _:
            value = np.inf if jnp.issubdtype(shape.dtype, jnp.inexact) else _bounds(shape.dtype)[1]
    return jnp.full(shape.shape, value, shape.dtype)


def _any(shape: Any) -> Any:
    """Some value of a type, which the value of each microbatch replaces."""
    if not jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jnp.zeros(shape.shape, shape.dtype)
    return jnp.broadcast_to(jax.random.key(0, impl=_jax.key_impl(shape.dtype)), shape.shape)


def _bounds(dtype: Any) -> tuple[Any, Any]:
    if dtype == jnp.bool_:
        return False, True
    return jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
