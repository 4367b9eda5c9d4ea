"""The ``explicit`` backend: each device runs its own program, inside one `shard_map` over the plan's mesh.

Every op runs on the device's share of its operands, every resharding is the plan's own list of collectives, every sum its
synthesized program. Nothing is left to XLA's partitioner: what the schedule says is what moves.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from shardplan import _jax
from shardplan.cost import Network
from shardplan.emit.blocks import Blocks
from shardplan.emit.manual import OWN, evaluated
from shardplan.emit.stacked import partition_spec
from shardplan.emit.transfers import Transfers
from shardplan.ir import Constant, Layout
from shardplan.schedule import (
    Barrier,
    Block,
    Bundle,
    Compute,
    Cond,
    Fill,
    Instruction,
    Move,
    Reblock,
    Scan,
    Schedule,
    Source,
    While,
    build,
)
from shardplan.schedule.planned import PlannedProgram
from shardplan.tdl.rewrite import compilable, in_row_major_order

Values = dict[int, Any]


class ExplicitEmitter:
    """Runs a plan's schedule on one mesh."""

    def __init__(self, planned: PlannedProgram, mesh: Mesh, schedule: Schedule | None = None) -> None:
        self.planned, self.mesh = planned, mesh
        self.schedule = build(planned) if schedule is None else schedule
        network = planned.programs.resharder.network
        assert isinstance(network, Network)
        self.transfers = self.transfers_on(network)
        self.blocks = Blocks(planned.names, self.transfers.permute)

    def transfers_on(self, network: Network) -> Transfers:
        """What moves values."""
        return Transfers(network, self.planned.names, self.planned.sizes)

    def __call__(self, *flat: Any) -> list[Any]:
        """The step on flat arguments; flat results."""
        layouts = self.planned.layouts
        ins = tuple(partition_spec(layouts[t], self.planned.names) for t in self.planned.graph.inputs)
        outs = tuple(partition_spec(layout, self.planned.names) for layout in self.schedule.results)
        run = _jax.shard_mapped(self.local, mesh=self.mesh, in_specs=ins, out_specs=outs)
        with _jax.on_mesh(self.mesh):
            return list(run(*flat))

    def local(self, *arguments: Any) -> tuple[Any, ...]:
        """The program of one device."""
        return tuple(self.block(self.schedule.body, arguments, {}))

    def block(self, block: Block, arguments: Sequence[Any], outer: Mapping[int, Any]) -> list[Any]:
        """The results of a body."""
        values: Values = {**outer, **dict(zip(block.parameters, arguments, strict=True))}
        with self.blocks.body():
            for instruction in block.instructions:
                self.instruction(instruction, values)
        return [self.value(values, source) for source in block.results]

    def value(self, values: Values, source: Source) -> Any:
        """A value, or a literal as an array."""
        if isinstance(source, Constant) and source.dtype.startswith("key"):
            return source.value
        if isinstance(source, Constant):
            return np.asarray(source.value, dtype=jnp.dtype(source.dtype)) if np.ndim(source.value) == 0 else source.value
        return values[source]

    def instruction(self, instruction: Instruction, values: Values) -> None:
        """Runs one instruction."""
        match instruction:
            case Compute():
                results = self.compute(instruction, [self.value(values, i) for i in instruction.inputs])
                values.update(zip(instruction.results, results, strict=True))
            case Move():
                extreme = None if instruction.extreme is None else values[instruction.extreme]
                values[instruction.result] = self.transfers.move(values[instruction.source], instruction, extreme)
            case Bundle():
                moved = self.transfers.bundle([values[m.source] for m in instruction.moves], instruction)
                values.update(zip((m.result for m in instruction.moves), moved, strict=True))
            case Reblock():
                values[instruction.result] = self.transfers.reblocked(values[instruction.source], instruction)
            case Fill():
                values[instruction.result] = self.fill(instruction)
            case Barrier():
                behind = lax.optimization_barrier([values[v] for v in instruction.values])
                values.update(zip(instruction.results, behind, strict=True))
            case Scan():
                values.update(zip(instruction.results, self.scan(instruction, values), strict=True))
            case While():
                values.update(zip(instruction.results, self.while_(instruction, values), strict=True))
            case Cond():
                values.update(zip(instruction.results, self.cond(instruction, values), strict=True))

    def compute(self, compute: Compute, inputs: Sequence[Any]) -> Sequence[Any]:
        """An op on this device's share."""
        op, signature = compute.node.op, compute.node.signature
        eqn = op.handle
        if compute.once:
            return self.once(compute, inputs)
        if signature.manual is not None:
            with jax.named_scope(OWN):
                return evaluated(eqn.params["jaxpr"], inputs)
        if compute.cuts:
            with _jax.settings_of(eqn):
                return self.blocks.run(signature.call, compute.cuts, inputs, eqn.primitive, compute.scope)
        with _jax.settings_of(eqn):
            made = eqn.primitive.bind(*compilable(op.primitive, inputs, eqn.params), **eqn.primitive.get_bind_params(eqn.params))
        return in_row_major_order(op.primitive, made if eqn.primitive.multiple_results else [made])

    def once(self, compute: Compute, inputs: Sequence[Any]) -> Sequence[Any]:
        """An op with effects, on the first device alone; zeros on the others."""
        eqn = compute.node.op.handle
        shapes = [v.aval for v in eqn.outvars]

        def run(*operands: Any) -> tuple[Any, ...]:
            with _jax.settings_of(eqn):
                made = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
            return tuple(made) if eqn.primitive.multiple_results else (made,)

        def rest(*operands: Any) -> tuple[Any, ...]:
            return tuple(jnp.zeros(a.shape, a.dtype) for a in shapes)

        return lax.cond(lax.axis_index(self.planned.names) == 0, run, rest, *inputs)

    def fill(self, fill: Fill) -> Any:
        """A known value."""
        tensor = self.planned.graph.tensors[fill.tensor]
        if fill.value is not None:
            return jnp.asarray(self.value({}, fill.value))
        assert fill.layout is not None
        dims = zip(fill.extents, fill.layout.dims, strict=True)
        return jnp.zeros([n // self.transfers.ways(factors) for n, factors in dims], tensor.dtype)

    # -- control flow ------------------------------------------------------------------------------------------------

    def scan(self, scan: Scan, values: Values) -> list[Any]:
        """A scan of the body on each device; carries keep their types."""
        start, stacked = ([jnp.asarray(self.value(values, s)) for s in own] for own in (scan.start, scan.stacked))
        carry, params = len(start), scan.op.params

        def iteration(state: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            results = self.block(scan.body, [*state, *slices], values)
            return [_as(x, s) for x, s in zip(results[:carry], state, strict=True)], results[carry:]

        end, ys = lax.scan(
            iteration, start, stacked, length=params["length"], reverse=params["reverse"], unroll=params.get("unroll", 1)
        )
        return [*end, *ys]

    def while_(self, loop: While, values: Values) -> list[Any]:
        """A while loop: the test has the same value on every device."""
        start = [jnp.asarray(self.value(values, s)) for s in loop.start]

        def holds(state: Sequence[Any]) -> Any:
            return self.block(loop.test, state, values)[0]

        def iteration(state: Sequence[Any]) -> list[Any]:
            after = [_as(x, s) for x, s in zip(self.block(loop.body, state, values), state, strict=True)]
            if not loop.batched:
                return after
            on = holds(state)
            ends = zip(after, state, loop.layouts, loop.extents, strict=True)
            return [self.chosen(on, x, s, at, extents) for x, s, at, extents in ends]

        return list(lax.while_loop(lambda state: jnp.any(holds(state)), iteration, start))

    def chosen(self, on: Any, x: Any, otherwise: Any, layout: Layout | None, extents: Sequence[int]) -> Any:
        """A choice along the leading dims of a block, by a mask that is whole."""
        for d in range(on.ndim):
            factors = () if layout is None else layout.dims[d]
            if factors:
                on = jnp.pad(on, [(0, extents[d] - on.shape[d] if e == d else 0) for e in range(on.ndim)])
                size = extents[d] // self.transfers.ways(factors)
                at = lax.axis_index(self.transfers.axes(factors)) * size
                on = lax.dynamic_slice_in_dim(on, at, size, d)
        return lax.select(jnp.broadcast_to(on.reshape(on.shape + (1,) * (x.ndim - on.ndim)), x.shape), x, otherwise)

    def cond(self, cond: Cond, values: Values) -> list[Any]:
        """A conditional: the index has the same value on every device. JAX chooses among branches for platforms."""
        arguments = [self.value(values, a) for a in cond.arguments]

        def branch(block: Block) -> Callable[..., list[Any]]:
            return lambda *own: [jnp.asarray(x) for x in self.block(block, own, values)]

        branches = [branch(b) for b in cond.branches]
        platforms = cond.op.params.get("branches_platforms")
        if platforms is not None:  # a branch for another platform is not even lowered: it may have kernels of that one
            named = {name: made for names, made in zip(platforms, branches, strict=True) for name in names or ("default",)}
            return list(lax.platform_dependent(*arguments, **named))
        assert cond.index is not None
        return list(lax.switch(jnp.asarray(self.value(values, cond.index)).astype("int32"), branches, *arguments))


def _as(x: Any, like: Any) -> Any:
    """A carry keeps its type; only weakness of type can differ here."""
    return x if getattr(x, "dtype", None) == like.dtype else lax.convert_element_type(x, like.dtype)
