"""Decides which ops of a plan run on each device's own share, and how: the `Share` that `emit.calls` runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardplan.collectives.step import Step
from shardplan.emit.calls import Share, Sum, divides
from shardplan.emit.stacked import term_factors
from shardplan.graph import Node
from shardplan.ir import Collective, Layout, Use
from shardplan.schedule.planned import PlannedProgram


def share_of(node: Node, use: Use | None, planned: PlannedProgram) -> Share | None:
    """How an op runs on each device's own share; None if XLA's partitioner cuts it.

    Ops run on shares where the partitioner would get a cut wrong, and where they make or pass on terms that stay apart.
    An elementwise op passes terms on under `vmap` instead.
    """
    signature = node.signature
    if use is None or signature.description is None:
        return None
    over = term_factors(use)
    if signature.shared.isdisjoint(use.loops) and (not over or signature.elementwise):
        return None
    kept = tuple(() if stored is None else tuple(f for f in over if f in stored.partial) for stored in use.stored)
    steps = [() if kept[r] else _sums(node, use, r, planned) for r in range(len(kept))]
    sums = tuple(tuple(Sum(step.over, _scattered(step)) for step in chain) for chain in steps)
    left = tuple(chain[-1].after if chain else Layout(give.dims) for chain, give in zip(steps, use.gives, strict=True))
    share = Share(use.loops, use.needs, kept, sums, left)
    if divides(signature.description, share, planned.sizes):
        return share
    assert all(use.loops[f] < -1 for f in over), "only ops on shares make terms"
    assert signature.fenced.isdisjoint(use.loops), "a fenced loop is cut only where it divides"
    return None


def _sums(node: Node, use: Use, r: int, planned: PlannedProgram) -> tuple[Step, ...]:
    """The planned all-reduces and reduce-scatters that complete result r; none unless they come first, divide and suffice."""
    give, stored, description = use.gives[r], use.stored[r], node.signature.description
    assert description is not None
    reducers = {description.loops[v].reducer for v in use.loops if v >= 0} - {None}
    if stored is None or not give.partial or reducers - {"sum"}:
        return ()
    tensor = planned.graph.tensors[node.outputs[r]]
    leading: list[Step] = []
    for step in planned.programs.between(tensor.shape, tensor.nbytes, give, stored):
        if step.kind not in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER) or not _even(
            tensor.shape, step.after, planned.sizes
        ):
            break
        leading.append(step)
    return tuple(leading) if leading and not leading[-1].after.partial else ()


def _even(shape: tuple[int, ...], layout: Layout, sizes: Sequence[int]) -> bool:
    """Whether a layout cuts a stored tensor (without a buffer dim) into equal blocks."""
    ways = [math.prod(sizes[f] for f in factors) for factors in layout.dims]
    return len(ways) == len(shape) and all(n % k == 0 for n, k in zip(shape, ways, strict=True))


def _scattered(step: Step) -> int | None:
    """The dim over which a sum is scattered; None for an all-reduce."""
    grown = [d for d, (a, b) in enumerate(zip(step.before.dims, step.after.dims, strict=True)) if a != b]
    return grown[0] if grown else None
