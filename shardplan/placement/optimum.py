"""The best strategy of a small problem, by depth-first search with A* pruning (FlexFlow, section 8.3).

Operators get configurations in their order. A branch is left once a lower bound on every strategy in it reaches the best step so
far. The bound is the largest of several:

- the longest chain of tasks, transfers and reductions if nothing waited for a device; operators without a configuration have the
  best one for each that their neighbour may have (`pair_costs.Behind`);
- the work of the busiest device or connection, or of all devices if they shared it evenly;
- the earliest end of a backward task, and all reductions of the busiest connection after it.

Devices that the levels treat alike are tried each: parts are placed in order, so that a relabelling of devices seldom maps the
candidates onto themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.errors import PlacementError
from shardplan.placement.configurations import Configuration, Strategy, degrees_of, present_groups
from shardplan.placement.device_topology import TICK_S
from shardplan.placement.held_bytes import Memory, may_exceed
from shardplan.placement.pair_costs import Behind, PairCosts
from shardplan.placement.placement_problem import PlacementProblem
from shardplan.placement.simulation import Engine

Ints = NDArray[np.int64]

MOST_SIMULATIONS = 2_000_000
"""A search that simulates more strategies than this is given up: the problem is not small."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best strategy and the seconds of a step, which is at least ``bound_s`` under every strategy.

    ``bound_s`` equals ``seconds`` unless the search was cut off. ``simulated`` and ``bounded`` count whole and partial
    strategies, of ``strategies`` in all.
    """

    strategy: Strategy
    seconds: float
    bound_s: float
    simulated: int
    bounded: int
    strategies: float


def aligned_configurations(problem: PlacementProblem) -> list[list[Configuration]]:
    """For each operator, all its degrees on all groups of devices that follow the levels."""
    machine = problem.machine
    shape, most = machine.cluster.shape, len(machine.present)
    return [
        [Configuration(d, group) for d in degrees_of(o, most) for group in present_groups(shape, math.prod(d), machine.absent)]
        for o in problem.graph.operators
    ]


def optimum(
    problem: PlacementProblem,
    start: Sequence[Configuration],
    candidates: Sequence[Sequence[Configuration]] | None = None,
    *,
    most_bounded: int | None = None,
    engine: Engine = "python",
) -> Optimum:
    """The best strategy of these candidates that fits in memory, or the start if none is better.

    After ``most_bounded`` partial strategies the search is cut off: the answer is the best so far, with a lower bound on all.

    Raises:
        PlacementError: if the problem is not small.
    """
    return _Search(problem, start, aligned_configurations(problem) if candidates is None else candidates, engine).run(
        most_bounded
    )


@dataclass(frozen=True, slots=True)
class _Partial:
    """Configurations of the first operators, and what is certain of every strategy that begins with them, in ticks.

    ``ends`` are the earliest ends of their parts in the forward pass, ``backs`` the ticks from the start of their backward tasks
    to the end of the step. ``load`` and ``links`` are the work of each device and connection, ``reduced`` the work of reductions
    alone. ``turn`` is the earliest end of a backward task.
    """

    numbers: tuple[int, ...]
    ends: tuple[Ints, ...]
    backs: tuple[Ints, ...]
    load: Ints
    links: Ints
    reduced: Ints
    turn: int
    bound: int
    memory: Memory | None


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
        self.costs = PairCosts(problem, candidates)
        self.behind = Behind(self.costs)
        self.simulated = self.bounded = 0
        self.most_bounded, self.left = math.inf, 1 << 60  # the least bound of a branch that was cut off
        graph = problem.graph
        self.edges = [[(k, e) for k, e in enumerate(graph.edges) if e.consumer == i] for i in range(len(candidates))]
        self.complete = [[w for w, weight in enumerate(graph.weights) if max(weight.users) == i] for i in range(len(candidates))]
        least = [min(self._work(i, n) for n in range(len(own))) for i, own in enumerate(candidates)]
        self.rest = np.append(np.cumsum(least[::-1])[::-1], 0)  # work of the operators from each on, on the fastest devices

    def run(self, most_bounded: int | None) -> Optimum:
        """Searches all branches, or those that so many partial strategies reach."""
        self.most_bounded = math.inf if most_bounded is None else most_bounded
        machine = self.problem.machine
        memory = Memory(self.problem, ()) if may_exceed(self.problem) else None
        links = np.zeros(len(machine.links), np.int64)
        self._branch(_Partial((), (), (), np.zeros(machine.count, np.int64), links, links, 0, 0, memory))
        count = math.prod(float(len(c)) for c in self.candidates)
        return Optimum(
            self.best, self.best_ticks * TICK_S, min(self.best_ticks, self.left) * TICK_S, self.simulated, self.bounded, count
        )

    def _branch(self, partial: _Partial) -> None:
        i = len(partial.numbers)
        if i == len(self.candidates):
            self._simulate(partial)
            return
        children: list[_Partial] = []
        for n in range(len(self.candidates[i])):
            child = self._with(partial, n)
            self.bounded += 1
            if child is not None and child.bound < self.best_ticks:
                children.append(child)
        for child in sorted(children, key=lambda child: (child.bound, child.numbers)):
            if child.bound >= self.best_ticks:
                break
            if self.bounded >= self.most_bounded:
                self.left = min(self.left, child.bound)
                break
            self._branch(child)

    def _simulate(self, partial: _Partial) -> None:
        self.simulated += 1
        if self.simulated > MOST_SIMULATIONS:
            raise PlacementError(f"the optimum of {len(self.candidates)} operators takes too long to find: search with mcmc")
        strategy = [own[n] for own, n in zip(self.candidates, partial.numbers, strict=True)]
        ticks = self._ticks(strategy)
        if ticks is not None and ticks < self.best_ticks:
            self.best, self.best_ticks = tuple(strategy), ticks

    def _ticks(self, strategy: Sequence[Configuration]) -> int | None:
        """The ticks of a strategy; None if they are no better than the best."""
        changed = {i: a for i, (a, b) in enumerate(zip(strategy, self.simulation.strategy, strict=True)) if a != b}
        if not changed:
            return self.simulation.ticks
        if (ticks := self.simulation.change(changed, self.best_ticks - 1)) is None:
            self.simulation.undo()
        return ticks

    def _work(self, i: int, n: int) -> int:
        return int(self.costs.phases[i][n].sum())

    def _with(self, partial: _Partial, n: int) -> _Partial | None:
        """The state with the candidate n of the next operator; None if it does not fit in memory."""
        i = len(partial.numbers)
        numbers, costs, chosen = (*partial.numbers, n), self.costs, self.candidates[i][n]
        memory = self._memory(partial.memory, numbers)
        if memory is not None and not memory.fits:
            return None
        forward, backward, update = costs.phases[i][n]
        users = self.problem.graph.weights
        reductions = [costs.reduction(w, [numbers[u] for u in users[w].users]) for w in self.complete[i]]
        reduced = sum(reductions, partial.reduced)
        ready = np.zeros(len(forward), np.int64)
        after = update + max((int(r.max(initial=0)) for r in reductions), default=0)
        links = sum(reductions, partial.links)
        for k, e in self.edges[i]:
            pair = costs.pair(k, numbers[e.producer], n)
            ready = np.maximum(ready, (partial.ends[e.producer][:, None] + pair.there).max(axis=0))
            if e.gradient:
                after = np.maximum(after, (partial.backs[e.producer][:, None] + pair.back).max(axis=0))
            links = links + pair.links
        ends, backs = ready + forward, after + backward
        load = partial.load + np.bincount(np.array(chosen.devices), costs.phases[i][n].sum(axis=0), len(partial.load)).astype(
            np.int64
        )
        first = int(ends.min())
        turn = max(partial.turn, first + int(self.behind.turn[i][n]) if self.behind.rooted else 0)
        around = first + int(self.behind.around[i][n]) + int(backs.min()) if costs.structure.backward[i] else 0
        bounds = (
            partial.bound,
            int((ends + backs).max()) if costs.structure.backward[i] else int(ends.max()),
            around,
            first + int(self.behind.ends[i][n]),
            int(load.max()),
            -(-(int(load.sum()) + int(self.rest[i + 1])) // len(self.problem.machine.present)),
            int(links.max(initial=0)),
            turn + int(reduced.max(initial=0)),
        )
        return _Partial(numbers, (*partial.ends, ends), (*partial.backs, backs), load, links, reduced, turn, max(bounds), memory)

    def _memory(self, before: Memory | None, numbers: Sequence[int]) -> Memory | None:
        if before is None:
            return None
        return before.extended([own[n] for own, n in zip(self.candidates, numbers, strict=False)])
