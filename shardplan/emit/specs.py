"""The ``specs`` backend: a plan's instructions on whole arrays under sharding constraints, which XLA's partitioner turns into
collectives.

Each op with a table of its own has its operands constrained to the layouts that its strategy needs, and its results to their
stored layouts. This holds in the forward and the backward pass and inside loop bodies; elementwise ops in between follow. The
instructions are those before all passes: nothing is padded, bundled or delayed. Partial sums that are kept are arrays of their
terms (`emit.stacked`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardplan import _jax
from shardplan.collectives.step import Step
from shardplan.emit.calls import Exchanges, Pairs, Share, on_shares, reduced
from shardplan.emit.extremes import as_floats, as_integers
from shardplan.emit.shares import share_of
from shardplan.emit.stacked import map_terms, partition_spec, stacked_shape, summed, term_factors
from shardplan.emit.stepping import steps_to
from shardplan.emit.walk import Walk
from shardplan.graph import Node
from shardplan.ir import Constant, Layout, Op, Reducer, Use
from shardplan.schedule import Barrier, Compute, Fill, HostCopy, Move, While, with_host_copies
from shardplan.schedule.planned import PlannedProgram
from shardplan.schedule.spelling import spelled_out
from shardplan.tdl.rewrite import cuttable, in_row_major_order
from shardplan.tdl.xla_quirks import loses_nan


class SpecsEmitter(Walk):
    """Runs a plan's instructions on whole arrays on one mesh; ``at`` has the layout of each value that has one."""

    def __init__(self, planned: PlannedProgram, mesh: Mesh) -> None:
        self.planned, self.mesh = planned, mesh
        schedule, layouts = spelled_out(planned)
        self.schedule = with_host_copies(schedule, planned)
        self.at = dict.fromkeys(self.schedule.body.parameters) | dict(layouts)

    def __call__(self, *flat: Any) -> list[Any]:
        """The step on flat arguments; flat results."""
        with _jax.on_mesh(self.mesh):
            return self.block(self.schedule.body, flat, {})

    def constrain(self, x: Any, layout: Layout | None) -> Any:
        """A value constrained to a layout; unchanged if it is a scalar, has no layout or lies in host memory."""
        if layout is None or not np.ndim(x) or _jax.in_host_memory(jax.typeof(x)):
            return x
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, partition_spec(layout, self.planned.names)))

    def placed(self, x: Any, number: int) -> Any:
        """A parameter of a block, or a result of control flow, constrained to its layout."""
        return self.constrain(x, self.at[number])

    def zeros(self, fill: Fill) -> Any:
        """Zeros constrained to a layout."""
        assert fill.layout is not None
        self.at[fill.result] = fill.layout
        shape = stacked_shape(fill.shape, fill.layout, self.planned.sizes)
        return self.constrain(jax.numpy.zeros(shape, self.planned.graph.tensors[fill.tensor].dtype), fill.layout)

    def copied(self, x: Any, copy: HostCopy) -> Any:
        """A value in another memory, in its layout there."""
        return self.constrain(super().copied(x, copy), self.at.get(copy.result))

    def barred(self, xs: Sequence[Any], barrier: Barrier) -> Sequence[Any]:
        """Values behind an optimization barrier, where they were."""
        self.at |= {r: self.at.get(v) for v, r in zip(barrier.values, barrier.results, strict=True)}
        return super().barred(xs, barrier)

    def chosen(self, on: Any, x: Any, otherwise: Any, loop: While, carry: int) -> Any:
        """A selection along the leading dims of a value; the dims of its terms come before these."""
        layout = loop.layouts[carry]
        terms = 0 if layout is None else len(layout.partial)
        shape = (1,) * terms + on.shape + (1,) * (np.ndim(x) - terms - on.ndim)
        return self.constrain(lax.select(jax.numpy.broadcast_to(on.reshape(shape), np.shape(x)), x, otherwise), layout)

    # -- moves -------------------------------------------------------------------------------------------------------

    def move(self, x: Any, move: Move, extreme: Any) -> Any:
        """A value moved from where it is: further than the move says if its sum is complete, by the partitioner or on shares."""
        at, after = self.at.get(move.source) or Layout.whole(len(move.shape)), move.after
        self.at[move.result] = after
        if at.partial:
            return self.collected(x, at.partial, move.before, after)
        passed = [step.after for step in move.steps]
        if at in passed:
            return self.resharded(x, at, move.steps[passed.index(at) + 1 :])
        return self.stepped(x, at, after) if move.before.partial else self.resharded(x, at, move.steps)

    def resharded(self, x: Any, at: Layout, steps: Sequence[Step]) -> Any:
        """A value resharded, with one constraint for each step of the planned program."""
        for step in steps:
            x, at = self.stepped(x, at, step.after), step.after
        return x

    def stepped(self, x: Any, before: Layout, after: Layout) -> Any:
        """A value that is constrained to ``before``, constrained to ``after``."""
        for layout in steps_to(before, after, self.planned.sizes):
            x = self.constrain(x, layout)
        return x

    def collected(self, x: Any, terms: tuple[int, ...], before: Layout, after: Layout) -> Any:
        """A partial sum with terms over the factors ``terms``, reduced and moved into another layout.

        It is reduced first and then cut: asked for both at once, XLA takes another axis of the same size and permutes.
        """
        left = replace(before, partial=after.partial)
        return self.stepped(self.constrain(summed(x, terms, after.partial), left), left, after)

    # -- ops ---------------------------------------------------------------------------------------------------------

    def compute(self, compute: Compute, inputs: Sequence[Any]) -> list[Any]:
        """An op's results, in the layouts of its strategy."""
        node, planned = compute.node, self.planned
        use = planned.uses.get(node.id)
        partials = [() if isinstance(i, Constant) or (at := self.at.get(i)) is None else at.partial for i in compute.inputs]
        if use is not None:  # what enters a loop or comes from behind a barrier has lost its layout there
            inputs = [self.constrain(x, need) for x, need in zip(inputs, use.needs, strict=True)]
        share = share_of(node, use, planned)
        if share is not None:
            made = self.shared(node, share, inputs)
        elif use is None and not node.signature.aligned:
            assert not any(partials), "only aligned ops pass terms on"
            made = self.whole(node, inputs)
        else:
            made = self.apply(node, use, inputs, partials)
        results: list[Any] = []
        for r, (t, x) in enumerate(zip(node.outputs, made, strict=True)):
            number = compute.results[r]
            if use is not None:
                dims, terms = (use.gives[r].dims, term_factors(use)) if share is None else (share.left[r].dims, share.kept[r])
                self.at[number] = Layout(dims, terms)
            constrained = use is not None or t in planned.held or planned.layouts[t] is None
            results.append(self.constrain(x, self.at.get(number)) if constrained else x)
        return results

    def apply(self, node: Node, use: Use | None, inputs: Sequence[Any], partials: Sequence[tuple[int, ...]]) -> list[Any]:
        """An op's results, with a leading axis for each factor whose terms it passes on."""
        first = node.inputs[0] if node.inputs else -1
        bind = partial(self.bind, node.op, constant=first < 0 or self.planned.layouts[first] is None)
        signature = node.signature
        if use is not None and loses_nan(signature.call, any(g.partial for g in use.gives)):
            (x,) = inputs
            largest = any(reducer == "max" for reducer in signature.reducers)
            (found,) = bind([as_integers(x, "max" if largest else "min")])
            return [as_floats(found, x.dtype)]
        over = tuple(sorted({f for fs in partials for f in fs}))
        assert use is None or over == term_factors(use), "an op that does not run on shares passes on all terms that it reads"
        return map_terms(lambda *xs: bind(xs), inputs, partials, over) if over else bind(inputs)

    def bind(self, op: Op, inputs: Sequence[Any], *, constant: bool = False) -> list[Any]:
        """The results of the op's primitive on these values; ``constant`` as in `cuttable`."""
        eqn = op.handle
        params = eqn.params if "manual" not in op.params else {**eqn.params, "mesh": self.mesh}
        with _jax.settings_of(eqn):
            made = _jax.bound(eqn, cuttable(op.primitive, inputs, params, constant=constant), params)
        return in_row_major_order(op.primitive, made)

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
