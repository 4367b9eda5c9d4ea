"""The ``explicit`` backend: each device runs its own program, inside one `shard_map` over the plan's mesh.

Every op runs on the device's share of its operands, every resharding is the plan's own list of collectives, every sum its
synthesized program. Nothing is left to XLA's partitioner: exactly the moves of the schedule are made.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from shardplan import _jax
from shardplan.cost import Network
from shardplan.emit.blocks import Blocks
from shardplan.emit.manual import OWN, evaluated
from shardplan.emit.stacked import partition_spec
from shardplan.emit.transfers import Transfers
from shardplan.emit.walk import Values, Walk, where_rows
from shardplan.schedule import Block, Bundle, Compute, Fill, Instruction, Move, Reblock, Schedule, While, build
from shardplan.schedule.planned import PlannedProgram
from shardplan.tdl.rewrite import compilable, in_row_major_order


class ExplicitEmitter(Walk):
    """Runs a plan's schedule on one mesh."""

    def __init__(self, planned: PlannedProgram, mesh: Mesh, schedule: Schedule | None = None) -> None:
        self.planned, self.mesh = planned, mesh
        self.schedule = build(planned) if schedule is None else schedule
        network = planned.programs.resharder.network
        assert isinstance(network, Network)
        self.transfers = self.transfers_on(network)
        self.blocks = Blocks(planned.names, self.transfers.permute)

    def transfers_on(self, network: Network) -> Transfers:
        """The functions that move values."""
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
        """The results of a body on each device."""
        with self.blocks.body():
            return super().block(block, arguments, outer)

    def results(self, instruction: Instruction, values: Values) -> Sequence[Any]:
        """The results of an instruction on each device."""
        match instruction:
            case Bundle():
                return self.transfers.bundle([values[m.source] for m in instruction.moves], instruction)
            case Reblock():
                return [self.transfers.reblocked(values[instruction.source], instruction)]
            case _:
                return super().results(instruction, values)

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
            made = _jax.bound(eqn, compilable(op.primitive, inputs, eqn.params))
        return in_row_major_order(op.primitive, made)

    def once(self, compute: Compute, inputs: Sequence[Any]) -> Sequence[Any]:
        """An op with effects, on the first device alone; zeros on the others."""
        eqn = compute.node.op.handle
        shapes = [v.aval for v in eqn.outvars]

        def run(*operands: Any) -> tuple[Any, ...]:
            with _jax.settings_of(eqn):
                return tuple(_jax.bound(eqn, operands))

        def rest(*operands: Any) -> tuple[Any, ...]:
            return tuple(jnp.zeros(a.shape, a.dtype) for a in shapes)

        return lax.cond(lax.axis_index(self.planned.names) == 0, run, rest, *inputs)

    def move(self, x: Any, move: Move, extreme: Any) -> Any:
        """A block after the collectives of a move."""
        return self.transfers.move(x, move, extreme)

    def zeros(self, fill: Fill) -> Any:
        """This device's block of zeros."""
        assert fill.layout is not None
        dims = zip(fill.extents, fill.layout.dims, strict=True)
        shape = [n // self.transfers.ways(factors) for n, factors in dims]
        return jnp.zeros(shape, self.planned.graph.tensors[fill.tensor].dtype)

    def chosen(self, on: Any, x: Any, otherwise: Any, loop: While, carry: int) -> Any:
        """A choice along the leading dims of a block, by a mask that is whole."""
        layout, extents = loop.layouts[carry], loop.extents[carry]
        for d in range(on.ndim):
            factors = () if layout is None else layout.dims[d]
            if factors:
                on = jnp.pad(on, [(0, extents[d] - on.shape[d] if e == d else 0) for e in range(on.ndim)])
                size = extents[d] // self.transfers.ways(factors)
                at = lax.axis_index(self.transfers.axes(factors)) * size
                on = lax.dynamic_slice_in_dim(on, at, size, d)
        return where_rows(on, x, otherwise)
