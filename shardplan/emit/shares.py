"""Which ops of a plan run on each device's own share, and how: from its decisions to what `emit.calls` runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardplan.collectives.reshard import Step
from shardplan.emit.calls import Share, Sum, divides
from shardplan.emit.planned import PlannedProgram
from shardplan.emit.stacked import term_factors
from shardplan.graph import Node
from shardplan.ir import Layout, Use


def share_of(node: Node, use: Use | None, planned: PlannedProgram) -> Share | None:
    """What each device does of an op on its own share; None where XLA's partitioner is left to cut it.

    So run the cuts that the partitioner would get wrong, and all that make or hand on terms which stay apart.
    """
    signature = node.signature
    if use is None or signature.description is None:
        return None
    over = term_factors(use)
    if signature.shared.isdisjoint(use.loops) and (not over or signature.elementwise):
        return None
    kept = tuple(() if stored is None else tuple(f for f in over if f in stored.partial) for stored in use.stored)
    steps = [() if kept[r] else _sums(node, use, r, planned) for r in range(len(kept))]
    sums = tuple(tuple(Sum(step.over, _scattered(step)) for step in own) for own in steps)
    left = tuple(own[-1].after if own else Layout(give.dims) for own, give in zip(steps, use.gives, strict=True))
    share = Share(use.loops, use.needs, kept, sums, left)
    if divides(signature.description, share, planned.sizes):
        return share
    assert all(use.loops[f] < -1 for f in over), "terms are made on shares alone"
    assert signature.fenced.isdisjoint(use.loops), "what is fenced is cut only where it divides"
    return None


def _sums(node: Node, use: Use, r: int, planned: PlannedProgram) -> tuple[Step, ...]:
    """The planned all-reduces and reduce-scatters that leave nothing partial of result r, if they come first and divide."""
    give, stored, description = use.gives[r], use.stored[r], node.signature.description
    assert description is not None
    reducers = {description.loops[v].reducer for v in use.loops if v >= 0} - {None}
    if stored is None or not give.partial or reducers - {"sum"}:
        return ()
    tensor = planned.graph.tensors[node.outputs[r]]
    found: list[Step] = []
    for step in planned.programs.between(tensor.shape, tensor.nbytes, give, stored):
        if step.kind not in ("all_reduce", "reduce_scatter") or not _even(tensor.shape, step.after, planned.sizes):
            break
        found.append(step)
    return tuple(found) if found and not found[-1].after.partial else ()


def _even(shape: tuple[int, ...], layout: Layout, sizes: Sequence[int]) -> bool:
    """Whether a layout is of a stored tensor (no buffer dim), all of whose blocks are alike."""
    ways = [math.prod(sizes[f] for f in factors) for factors in layout.dims]
    return len(ways) == len(shape) and all(n % k == 0 for n, k in zip(shape, ways, strict=True))


def _scattered(step: Step) -> int | None:
    """The dim over which a sum is scattered."""
    grown = [d for d, (a, b) in enumerate(zip(step.before.dims, step.after.dims, strict=True)) if a != b]
    return grown[0] if grown else None
