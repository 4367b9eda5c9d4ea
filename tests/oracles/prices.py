"""Prices of strategies and of reshardings, derived from descriptions and the cluster alone: nothing of the search is used.

A strategy is an assignment of loops to factors: `tdl.cut` says what each cut needs and gives, a roofline on local shapes what it
costs. A resharding is a shortest path over layouts that moves one factor, or several at once, by one collective a step. A step
costs what it does on a network that launches for nothing, and the device's launch of a collective.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardplan.cost import Network
from shardplan.graph.nodes import Traffic
from shardplan.ir import Layout, Partial, Split, itemsize
from shardplan.mesh import Device
from shardplan.tdl import Call, Description, cut

Dims = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Way:
    """A strategy: the layouts of operands and results, and the seconds of one device."""

    needs: tuple[Layout, ...]
    gives: tuple[Layout, ...]
    compute_s: float


def ways(
    call: Call, description: Description, sizes: Sequence[int], device: Device, traffic: Traffic
) -> dict[tuple[int, ...], Way]:
    """Every strategy whose cuts all divide, by the loop (-1: none) that each factor cuts."""
    loops = [-1, *(v for v, loop in enumerate(description.loops) if not loop.whole)]
    found: dict[tuple[int, ...], Way] = {}
    for chosen in itertools.product(loops, repeat=len(sizes)):
        way = _way(call, description, sizes, device, traffic, chosen)
        if way is not None:
            found[chosen] = way
    return found


def _way(
    call: Call, description: Description, sizes: Sequence[int], device: Device, traffic: Traffic, chosen: tuple[int, ...]
) -> Way | None:
    shapes = (*call.operands, *call.results)
    dims: list[list[list[int]]] = [[[] for _ in shape] for shape in shapes]
    partial: list[list[int]] = [[] for _ in shapes]
    arithmetic = 1.0
    for loop in sorted({v for v in chosen if v >= 0}):
        over = [f for f, v in enumerate(chosen) if v == loop]
        parts = math.prod(sizes[f] for f in over)
        strategy = cut(description, loop, parts)
        if strategy is None:
            return None
        arithmetic /= parts
        for i, place in enumerate((*strategy.operands, *strategy.results)):
            if isinstance(place, Split):
                if dims[i][place.dim]:
                    return None  # another loop splits it already
                dims[i][place.dim] += over
            elif isinstance(place, Partial):
                partial[i] += over
    layouts = [Layout(tuple(map(tuple, d)), tuple(sorted(p))) for d, p in zip(dims, partial, strict=True)]
    seconds = _seconds(call, description, device, traffic, layouts, sizes, arithmetic)
    return Way(tuple(layouts[: len(call.operands)]), tuple(layouts[len(call.operands) :]), seconds)


def _seconds(
    call: Call,
    description: Description,
    device: Device,
    traffic: Traffic,
    layouts: Sequence[Layout],
    sizes: Sequence[int],
    arithmetic: float,
) -> float:
    """Roofline: a product's multiplications and additions at the peak, the local bytes of its kernels at the memory's speed."""
    dtypes = (*call.dtypes, *call.result_dtypes)
    whole = [math.prod(shape) * itemsize(dtype) for shape, dtype in zip((*call.operands, *call.results), dtypes, strict=True)]
    parts = (*traffic.reads, *traffic.writes)
    local = [math.prod(sizes[f] for d in x.dims for f in d) for x in layouts]
    nbytes = sum(n * part / cut for n, part, cut in zip(whole, parts, local, strict=True))
    moving = nbytes / (device.memory_bytes_per_s * device.memory_efficiency)
    product = len(call.operands) == 2 and any(loop.reducer == "sum" for loop in description.loops)
    flop = 2 * math.prod(loop.extent for loop in description.loops) * arithmetic if product else 0.0
    working = (
        flop / (device.flops_per_s.get(call.dtypes[0], device.flops_per_s["float32"]) * device.flops_efficiency) if flop else 0.0
    )
    return max(moving, working) + traffic.launches * device.launch_s


# -- reshardings -------------------------------------------------------------------------------------------------------


def resharding_s(network: Network, shape: Sequence[int], nbytes: int, before: Layout, after: Layout) -> float:
    """Seconds of the cheapest chain of collectives between two layouts; infinite where there is none."""
    sizes = [f.size for f in network.factors]
    device = network.cluster.device
    launch_s = device.launch_s if device.collective_launch_s is None else device.collective_launch_s
    network = Network(replace(network.cluster, device=replace(device, collective_launch_s=0.0)), network.factors)
    best = {(before.dims, frozenset(before.partial)): 0.0}
    queue = [(0.0, before.dims, tuple(sorted(before.partial)))]
    goal = after.dims, frozenset(after.partial)
    while queue:
        so_far, dims, terms = heapq.heappop(queue)
        at = dims, frozenset(terms)
        if at == goal:
            return so_far
        if so_far > best[at]:
            continue
        for kind, over, then, left in _steps(dims, at[1], len(sizes)):
            target = then, left
            if not _divides(shape, target[0], sizes):
                continue
            bytes_here = nbytes / _parts(dims, sizes)
            size = nbytes / _parts(target[0], sizes) if kind == "all_gather" else bytes_here
            step_s = 0.0 if kind == "slice" else launch_s + float(network.seconds(kind, over, size))  # type: ignore[arg-type]
            if so_far + step_s < best.get(target, math.inf):
                best[target] = so_far + step_s
                heapq.heappush(queue, (so_far + step_s, target[0], tuple(sorted(target[1]))))
    return math.inf


def _steps(dims: Dims, terms: frozenset[int], count: int) -> Iterator[tuple[str, tuple[int, ...], Dims, frozenset[int]]]:
    used = {f for d in dims for f in d} | terms
    idle = [f for f in range(count) if f not in used]
    for d, e in itertools.product(range(len(dims)), repeat=2):
        for n in range(1, len(dims[d]) + 1):  # the last n factors of a dim leave it
            kept, over = dims[d][:-n], dims[d][-n:]
            less = _with(dims, d, kept)
            if d == e:
                yield "all_gather", over, less, terms
            elif n == 1:
                yield "all_to_all", over, _with(less, e, (*less[e], *over)), terms
    for d in range(len(dims)):
        for f in idle:
            yield "slice", (f,), _with(dims, d, (*dims[d], f)), terms
        for over in _some(terms):
            yield "reduce_scatter", over, _with(dims, d, (*dims[d], *over)), terms - set(over)
    for over in _some(terms):
        yield "all_reduce", over, dims, terms - set(over)


def _some(terms: frozenset[int]) -> Iterator[tuple[int, ...]]:
    for n in range(1, len(terms) + 1):
        yield from itertools.permutations(sorted(terms), n)


def _with(dims: Dims, d: int, factors: tuple[int, ...]) -> Dims:
    return (*dims[:d], factors, *dims[d + 1 :])


def _parts(dims: Dims, sizes: Sequence[int]) -> int:
    return math.prod(sizes[f] for d in dims for f in d)


def _divides(shape: Sequence[int], dims: Dims, sizes: Sequence[int]) -> bool:
    return all(n % math.prod(sizes[f] for f in d) == 0 for n, d in zip(shape, dims, strict=True))
