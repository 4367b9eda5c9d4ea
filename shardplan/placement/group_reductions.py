"""What an all-reduce among any group of devices takes: the best reduction program where the group follows the levels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shardplan.collectives import best_reduction
from shardplan.cost import Network
from shardplan.mesh.factoring import coordinates, factors
from shardplan.placement.device_topology import TICK_S, Machine


@dataclass(slots=True)
class GroupPrices:
    """Prices of all-reduces, memoised. A group is a bit mask of devices."""

    machine: Machine
    _network: Network = field(init=False)
    _over: dict[int, tuple[int, ...] | None] = field(default_factory=dict[int, "tuple[int, ...] | None"])
    _seconds: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    _links: dict[int, tuple[int, ...]] = field(default_factory=dict[int, "tuple[int, ...]"])

    def __post_init__(self) -> None:
        self._network = Network(self.machine.cluster, factors(self.machine.cluster))

    def seconds(self, mask: int, nbytes: int) -> float:
        """Seconds of an all-reduce of so many bytes on each device of the group."""
        key = mask, nbytes
        if key not in self._seconds:
            over = self._levels(mask)
            ring = self._ring(members_of(mask), nbytes)
            self._seconds[key] = ring if over is None else min(ring, best_reduction(self._network, over, nbytes)[0])
        return self._seconds[key]

    def ticks(self, mask: int, nbytes: int) -> int:
        """The ticks of that all-reduce, at least one."""
        return max(1, round(self.seconds(mask, nbytes) / TICK_S))

    def links(self, mask: int) -> tuple[int, ...]:
        """The connections that the group keeps busy: the slowest of those by which its ring leaves each device."""
        if mask not in self._links:
            members = members_of(mask)
            after = np.roll(members, -1)
            link, slow = self.machine.link[members, after], self.machine.bytes_per_s[members, after]
            self._links[mask] = tuple(sorted(set(link[slow == slow.min()].tolist())))
        return self._links[mask]

    def _ring(self, members: Sequence[int], nbytes: int) -> float:
        n = len(members)
        after = np.roll(members, -1)
        around = float(self.machine.latency_s[members, after].sum())
        slowest = float(self.machine.bytes_per_s[members, after].min())
        return 2 * around * (n - 1) / n + 2 * (n - 1) / n * nbytes / slowest + self.machine.cluster.device.instruction_s

    def _levels(self, mask: int) -> tuple[int, ...] | None:
        """The factors over which the group extends, if it is all devices that agree in the others; else None.

        None too where two of its devices have a link of their own, which reduction programs do not know.
        """
        if any(mask >> a & mask >> b & 1 for a, b in self.machine.single_pairs):
            return None
        if mask not in self._over:
            at = coordinates(self.machine.cluster, self._network.factors)[members_of(mask)]
            over = tuple(i for i, column in enumerate(at.T) if len(set(column.tolist())) > 1)
            self._over[mask] = over if math.prod(self._network.factors[i].size for i in over) == len(at) else None
        return self._over[mask]


def members_of(mask: int) -> list[int]:
    """The devices of a bit mask, ascending.

    >>> members_of(0b1011)
    [0, 1, 3]
    """
    return [d for d in range(mask.bit_length()) if mask >> d & 1]
