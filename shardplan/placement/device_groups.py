"""Groups of devices: what some operators take on one, and the regions of a strategy.

A *region* is a connected set of operators that share one group of devices. A group follows the levels of the cluster.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardplan.placement.configurations import Configuration, Group, Strategy, divisors
from shardplan.placement.device_topology import TICK_S
from shardplan.placement.group_reductions import GroupPrices
from shardplan.placement.mcmc import neighbours_of
from shardplan.placement.placement_problem import PlacementProblem
from shardplan.placement.starts import data_parallel_on

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Region:
    """Connected operators, by number, on one group of devices. ``seconds``: how long its busiest device computes in a step."""

    devices: Group
    operators: tuple[int, ...]
    seconds: float


def regions_of(problem: PlacementProblem, strategy: Sequence[Configuration], groups: Sequence[Group]) -> tuple[Region, ...]:
    """The regions of a strategy in which operator i has the devices ``groups[i]``, in the order of their first operators."""
    neighbours, found, seen = neighbours_of(problem), list[Region](), set[int]()
    for i, group in enumerate(groups):
        if i in seen:
            continue
        own, stack = {i}, [i]
        while stack:
            for j in neighbours[stack.pop()]:
                if j not in own and groups[j] == group:
                    own.add(j)
                    stack.append(j)
        seen |= own
        members = tuple(sorted(own))
        found.append(Region(group, members, _busiest_s(problem, strategy, members)))
    return tuple(found)


def _busiest_s(problem: PlacementProblem, strategy: Sequence[Configuration], operators: Sequence[int]) -> float:
    busy: dict[int, float] = {}
    for i in operators:
        each = sum(problem.tables[i][strategy[i].degrees]) * TICK_S
        for d in strategy[i].devices:
            busy[d] = busy.get(d, 0.0) + each / float(problem.machine.speed[d])
    return max(busy.values())


def used_groups(strategy: Strategy) -> tuple[Group, ...]:
    """The devices that each operator uses, ascending."""
    return tuple(tuple(sorted(c.used)) for c in strategy)


def proportional_groups(shape: Sequence[int], work: Sequence[float]) -> tuple[Group, ...]:
    """Disjoint groups of consecutive devices, about as large as the shares of some work; none if there are too few devices.

    The group with the most work for each device grows first, to the next size that follows the levels.

    >>> proportional_groups((2, 4), [3.0, 1.0])
    ((0, 1, 2, 3), (4, 5, 6, 7))
    >>> proportional_groups((1, 4), [1.0, 2.0, 1.0])
    ((2,), (0, 1), (3,))
    """
    spare = math.prod(shape) - len(work)
    if spare < 0:
        return ()
    sizes = [1] * len(work)
    queue = [(-w, n) for n, w in enumerate(work)]
    heapq.heapify(queue)
    while queue:
        _, n = heapq.heappop(queue)
        larger = next((s for s in consecutive_sizes(shape) if s > sizes[n]), None)
        if larger is not None and larger - sizes[n] <= spare:
            spare -= larger - sizes[n]
            sizes[n] = larger
            heapq.heappush(queue, (-work[n] / larger, n))
    at, groups = 0, dict[int, Group]()
    for n in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):  # large ones first: they begin where a level does
        groups[n] = tuple(range(at, at + sizes[n]))
        at += sizes[n]
    return tuple(groups[n] for n in range(len(sizes)))


def consecutive_sizes(shape: Sequence[int]) -> list[int]:
    """The sizes of consecutive groups that follow the levels, ascending.

    >>> consecutive_sizes((3, 4))
    [1, 2, 4, 12]
    """
    return sorted({k * math.prod(shape[n + 1 :]) for n in range(len(shape)) for k in divisors(shape[n], shape[n])})


@dataclass(slots=True)
class GroupTimes:
    """Seconds of operators that run data parallel on a group, and of the tensors between two groups; memoised."""

    problem: PlacementProblem
    _prices: GroupPrices = field(init=False)
    _seconds: dict[tuple[int, Group], float] = field(default_factory=dict[tuple[int, Group], float])
    _weight_bytes: dict[int, int] = field(default_factory=dict[int, int])

    def __post_init__(self) -> None:
        self._prices = GroupPrices(self.problem.machine)
        for w in self.problem.graph.weights:
            own = w.itemsize * math.prod(w.shape)
            self._weight_bytes[w.users[0]] = self._weight_bytes.get(w.users[0], 0) + own

    def operator_s(self, i: int, group: Group) -> float:
        """Seconds of an operator in all phases, and of the reduction of its weights' gradients."""
        key = i, group
        if key not in self._seconds:
            chosen = data_parallel_on(self.problem, self.problem.graph.operators[i], group)
            slowest = float(self.problem.machine.speed[list(chosen.devices)].min())
            seconds = sum(self.problem.tables[i][chosen.degrees]) * TICK_S / slowest
            if len(chosen.devices) > 1 and i in self._weight_bytes:
                seconds += self._prices.seconds(sum(1 << d for d in chosen.used), self._weight_bytes[i])
            self._seconds[key] = seconds
        return self._seconds[key]

    def operators_s(self, operators: Sequence[int], group: Group) -> float:
        """Seconds of several operators."""
        return sum(self.operator_s(i, group) for i in operators)

    def edges_s(self, groups: Sequence[Group]) -> Floats:
        """[tensors, from, to]: seconds of each tensor, there and back, between two of some disjoint groups.

        The devices of the smaller group send their shares at once, each as the first of its group does.
        """
        machine, edges = self.problem.machine, self.problem.graph.edges
        first = np.ix_(*[[g[0] for g in groups]] * 2)
        sizes = np.array([len(g) for g in groups])
        s_per_byte = 1 / machine.bytes_per_s[first] / np.minimum.outer(sizes, sizes)
        nbytes = np.array([e.itemsize * math.prod(e.shape) for e in edges], np.float64).reshape(-1, 1, 1)
        ways = np.array([2 if e.gradient else 1 for e in edges]).reshape(-1, 1, 1)
        return ways * (machine.latency_s[first] + nbytes * s_per_byte)
