"""The time of an all-reduce among any group of devices: by the best reduction program if the group follows the levels."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardplan.collectives import best_reduction
from shardplan.cost import Network
from shardplan.mesh.factoring import coordinates, factors
from shardplan.placement.device_topology import TICK_S, DeviceTopology


@dataclass(slots=True)
class GroupPrices:
    """Prices of all-reduces, memoised. A group is a bit mask of devices."""

    machine: DeviceTopology
    _network: Network = field(init=False)
    _at: NDArray[np.int64] = field(init=False)
    _over: dict[int, tuple[int, ...] | None] = field(default_factory=dict[int, "tuple[int, ...] | None"])
    _programs: dict[tuple[tuple[int, ...], int], float] = field(default_factory=dict[tuple[tuple[int, ...], int], float])
    _seconds: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    _links: dict[int, tuple[int, ...]] = field(default_factory=dict[int, "tuple[int, ...]"])

    def __post_init__(self) -> None:
        self._network = Network(self.machine.cluster, factors(self.machine.cluster))
        self._at = coordinates(self.machine.cluster, self._network.factors)

    def seconds(self, mask: int, nbytes: int) -> float:
        """Seconds of an all-reduce of so many bytes on each device of the group."""
        key = mask, nbytes
        if key not in self._seconds:
            over = self._levels(mask)
            ring = self._ring(mask, nbytes)
            self._seconds[key] = ring if over is None else min(ring, self._program(over, nbytes))
        return self._seconds[key]

    def _program(self, over: tuple[int, ...], nbytes: int) -> float:
        """Seconds of the best reduction program over these factors."""
        key = over, nbytes
        if key not in self._programs:
            self._programs[key] = best_reduction(self._network, over, nbytes)[0]
        return self._programs[key]

    def ticks(self, mask: int, nbytes: int) -> int:
        """The ticks of that all-reduce, at least one."""
        return max(1, round(self.seconds(mask, nbytes) / TICK_S))

    def links(self, mask: int) -> tuple[int, ...]:
        """The connections that the group keeps busy: the slowest of those by which its ring leaves each device."""
        if mask not in self._links:
            members, after = _ring_of(mask)
            link, slow = self.machine.link[members, after], self.machine.bytes_per_s[members, after]
            self._links[mask] = tuple(sorted(set(link[slow == slow.min()].tolist())))
        return self._links[mask]

    def _ring(self, mask: int, nbytes: int) -> float:
        members, after = _ring_of(mask)
        n = len(members)
        around = float(self.machine.latency_s[members, after].sum())
        slowest = float(self.machine.bytes_per_s[members, after].min())
        return 2 * around * (n - 1) / n + 2 * (n - 1) / n * nbytes / slowest + self.machine.cluster.device.instruction_s

    def _levels(self, mask: int) -> tuple[int, ...] | None:
        """The factors over which the group extends, if it consists of all devices that agree in the others; else None. Also None
        if two of its devices have a link of their own, which reduction programs do not know.
        """
        if any(mask >> a & mask >> b & 1 for a, b in self.machine.single_pairs):
            return None
        if mask not in self._over:
            at = self._at[members_of(mask)]
            over = tuple(np.flatnonzero((at != at[0]).any(axis=0)).tolist())
            self._over[mask] = over if math.prod(self._network.factors[i].size for i in over) == len(at) else None
        return self._over[mask]


def _ring_of(mask: int) -> tuple[list[int], list[int]]:
    """The devices of a group, ascending, and the next of each in its ring."""
    members = members_of(mask)
    return members, [*members[1:], members[0]]


def members_of(mask: int) -> list[int]:
    """The devices of a bit mask, ascending.

    >>> members_of(0b1011)
    [0, 1, 3]
    """
    return [d for d in range(mask.bit_length()) if mask >> d & 1]
