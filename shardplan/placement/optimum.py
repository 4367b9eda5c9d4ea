"""The best strategy of a small problem, by depth-first search with A* pruning (FlexFlow, section 8.3).

Operators get configurations in their order. A branch is left once a lower bound on every strategy in it reaches the best step so
far. The bound is the larger of two: the longest chain of tasks and transfers if nothing waited for a device, and the work of the
busiest device, or of all if they shared it evenly. Devices that the levels treat alike are tried once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.errors import PlacementError
from shardplan.placement.configurations import Configuration, Strategy, degrees_of, groups_of
from shardplan.placement.machine import TICK_S
from shardplan.placement.problem import PlacementProblem
from shardplan.placement.simulation import Engine
from shardplan.placement.structure import structure_of
from shardplan.placement.synchronisation import sync_groups
from shardplan.placement.tails import Tails
from shardplan.placement.task_graph import TaskGraphBuilder
from shardplan.placement.transfers import Transfers, backward_transfers, forward_transfers

Ints = NDArray[np.int64]

MOST_SIMULATIONS = 2_000_000
"""A search that simulates more strategies than this is given up: the problem is not small."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best strategy, the seconds of a step, how many strategies were simulated, and how many there are."""

    strategy: Strategy
    seconds: float
    simulated: int
    bounded: int
    strategies: float


def candidates_of(problem: PlacementProblem) -> list[list[Configuration]]:
    """For each operator, all its degrees on all groups of devices that follow the levels."""
    shape = problem.machine.cluster.shape
    return [
        [Configuration(d, group) for d in degrees_of(o, problem.machine.count) for group in groups_of(shape, math.prod(d))]
        for o in problem.graph.operators
    ]


def optimum(
    problem: PlacementProblem,
    start: Sequence[Configuration],
    candidates: Sequence[Sequence[Configuration]] | None = None,
    *,
    engine: Engine = "python",
) -> Optimum:
    """The best strategy of these candidates, or the start if none is better. Devices may have only one speed.

    Raises:
        PlacementError: if the speeds differ, or if the problem is not small.
    """
    if len(set(problem.machine.speed.tolist())) > 1:
        raise PlacementError("the optimum is searched on devices of one speed: those that the levels treat alike are tried once")
    return _Search(problem, start, candidates_of(problem) if candidates is None else candidates, engine).run()


@dataclass(frozen=True, slots=True)
class _Tried:
    """A configuration of an operator after those before it: the earliest ``ends`` of its parts in the forward pass, the ticks
    ``backs`` from the start of their backward tasks to the end of the step, the ``load`` of devices, and a lower bound.
    """

    ends: Ints
    backs: Ints
    load: Ints
    bound: int


class _Search:
    def __init__(
        self,
        problem: PlacementProblem,
        start: Sequence[Configuration],
        candidates: Sequence[Sequence[Configuration]],
        engine: Engine,
    ) -> None:
        self.problem, self.candidates = problem, candidates
        self.simulation = problem.simulation(engine)
        self.best, self.best_ticks = tuple(start), self.simulation.full(start)
        self.shape = problem.machine.cluster.shape
        structure = structure_of(problem.graph)
        self.prices = TaskGraphBuilder(structure, problem.machine, problem.tables).prices
        self.tails = Tails(structure, problem.tables, float(problem.machine.speed.max()))
        self.reduced = np.zeros(len(problem.graph.weights), np.int64)
        self.chosen: list[Configuration] = []
        self.ends: list[Ints] = []  # of each chosen operator, the earliest end of each part
        self.backs: list[Ints] = []  # the ticks that pass from the start of each part's backward task to the end of the step
        self.load = np.zeros(problem.machine.count, np.int64)
        self.simulated = self.bounded = 0
        tables, speed = problem.tables, float(problem.machine.speed[0])
        work = [[sum(tables[i][c.degrees]) * len(c.devices) for c in own] for i, own in enumerate(candidates)]
        self.rest = np.append(np.cumsum([min(w) for w in work][::-1])[::-1], 0) / speed
        for i, own in enumerate(candidates):
            self.tails.leave_open(i, [int(min(tables[i][c.degrees][p] for c in own) / speed) for p in range(3)])
        self.structure = structure
        self.open = [
            [int(min(tables[i][c.degrees][p] for c in own) / speed) for p in range(3)] for i, own in enumerate(candidates)
        ]

        self.around = [0] * len(candidates)  # from the forward end of an operator through those behind it, back to its gradient
        for e in sorted(problem.graph.edges, key=lambda e: -e.consumer):
            own = self.open[e.consumer]
            if e.gradient:
                self.around[e.producer] = max(self.around[e.producer], own[0] + self.around[e.consumer] + own[1])

    def run(self) -> Optimum:
        """Searches all branches."""
        self._branch(frozenset())
        count = math.prod(float(len(c)) for c in self.candidates)
        return Optimum(self.best, self.best_ticks * TICK_S, self.simulated, self.bounded, count)

    def _branch(self, used: frozenset[int]) -> None:
        i = len(self.chosen)
        if i == len(self.candidates):
            self._simulate()
            return
        children: list[tuple[int, int, _Tried]] = []
        for n, c in enumerate(self.candidates[i]):
            if canonical(used, c.devices, self.shape):
                tried = self._try(i, c)
                self.bounded += 1
                if tried.bound < self.best_ticks:
                    children.append((tried.bound, n, tried))
        before = self.load, self.reduced
        for bound, n, tried in sorted(children, key=lambda child: child[:2]):
            if bound >= self.best_ticks:
                break
            c = self.candidates[i][n]
            self.chosen.append(c)
            self.ends.append(tried.ends)
            self.backs.append(tried.backs)
            self.load, self.reduced = tried.load, self._reductions(i)
            self.tails.change(i, c)
            self._branch(used | set(c.devices))
            self.chosen.pop()
            self.ends.pop()
            self.backs.pop()
            self.load, self.reduced = before
            self.tails.leave_open(i, self.open[i])

    def _simulate(self) -> None:
        self.simulated += 1
        if self.simulated > MOST_SIMULATIONS:
            raise PlacementError(f"the optimum of {len(self.candidates)} operators takes too long to find: search with mcmc")
        ticks = self.simulation.full(self.chosen)
        if ticks < self.best_ticks:
            self.best, self.best_ticks = tuple(self.chosen), ticks

    def _try(self, i: int, c: Configuration) -> _Tried:
        """What the configuration of operator i means, after those of all operators before it."""
        problem = self.problem
        forward, backward, update = (int(t / problem.machine.speed[0]) for t in problem.tables[i][c.degrees])
        devices = np.array(c.devices)
        ready = np.zeros(len(devices), np.int64)
        after = np.full(len(devices), update if self.structure.update[i] else 0)
        for e in problem.graph.edges:
            if e.consumer == i:
                sent = forward_transfers(e, self.chosen[e.producer], c, problem.machine)
                np.maximum.at(ready, sent.target, self.ends[e.producer][sent.source] + _takes(sent))
                if e.gradient:
                    back = backward_transfers(e, self.chosen[e.producer], c, problem.machine)
                    np.maximum.at(after, back.source, self.backs[e.producer][back.target] + _takes(back))
        ends, backs = ready + forward, after + backward
        load = self.load + np.bincount(devices, minlength=len(self.load)) * max(0, forward + backward + update - 3)
        even = (int(load.sum()) + int(self.rest[i + 1])) // len(load) - 3 * len(self.candidates)
        chain = int(max(ends.min() + self.around[i] + backs.min(), (ends + backs).max()))
        self.tails.change(i, c)
        tail = int(ends.min() + self.tails.bounds(self.reduced)[3 * i])
        self.tails.leave_open(i, self.open[i])
        return _Tried(ends, backs, load, max(int(load.max()), even, chain if self.structure.backward[i] else 0, tail))

    def _reductions(self, i: int) -> Ints:
        """The ticks of the reductions of each weight whose users all have configurations, up to operator i."""
        reduced = self.reduced.copy()
        for w, weight in enumerate(self.problem.graph.weights):
            if max(weight.users) == i:
                busy: dict[int, int] = {}
                for mask, nbytes in sync_groups(weight, [self.chosen[u] for u in weight.users]):
                    for link in self.prices.links(mask):
                        busy[link] = busy.get(link, 0) + max(1, round(self.prices.seconds(mask, nbytes) / TICK_S))
                reduced[w] = max(busy.values(), default=0)
        return reduced


def _takes(sent: Transfers) -> Ints:
    """[pairs]: the ticks of each message; 0 on one device."""
    return np.where(sent.message >= 0, np.append(sent.ticks, 0)[sent.message], 0)


def canonical(used: frozenset[int], devices: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether new devices are taken in order, level by level: all orders of unused children of a parent are alike.

    >>> canonical(frozenset({0}), (1, 2), (4,)), canonical(frozenset({0}), (2, 1), (4,))
    (True, False)
    """
    seen = set(used)
    for device in devices:
        below = math.prod(shape)
        for size in shape:
            child, below = device // (below // size), below // size
            first = child // size * size
            if any(not any(d // below == other for d in seen) for other in range(first, child)):
                return False
        seen.add(device)
    return True
