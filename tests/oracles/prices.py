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
from shardplan.ir import Collective, Layout, Partial, Split, itemsize
from shardplan.mesh import Device
from shardplan.tdl import Call, Description, cut
from shardplan.tdl.index import loops_of

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
    extents = [loop.extent for loop in description.loops]
    for loop in sorted({v for v in chosen if v >= 0}):
        over = [f for f, v in enumerate(chosen) if v == loop]
        parts = math.prod(sizes[f] for f in over)
        strategy = cut(description, loop, parts)
        if strategy is None:
            return None
        arithmetic /= parts
        extents[loop] = math.ceil(extents[loop] / parts)
        for i, place in enumerate((*strategy.operands, *strategy.results)):
            if isinstance(place, Split):
                if dims[i][place.dim]:
                    return None  # another loop splits it already
                dims[i][place.dim] += over
            elif isinstance(place, Partial):
                partial[i] += over
    layouts = [Layout(tuple(map(tuple, d)), tuple(sorted(p))) for d, p in zip(dims, partial, strict=True)]
    seconds = _seconds(call, description, device, traffic, layouts, sizes, arithmetic, extents)
    return Way(tuple(layouts[: len(call.operands)]), tuple(layouts[len(call.operands) :]), seconds)


def _seconds(
    call: Call,
    description: Description,
    device: Device,
    traffic: Traffic,
    layouts: Sequence[Layout],
    sizes: Sequence[int],
    arithmetic: float,
    extents: Sequence[int],
) -> float:
    """Roofline: a product's tiles at the peak, the local bytes of its kernels at the memory's speed."""
    dtypes = (*call.dtypes, *call.result_dtypes)
    whole = [math.prod(shape) * itemsize(dtype) for shape, dtype in zip((*call.operands, *call.results), dtypes, strict=True)]
    parts = (*traffic.reads, *traffic.writes)
    local = [math.prod(sizes[f] for d in x.dims for f in d) for x in layouts]
    nbytes = sum(n * part / cut for n, part, cut in zip(whole, parts, local, strict=True))
    moving = nbytes / (device.memory_bytes_per_s * device.memory_efficiency)
    product = len(call.operands) == 2 and any(loop.reducer == "sum" for loop in description.loops)
    flop = 2 * math.prod(loop.extent for loop in description.loops) * arithmetic if product else 0.0
    if product and device.compute_units is not None:
        flop *= slowdown(device.compute_units, *sides(description, extents))
    working = (
        flop / (device.flops_per_s.get(call.dtypes[0], device.flops_per_s["float32"]) * device.flops_efficiency) if flop else 0.0
    )
    return max(moving, working) + traffic.launches * device.launch_s


def sides(description: Description, extents: Sequence[int]) -> tuple[int, int, int, int]:
    """(batch, rows, columns, depth) of a product of two operands whose loops have these extents."""
    found = {"batch": 1, "rows": 1, "columns": 1, "depth": 1}
    read: tuple[set[int], set[int]] = (set(), set())
    for operand, indices in description.accesses:
        read[operand].update(*(loops_of(index) for index in indices))
    for v, (loop, extent) in enumerate(zip(description.loops, extents, strict=True)):
        in_x, in_y = v in read[0], v in read[1]
        kind = "depth" if loop.reducer else "batch" if in_x and in_y else "rows" if in_x else "columns"
        found[kind] *= extent
    return found["batch"], found["rows"], found["columns"], found["depth"]


def slowdown(units: int, batch: int, rows: int, columns: int, depth: int) -> float:
    """The time of a product in tiles over that of its multiplications spread over all units, tile by tile and wave by wave."""
    if rows == 1 or columns == 1:
        return 1.0
    best = math.inf
    for height, width, rate in TILES:
        for parts in (1, 2, 4, 8, 16):
            if parts > 1 and depth < 256 * parts:
                continue
            across = (rows + height - 1) // height
            along = (columns + width - 1) // width
            waves = (batch * across * along * parts + units - 1) // units
            best = min(best, waves * height * width * (depth / parts) / rate)
    return max(1.0, best / (batch * rows * columns * depth / units))


TILES = (
    (256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (256, 64, 0.85), (64, 256, 0.85), (128, 64, 0.8), (64, 128, 0.8),
    (64, 64, 0.65),
)  # fmt: skip


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
            size = nbytes / _parts(target[0], sizes) if kind == Collective.ALL_GATHER else bytes_here
            step_s = 0.0 if kind == Collective.SLICE else launch_s + float(network.seconds(kind, over, size))  # type: ignore[arg-type]
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
                yield Collective.ALL_GATHER, over, less, terms
            elif n == 1:
                yield Collective.ALL_TO_ALL, over, _with(less, e, (*less[e], *over)), terms
    for d in range(len(dims)):
        for f in idle:
            yield Collective.SLICE, (f,), _with(dims, d, (*dims[d], f)), terms
        for over in _some(terms):
            yield Collective.REDUCE_SCATTER, over, _with(dims, d, (*dims[d], *over)), terms - set(over)
    for over in _some(terms):
        yield Collective.ALL_REDUCE, over, dims, terms - set(over)


def _some(terms: frozenset[int]) -> Iterator[tuple[int, ...]]:
    for n in range(1, len(terms) + 1):
        yield from itertools.permutations(sorted(terms), n)


def _with(dims: Dims, d: int, factors: tuple[int, ...]) -> Dims:
    return (*dims[:d], factors, *dims[d + 1 :])


def _parts(dims: Dims, sizes: Sequence[int]) -> int:
    return math.prod(sizes[f] for d in dims for f in d)


def _divides(shape: Sequence[int], dims: Dims, sizes: Sequence[int]) -> bool:
    return all(n % math.prod(sizes[f] for f in d) == 0 for n, d in zip(shape, dims, strict=True))
