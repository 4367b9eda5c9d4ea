"""Plans broken on purpose: one exchange of a step is left out, to show that the proof of a plan notices.

An *exchange* is a place where devices must communicate: an op that leaves a partial sum, or a value that changes its layout.
Exchanges are numbered in the order of evaluation. Without its exchange, a partial sum stays each device's own term, and a value
that should come from other devices consists of copies of the device's own block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from shardplan.collectives.step import Step
from shardplan.cost import Network
from shardplan.emit.calls import Pairs
from shardplan.emit.explicit import ExplicitEmitter
from shardplan.emit.specs import SpecsEmitter
from shardplan.emit.stacked import partition_spec, term_factors
from shardplan.emit.transfers import Transfers
from shardplan.ir import Collective, Layout, Op, Reducer, Use
from shardplan.schedule import Compute, PlannedProgram, Schedule


def dropping_emitter(
    planned: PlannedProgram, mesh: Mesh, backend: str, schedule: Callable[[], Schedule], dropped: int
) -> Callable[..., list[Any]]:
    """The step on flat arguments under a backend, without its exchange number ``dropped``."""
    if backend == "explicit":
        return DroppingExplicitEmitter(planned, mesh, dropped, schedule())
    return DroppingEmitter(planned, mesh, dropped)


class DroppingEmitter(SpecsEmitter):
    """Evaluates a step without its exchange number ``dropped``.

    After a trace ``exchanges`` lists what can be dropped. ``skipped`` lists the sums that cannot be left out here: those of ops
    that do not run unchanged on one device's blocks, because their parameters hold sizes.
    """

    def __init__(self, planned: PlannedProgram, mesh: Mesh, dropped: int) -> None:
        super().__init__(planned, mesh)
        self.dropped = dropped
        self.exchanges: list[str] = []
        self.skipped: list[str] = []
        self._now: tuple[Op, Use] | None = None

    def __call__(self, *flat: Any) -> list[Any]:
        """The step on flat arguments; flat results."""
        self.exchanges.clear()
        self.skipped.clear()
        return super().__call__(*flat)

    def compute(self, compute: Compute, inputs: Sequence[Any]) -> list[Any]:
        """The results of an op, after noting whether it leaves a partial sum."""
        use = self.planned.uses.get(compute.node.id)
        # kept terms are summed later
        added = use is not None and any(g.partial for g in use.gives) and not term_factors(use)
        self._now = (compute.node.op, use) if use is not None and added else None
        return super().compute(compute, inputs)

    def bind(self, op: Op, inputs: Sequence[Any], *, constant: bool = False) -> list[Any]:
        """The op's results; if its sum is left out, each device's own term."""
        if self._now is None or self._now[0] is not op:
            return super().bind(op, inputs, constant=constant)
        use, self._now = self._now[1], None
        needs = tuple(partition_spec(n, self.planned.names) for n in use.needs)
        gives = tuple(partition_spec(Layout(g.dims), self.planned.names) for g in use.gives)
        local = jax.shard_map(
            lambda *xs: tuple(self._bare(op, xs, constant)), mesh=self.mesh, in_specs=needs, out_specs=gives, check_vma=False
        )
        what = f"the sum of {op.primitive} at {op.source}"
        if not self._same_parameters(op, local, inputs):
            self.skipped.append(what)
            return super().bind(op, inputs, constant=constant)
        return list(local(*inputs)) if self._drops(what) else super().bind(op, inputs, constant=constant)

    def _same_parameters(self, op: Op, local: Any, inputs: Sequence[Any]) -> bool:
        """Whether the op runs unchanged on one device's blocks; otherwise its sum cannot be left out here."""
        try:
            results = jax.eval_shape(local, *inputs)
        except (TypeError, ValueError):
            return False
        whole = [v.aval.shape for v in op.handle.outvars]
        return [x.shape for x in results] == whole

    def _bare(self, op: Op, inputs: Sequence[Any], constant: bool) -> list[Any]:
        return super().bind(op, inputs, constant=constant)

    def resharded(self, x: Any, at: Layout, steps: Sequence[Step]) -> Any:
        """The value resharded; if this is left out, copies of the device's own block."""
        talks = any(step.kind != Collective.SLICE for step in steps)
        ends = [partition_spec(layout, self.planned.names) for layout in (at, *(step.after for step in steps[-1:]))]
        if not talks or not self._drops(f"the move of {x.shape} from {ends[0]} to {ends[-1]}"):
            return super().resharded(x, at, steps)
        whole = jax.shard_map(
            lambda own: jnp.tile(own, [n // m for n, m in zip(x.shape, own.shape, strict=True)]),
            mesh=self.mesh,
            in_specs=ends[0],
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        return self.constrain(whole(self.constrain(x, at)), steps[-1].after)

    def collected(self, x: Any, terms: tuple[int, ...], before: Layout, after: Layout) -> Any:
        """The sum of terms; if left out, each device's own term as if it were the whole."""
        if not set(terms) - set(after.partial) or not self._drops(f"the sum of terms of {x.shape}"):
            return super().collected(x, terms, before, after)
        terms_layout, whole = replace(before, partial=terms), replace(before, partial=after.partial)
        summed_dims = tuple(i for i, f in enumerate(terms) if f not in after.partial)
        single_term = jax.shard_map(
            lambda own: jnp.squeeze(own, summed_dims),
            mesh=self.mesh,
            in_specs=partition_spec(terms_layout, self.planned.names),
            out_specs=partition_spec(whole, self.planned.names),
            check_vma=False,
        )
        return super().collected(single_term(self.constrain(x, terms_layout)), after.partial, whole, after)

    def reduced(self, x: Any, extreme: Any, reducer: Reducer, axes: tuple[str, ...], dim: int | None) -> Any:
        """The reduction of a call's terms; if left out, each device's own term, or its own block of it."""
        if not self._drops(f"the {reducer} over {axes} of a call's terms"):
            return super().reduced(x, extreme, reducer, axes, dim)
        if dim is None:
            return x
        size = x.shape[dim] // math.prod(self.mesh.shape[name] for name in axes)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, dim)

    def permuted(self, x: Any, axes: tuple[str, ...], pairs: Pairs) -> Any:
        """A neighbour's edge; if left out, the device's own edge."""
        return x if self._drops(f"the halo over {axes}") else super().permuted(x, axes, pairs)

    def _drops(self, what: str) -> bool:
        self.exchanges.append(what)
        return len(self.exchanges) - 1 == self.dropped


class DroppingExplicitEmitter(ExplicitEmitter):
    """Runs a schedule without its exchange number ``dropped``; after a trace ``exchanges`` lists what can be dropped."""

    def __init__(self, planned: PlannedProgram, mesh: Mesh, dropped: int, schedule: Schedule | None = None) -> None:
        self.dropped = dropped
        self.exchanges: list[str] = []
        super().__init__(planned, mesh, schedule)

    def __call__(self, *flat: Any) -> list[Any]:
        """The step on flat arguments; flat results."""
        self.exchanges.clear()
        return super().__call__(*flat)

    def transfers_on(self, network: Network) -> Transfers:
        """The transfers, without one exchange."""
        return _DroppingTransfers(self, network)

    def drops(self, what: str) -> bool:
        """Notes an exchange, and returns whether it is left out."""
        self.exchanges.append(what)
        return len(self.exchanges) - 1 == self.dropped


class _DroppingTransfers(Transfers):
    """Transfers without one exchange: there, a device takes its own values for those that it should receive."""

    def __init__(self, emitter: DroppingExplicitEmitter, network: Network) -> None:
        super().__init__(network, emitter.planned.names, emitter.planned.sizes)
        self.emitter = emitter

    def gather(self, x: Any, step: Step, over: Sequence[int], dim: int) -> Any:
        """A gather; if left out, copies of the device's own block."""
        if not self.emitter.drops(f"a gather over {self.axes(over)}"):
            return super().gather(x, step, over, dim)
        return jnp.concatenate([x] * self.ways(over), dim)

    def all_reduce(self, x: Any, step: Step, reducer: Reducer, extreme: Any) -> Any:
        """A reduction; if left out, the device's own term."""
        dropped = self.emitter.drops(f"the {reducer} over {self.axes(step.over)}")
        return x if dropped else super().all_reduce(x, step, reducer, extreme)

    def reduce_scatter(self, x: Any, step: Step, over: Sequence[int], reducer: Reducer, dim: int) -> Any:
        """A reduce-scatter; if left out, the device's block of its own term."""
        dropped = self.emitter.drops(f"the scattered {reducer} over {self.axes(over)}")
        return self.sliced(x, dim, over) if dropped else super().reduce_scatter(x, step, over, reducer, dim)

    def all_to_all(self, x: Any, over: Sequence[int], split: int, joined: int) -> Any:
        """An all-to-all; if left out, the device's own blocks in place of the others'."""
        if not self.emitter.drops(f"an all-to-all over {self.axes(over)}"):
            return super().all_to_all(x, over, split, joined)
        return jnp.concatenate(jnp.split(x, self.ways(over), split), joined)

    def permute(self, x: Any, axes: tuple[str, ...], pairs: Sequence[tuple[int, int]]) -> Any:
        """A permute; if left out, the device's own value."""
        return x if self.emitter.drops(f"a permute over {axes}") else super().permute(x, axes, pairs)
