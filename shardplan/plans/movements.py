"""How the arrays of a state move from the layouts of one plan to those of another, and what that sends.

If both plans number the same devices alike, an array moves by the cheapest program of collectives between its two layouts
(`shardplan.collectives.reshard`), over factors in which both can be written. Otherwise each device gets the pieces of its block
from devices that hold them: from itself if it can, else from a device of the new plan, else from any device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from shardplan.collectives.pieces import Box, pieces, size_of
from shardplan.collectives.reshard import Programs, Resharder
from shardplan.collectives.step import Step
from shardplan.cost import Network, wire_bytes
from shardplan.ir import Factor, Layout
from shardplan.mesh import Cluster
from shardplan.mesh.factoring import factors
from shardplan.placement.device_topology import MOST_DEVICES, DeviceTopology, machine_of
from shardplan.schedule import Move


@dataclass(frozen=True, slots=True)
class Side:
    """Where arrays of a plan lie: a cluster, its factors, and its devices by numbers that both plans share.

    With several ``stages``, the n-th of so many equal runs of devices holds the n-th part of dim 0, in the same layout.
    """

    cluster: Cluster
    factors: tuple[Factor, ...]
    devices: tuple[int, ...]
    stages: int = 1

    def blocks(self, shape: Sequence[int], layout: Layout | None) -> tuple[tuple[int, Box], ...]:
        """Each device with the block that it holds of an array; ``layout`` None: the whole."""
        if self.stages > 1:
            return self._blocks_of_stages(shape, layout)
        sizes = [f.size for f in self.factors]
        dims = ((),) * len(shape) if layout is None else layout.dims
        found: list[tuple[int, Box]] = []
        for at, device in zip(itertools.product(*map(range, sizes)), self.devices, strict=True):
            box: list[tuple[int, int]] = []
            for n, over in zip(shape, dims, strict=True):
                place = 0
                for f in over:
                    place = place * sizes[f] + at[f]
                size = n // math.prod(sizes[f] for f in over)
                box.append((place * size, (place + 1) * size))
            found.append((device, tuple(box)))
        return tuple(found)

    def _blocks_of_stages(self, shape: Sequence[int], layout: Layout | None) -> tuple[tuple[int, Box], ...]:
        each, run = shape[0] // self.stages, len(self.devices) // self.stages
        found: list[tuple[int, Box]] = []
        for n in range(self.stages):
            own = Side(self.cluster, self.factors, self.devices[n * run : (n + 1) * run])
            for device, ((low, high), *others) in own.blocks((each, *shape[1:]), layout):
                found.append((device, ((n * each + low, n * each + high), *others)))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array: its path and type, and where and in which layouts (None: whole) it lies before and after."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    before: tuple[Side, Layout | None]
    after: tuple[Side, Layout | None]


@dataclass(frozen=True, slots=True)
class Movement:
    """How one array moves: by the collectives of ``move`` over these factors, or (None) in pieces. ``sent`` has the bytes that
    each device sends; ``seconds`` is None where no cluster joins the devices.
    """

    leaf: Leaf
    move: Move | None
    factors: tuple[Factor, ...]
    sent: Mapping[int, float]
    seconds: float | None

    @property
    def steps(self) -> tuple[Step, ...]:
        """The collectives; none for an array that moves in pieces, or stays."""
        return () if self.move is None else self.move.steps


@dataclass(frozen=True, slots=True)
class Resharding:
    """The traffic of a state on its way from one plan to another: predicted bytes and seconds, one array after the other."""

    movements: tuple[Movement, ...]

    @property
    def bytes_per_device(self) -> float:
        """The most bytes that one device sends (of collectives in the ring convention)."""
        total: dict[int, float] = {}
        for m in self.movements:
            for device, nbytes in m.sent.items():
                total[device] = total.get(device, 0.0) + nbytes
        return max(total.values(), default=0.0)

    @property
    def total_bytes(self) -> float:
        """The bytes that all devices send together."""
        return sum(sum(m.sent.values()) for m in self.movements)

    @property
    def seconds(self) -> float | None:
        """The seconds of all movements; None where neither plan's cluster holds the devices of both."""
        own = [m.seconds for m in self.movements]
        return None if None in own else sum(s for s in own if s is not None)


def movements(leaves: Iterable[Leaf], clusters: Sequence[tuple[Cluster, Sequence[int]]]) -> Resharding:
    """How each array moves. ``clusters`` are the clusters of both plans, the new one first, each with the numbers of its
    devices.
    """
    joined = _joined(clusters)

    @cache
    def programs_of(before: Side, after: Side) -> Programs | None:
        over = common_factors(before, after)
        return None if over is None else Programs(Resharder(Network(after.cluster, over), [f.size for f in over]))

    kinds: dict[object, Movement] = {}
    found: list[Movement] = []
    for leaf in leaves:
        kind = leaf.shape, leaf.dtype, leaf.before, leaf.after
        if kind not in kinds:
            programs = programs_of(leaf.before[0], leaf.after[0])
            kinds[kind] = (programs and _by_collectives(leaf, programs)) or _in_pieces(leaf, joined)
        found.append(replace(kinds[kind], leaf=leaf))
    return Resharding(tuple(found))


# -- by collectives ----------------------------------------------------------------------------------------------------

MOST_FACTORS = 4
"""The layouts over more factors are too many to search for a program that runs once."""


def common_factors(before: Side, after: Side) -> tuple[Factor, ...] | None:
    """The fewest factors of the new cluster that the factors of both sides are made of; None if the sides have other devices, or
    other numbers for them, if a side has stages, or if there are no such factors or too many.
    """
    if before.devices != after.devices or before.stages > 1 or after.stages > 1:
        return None
    spans = [_span(side.cluster, f) for side in (before, after) for f in side.factors]
    ends = sorted({1, after.cluster.size, *(end for span in spans for end in span)})
    if any(b % a for a, b in itertools.pairwise(ends)):
        return None
    splits = {
        level.name: [b // a for a, b in reversed([*itertools.pairwise(ends)]) if low <= a and b <= low * level.size]
        for level, low in zip(after.cluster.levels, _below(after.cluster), strict=True)
        if level.size > 1
    }
    result = factors(after.cluster, splits)
    return result if len(result) <= MOST_FACTORS else None


def _below(cluster: Cluster) -> list[int]:
    """For each level, the number of devices below one of its children."""
    sizes = [level.size for level in cluster.levels]
    return [math.prod(sizes[n + 1 :]) for n in range(len(sizes))]


def _span(cluster: Cluster, factor: Factor) -> tuple[int, int]:
    """The distance of two devices that are neighbours along a factor, and that times its size."""
    stride = factor.stride * _below(cluster)[factor.level]
    return stride, stride * factor.size


def _over(layout: Layout | None, rank: int, side: Side, cluster: Cluster, over: Sequence[Factor]) -> Layout:
    """The layout of a side over factors that its own are made of."""
    parts: list[tuple[int, ...]] = []
    for f in side.factors:
        low, high = _span(side.cluster, f)
        parts.append(tuple(i for i, g in enumerate(over) if low <= _span(cluster, g)[0] < high))
    dims = ((),) * rank if layout is None else layout.dims
    return Layout(tuple(tuple(i for f in dim for i in parts[f]) for dim in dims))


def _by_collectives(leaf: Leaf, programs: Programs) -> Movement | None:
    """The movement by the cheapest program; None for what must move in pieces: a key, or what the program would pad, or
    gather beyond the blocks before and after.
    """
    network = programs.resharder.network
    cluster, over, rank = network.cluster, network.factors, len(leaf.shape)
    first, last = (_over(layout, rank, side, cluster, over) for side, layout in (leaf.before, leaf.after))
    if first != last and leaf.dtype.startswith("key"):
        return None
    try:
        steps = programs.between(leaf.shape, leaf.nbytes, first, last)
    except KeyError:  # an order of factors in one dim that no program makes
        return None
    sizes = [f.size for f in over]
    layouts = [layout for step in steps for layout in (step.before, step.after)]
    least = min(_parts(first, sizes), _parts(last, sizes))
    if any(not _divides(layout, leaf.shape, sizes) or _parts(layout, sizes) < least for layout in layouts):
        return None
    move = Move(0, 1, 0, leaf.shape, first, last, steps, leaf.path, extents=leaf.shape)
    sent = sum(wire_bytes(s.kind, math.prod(sizes[f] for f in s.factors), s.nbytes) for s in steps)
    return Movement(leaf, move, over, dict.fromkeys(leaf.after[0].devices, sent) if sent else {}, sum(s.seconds for s in steps))


def _parts(layout: Layout, sizes: Sequence[int]) -> int:
    """Into how many blocks a layout cuts an array."""
    return math.prod(sizes[f] for f in layout.used)


def _divides(layout: Layout, shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether a layout cuts a shape into equal blocks, and not its buffer."""
    if len(layout.dims) != len(shape):
        return False
    return all(n % math.prod(sizes[f] for f in dim) == 0 for n, dim in zip(shape, layout.dims, strict=True))


# -- in pieces ---------------------------------------------------------------------------------------------------------


def _joined(clusters: Sequence[tuple[Cluster, Sequence[int]]]) -> tuple[DeviceTopology, Mapping[int, int]] | None:
    """The first of these clusters that holds the devices of all, with their numbers in it; None if none does."""
    every = {d for _, devices in clusters for d in devices}
    for cluster, devices in clusters:
        if every <= set(devices) and cluster.size <= MOST_DEVICES:
            return machine_of(cluster), {d: n for n, d in enumerate(devices)}
    return None


def _in_pieces(leaf: Leaf, joined: tuple[DeviceTopology, Mapping[int, int]] | None) -> Movement:
    """The movement in pieces: the messages of each connection one after the other, all connections at once."""
    (before, first), (after, last) = leaf.before, leaf.after
    every = pieces(before.blocks(leaf.shape, first), after.blocks(leaf.shape, last), after.devices)
    itemsize = leaf.nbytes / max(1, math.prod(leaf.shape))
    messages = [(p.source, p.target, size_of(p.box) * itemsize) for own in every for p in own if p.source != p.target]
    sent: dict[int, float] = {}
    for source, _, nbytes in messages:
        sent[source] = sent.get(source, 0.0) + nbytes
    if joined is None:
        return Movement(leaf, None, (), sent, None if messages else 0.0)
    machine, number = joined
    busy_s, latency_s = np.zeros(len(machine.links)), 0.0
    for source, target, nbytes in messages:
        pair = number[source], number[target]
        busy_s[machine.link[pair]] += nbytes / machine.bytes_per_s[pair]
        latency_s = max(latency_s, float(machine.latency_s[pair]))
    return Movement(leaf, None, (), sent, latency_s + float(busy_s.max(initial=0.0)))
