"""The devices of a cluster and the connections between them (FlexFlow's device topology).

A message between two devices occupies one connection: the port by which the sender's side leaves the level where the two meet (a
GPU's own on a switch, a node's into the network, the shared medium of a bus). Its bandwidth is the least on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardplan.errors import PlacementError
from shardplan.mesh import Cluster
from shardplan.mesh.topology import Topology

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TICK_S = 1e-12
"""Times are whole picoseconds, so that sums do not depend on their order: a full and a delta simulation agree to the bit."""


@dataclass(frozen=True)
class DeviceTopology:
    """Devices [n] with their ``speed`` (1: the speed of the cluster's device) and ``memory_bytes``, and the connections between
    them.

    ``absent`` devices keep their numbers, and run nothing.

    ``latency_s``, ``bytes_per_s`` and ``link`` [n, n] describe a message from a row's device to a column's; ``link`` is a number
    of ``links``, or -1 on the diagonal.
    """

    cluster: Cluster
    speed: Floats
    latency_s: Floats
    bytes_per_s: Floats
    link: Ints
    links: tuple[str, ...]
    memory_bytes: Ints
    absent: frozenset[int] = frozenset()

    @property
    def count(self) -> int:
        """The number of devices, absent ones included."""
        return len(self.speed)

    @cached_property
    def present(self) -> tuple[int, ...]:
        """The devices that may run something, ascending."""
        return tuple(d for d in range(self.count) if d not in self.absent)

    @cached_property
    def single_pairs(self) -> frozenset[tuple[int, int]]:
        """The pairs of devices with a link of their own, the smaller number first."""
        return frozenset(link.between for link in self.cluster.single_links)

    @cached_property
    def latency_ticks(self) -> Ints:
        """[n, n]: the latencies in ticks."""
        return np.rint(self.latency_s / TICK_S).astype(np.int64)

    @cached_property
    def ticks_per_byte(self) -> Floats:
        """[n, n]: the time of a byte in ticks."""
        return 1.0 / (self.bytes_per_s * TICK_S)


MOST_DEVICES = 4096
"""Tables of pairs of devices take 1 GB for so many."""


def machine_of(cluster: Cluster, speed: Sequence[float] | Floats | None = None) -> DeviceTopology:
    """The devices of a cluster; ``speed`` [n] is a factor on their speeds (0.5: each op takes twice as long).

    Raises:
        PlacementError: for more than `MOST_DEVICES`, a speed that is not above 0, or another number of speeds than devices.
    """
    n = cluster.size
    if n > MOST_DEVICES:
        raise PlacementError(f"{cluster.name} has {n:,} devices, too many to place operators on: take at most {MOST_DEVICES:,}")
    try:
        speeds = np.ones(n) if speed is None else np.array(speed, np.float64)
    except (TypeError, ValueError, OverflowError):
        speeds = np.zeros(0)
    if speeds.shape != (n,):
        raise PlacementError(
            f"speed={speed!r}: give {n} numbers, one for each device of {cluster.name}, 1 for the cluster file's speed"
        )
    if len(bad := np.flatnonzero(~(np.isfinite(speeds) & (speeds > 0)))):
        raise PlacementError(
            f"speed[{bad[0]}] is {speeds[bad[0]]:g}: give a finite number above 0, 1 for the cluster file's speed"
        )
    topology = Topology(cluster)
    a, b = (x.ravel() for x in np.meshgrid(np.arange(n), np.arange(n), indexing="ij"))
    meet = topology.meeting_level(a, b)
    rates = np.array([level.bandwidth_bytes_per_s * level.ring_efficiency / level.rails for level in cluster.levels])
    least = np.minimum.accumulate(rates[::-1])[::-1]
    link, names = _links(cluster, topology, a, meet)
    same = a == b
    link[same] = -1
    latency = np.where(same, 0.0, topology.latencies(a, b))
    bandwidth = np.where(same, np.inf, least[np.minimum(meet, len(rates) - 1)])
    memory = np.full(n, cluster.device.memory_bytes)
    levels = DeviceTopology(cluster, speeds, latency.reshape(n, n), bandwidth.reshape(n, n), link.reshape(n, n), names, memory)
    return _with_singles(levels)


def _with_singles(machine: DeviceTopology) -> DeviceTopology:
    """The machine with the single devices and links of its cluster."""
    names = list(machine.links)
    for device in machine.cluster.single_devices:
        machine.speed[device.index] *= device.speed
        if device.memory_bytes is not None:
            machine.memory_bytes[device.index] = device.memory_bytes
    for single in machine.cluster.single_links:
        for pair in (single.between, single.between[::-1]):
            if single.latency_s is not None:
                machine.latency_s[pair] = single.latency_s
            if single.bandwidth_bytes_per_s is not None:
                machine.bytes_per_s[pair] = single.bandwidth_bytes_per_s
            machine.link[pair] = len(names)
            names.append("link {}-{}".format(*pair))
    absent = frozenset(d.index for d in machine.cluster.single_devices if d.absent)
    return replace(machine, links=tuple(names), absent=absent)


def _links(cluster: Cluster, topology: Topology, source: Ints, meet: Ints) -> tuple[Ints, tuple[str, ...]]:
    """The connection of each message, and the names of all connections."""
    link, names = np.full(len(source), -1), list[str]()
    below = cluster.size
    for index, (level, tier) in enumerate(zip(cluster.levels, topology.tiers, strict=True)):
        below //= level.size
        own = meet == index
        ports = tier.port(np.arange(cluster.size // below))
        link[own] = len(names) + tier.port(source[own] // below)
        shared = "bus" if level.kind == "bus" else level.name
        names += [f"{shared} {p}" for p in range(int(ports.max()) + 1)]
    return link, tuple(names)
