"""The links of the levels, and the ones that a message takes.

A message between two devices climbs from its source to the level where their coordinates first differ, crosses there, and
descends. `Topology.loads` sums the bytes that many messages put on every link; `graph` is the same topology for networkx.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .cluster import Cluster
from .machine import Level

if TYPE_CHECKING:
    import networkx as nx

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Tier:
    """The links of one level, as ranges of link numbers.

    ``up``/``down`` lead from a port into the medium that joins the children and back; ``ports_per`` children share a port (1 on
    a switch, all on a bus, a domain of a second interconnect). ``clockwise``/``counter`` are a ring's links from each child to
    its neighbours.
    """

    level: Level
    children: int
    up: int | None = None
    down: int | None = None
    ports_per: int = 1
    clockwise: int | None = None
    counter: int | None = None

    def port(self, child: Ints) -> Ints:
        """The port of a child, numbered over the whole cluster."""
        parent, place = child // self.level.size, child % self.level.size
        ports = -(-self.level.size // self.ports_per)
        return parent * ports + place // self.ports_per


@dataclass(frozen=True)
class Topology:
    """Links of a cluster: their ``bandwidth`` (bytes per second, one direction), the level that each belongs to, and whether it
    is one of the level's second interconnect.
    """

    cluster: Cluster
    tiers: tuple[Tier, ...] = field(init=False)
    bandwidth: Floats = field(init=False)
    link_level: Ints = field(init=False)
    second: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        tiers: list[Tier] = []
        bandwidth: list[Floats] = []
        levels: list[Ints] = []
        second: list[NDArray[np.bool_]] = []
        count = 0

        def add(index: int, links: int, bytes_per_s: float, also: bool = False) -> int:
            nonlocal count
            bandwidth.append(np.full(links, bytes_per_s))
            levels.append(np.full(links, index, np.int64))
            second.append(np.full(links, also))
            count += links
            return count - links

        for index, level in enumerate(self.cluster.levels):
            children = math.prod(self.cluster.shape[: index + 1])
            parents = children // level.size
            per, speed = _ports(level)
            ports = parents * -(-level.size // per)
            up = add(index, ports, speed, level.also is not None) if speed else None
            down = add(index, ports, speed, level.also is not None) if speed else None
            ring = level.kind == "ring"
            clockwise = add(index, children, level.bandwidth_bytes_per_s) if ring else None
            counter = add(index, children, level.bandwidth_bytes_per_s) if ring else None
            tiers.append(Tier(level, children, up, down, per, clockwise, counter))
        object.__setattr__(self, "tiers", tuple(tiers))
        object.__setattr__(self, "bandwidth", np.concatenate(bandwidth))
        object.__setattr__(self, "link_level", np.concatenate(levels))
        object.__setattr__(self, "second", np.concatenate(second))

    @cached_property
    def _below(self) -> tuple[int, ...]:
        """Devices under one child of each level."""
        shape = self.cluster.shape
        return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))

    def meeting_level(self, source: Ints, target: Ints) -> Ints:
        """The level at which two devices' coordinates first differ; the number of levels if they are one device."""
        meet = np.zeros(len(source), np.int64)
        for below in self._below:
            meet += source // below == target // below
        return meet

    def routes(self, source: Ints, target: Ints) -> tuple[Ints, Ints]:
        """The links that each message takes, as parallel arrays (message, link)."""
        messages: list[Ints] = []
        links: list[Ints] = []
        meet = self.meeting_level(source, target)

        def take(message: Ints, link: Ints) -> None:
            messages.append(message)
            links.append(link)

        for index, (tier, below) in enumerate(zip(self.tiers, self._below, strict=True)):
            a, b = source // below, target // below
            if tier.clockwise is None:
                via = np.flatnonzero(meet <= index)
            else:  # a ring carries messages between its own children; others only pass through the level
                crossing = _around_ring(tier, np.flatnonzero(meet == index), a, b, take)
                via = np.concatenate([np.flatnonzero(meet < index), crossing])
            if tier.up is not None and tier.down is not None:
                take(via, tier.up + tier.port(a[via]))
                take(via, tier.down + tier.port(b[via]))
        empty = np.zeros(0, np.int64)
        return np.concatenate([empty, *messages]), np.concatenate([empty, *links])

    def loads(self, source: Ints, target: Ints, weight: Floats) -> Floats:
        """Bytes on every link; each message has ``weight`` bytes.  # [links]"""
        message, link = self.routes(source, target)
        return np.bincount(link, weights=weight[message], minlength=len(self.bandwidth)).astype(np.float64)

    def latencies(self, source: Ints, target: Ints) -> Floats:
        """Seconds until each message's first byte arrives: the latency of the level where its ends meet.

        On a ring it is paid for every hop; a second interconnect takes messages of more than one hop at its own latency.
        """
        meet = self.meeting_level(source, target)
        result = np.array([*(tier.level.latency_s for tier in self.tiers), 0.0])[meet]
        for index, (tier, below) in enumerate(zip(self.tiers, self._below, strict=True)):
            if tier.clockwise is None:
                continue
            at = np.flatnonzero(meet == index)
            forward = (target[at] // below - source[at] // below) % tier.level.size
            hops = np.minimum(forward, tier.level.size - forward)
            other = tier.level.also
            result[at] = np.where(hops > 1, other.latency_s, tier.level.latency_s) if other else hops * tier.level.latency_s
        return result


@dataclass(frozen=True, slots=True)
class Counts:
    """The number of links in `Topology` and of places in `graph`."""

    links: int
    places: int


def counts(cluster: Cluster) -> Counts:
    """The size of a cluster's topology, without building it."""
    links, places = 0, 1
    for index, level in enumerate(cluster.levels):
        children = math.prod(cluster.shape[: index + 1])
        per, speed = _ports(level)
        ports = children // level.size * -(-level.size // per)
        links += (2 * ports if speed else 0) + (2 * children if level.kind == "ring" else 0)
        places += children + (ports if speed and per > 1 else 0)
    return Counts(links, places)


def graph(cluster: Cluster) -> nx.DiGraph[str]:
    """The topology for networkx: devices like ``gpu:3`` (by the last level's name), inner children, media, and their links.

    Edges carry ``link`` (its number in `Topology`), ``bandwidth_bytes_per_s``, ``latency_s`` and ``level``. In a ring without
    a second interconnect a child is its own port, at no cost (an edge without a ``link``).
    """
    import networkx as nx  # takes half a second to load, and plans do not need it

    topology = Topology(cluster)
    result: nx.DiGraph[str] = nx.DiGraph()
    for index, tier in enumerate(topology.tiers):
        level = tier.level
        for child in range(tier.children):
            name, parent = f"{level.name}:{child}", _parent_name(cluster, index, child // level.size)
            data: dict[str, Any] = {"level": level.name, "latency_s": level.latency_s}
            if tier.up is not None and tier.down is not None:
                port = int(tier.port(np.asarray(child)))
                medium = name
                if tier.ports_per > 1:  # the shared medium is a node of its own
                    medium = f"{level.also.name if level.also else level.name + '-bus'}:{port}"
                    result.add_edge(name, medium, **data)
                    result.add_edge(medium, name, **data)
                speed = float(topology.bandwidth[tier.up + port])
                result.add_edge(medium, parent, link=tier.up + port, bandwidth_bytes_per_s=speed, **data)
                result.add_edge(parent, medium, link=tier.down + port, bandwidth_bytes_per_s=speed, **data)
            else:
                result.add_edge(name, parent, **data)
                result.add_edge(parent, name, **data)
            if tier.clockwise is not None and tier.counter is not None and level.size > 1:
                first = child - child % level.size
                for step, base in (
                    (-1, tier.counter),
                    (1, tier.clockwise),
                ):  # on a ring of two only the clockwise link stays
                    other = f"{level.name}:{first + (child - first + step) % level.size}"
                    result.add_edge(name, other, link=base + child, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s, **data)
    return result


def _parent_name(cluster: Cluster, index: int, parent: int) -> str:
    return f"{cluster.levels[index - 1].name}:{parent}" if index else f"{cluster.name}:0"


def _ports(level: Level) -> tuple[int, float | None]:
    """The number of children that share a port of this level's medium, and its speed; None if nothing limits it."""
    if level.kind == "switch":
        return 1, level.bandwidth_bytes_per_s
    if level.kind == "bus":
        return level.size, level.bandwidth_bytes_per_s
    return (level.also.domain, level.also.bandwidth_bytes_per_s) if level.also else (1, None)


def _around_ring(tier: Tier, crossing: Ints, a: Ints, b: Ints, take: Any) -> Ints:
    """Send messages between a ring's children around it, the shorter way; return those that take the second interconnect."""
    assert tier.clockwise is not None
    assert tier.counter is not None
    size = tier.level.size
    forward = (b[crossing] - a[crossing]) % size
    hops = np.minimum(forward, size - forward)
    around = hops == 1 if tier.level.also else np.ones(len(crossing), bool)
    moving, child = crossing[around], a[crossing[around]]
    left, ahead = hops[around], forward[around] <= size - forward[around]
    while len(moving):
        take(moving, np.where(ahead, tier.clockwise, tier.counter) + child)
        child = child - child % size + (child % size + np.where(ahead, 1, -1)) % size
        left = left - 1
        keep = left > 0
        moving, child, left, ahead = moving[keep], child[keep], left[keep], ahead[keep]
    return crossing[~around]
