"""Polish: single factors, then pairs of factors chosen anew while the others are held, to a fixpoint."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from shardplan.search.anytime import Watch
from shardplan.search.pricing import Domain
from shardplan.search.problem import Problem
from shardplan.search.solver import Solution, Solver

JOINT_ENTRIES = 30_000_000
"""Up to this many predicted entries in one table pairs of factors are solved jointly, again and again where need be."""

_NEAR = 1 - 1e-9  # what gains less than the rest gains nothing


@dataclass(slots=True)
class _Polish:
    """The best so far, with its priced cost (of the start where there are no prices its seconds, else not known: infinite)."""

    solver: Solver
    domains: Sequence[Domain]
    best: Solution
    watch: Watch | None
    points: Sequence[int]
    price: float
    cost: float
    also: Sequence[Domain]

    def tried(self, step: Sequence[Domain]) -> bool | None:
        """Whether the best of these domains is better than what was; None if they are too wide for tables."""
        if self.watch is not None:
            self.watch.tell("memory" if self.points else "polish", 0.7 if self.points else 0.6)
        order = self.solver.order(step)
        if order.largest > JOINT_ENTRIES:
            return None
        solution, cost = self.solver.minimum(
            self.best.name, step, points=self.points, price=self.price, order=order, regather=self.best.regather
        )
        if not (cost < self.cost * _NEAR and (self.points or solution.seconds <= self.best.seconds)):
            return False
        better = self.cost < float("inf") or solution.states != self.best.states
        self.best, self.cost = solution, cost
        return better

    def singles(self) -> bool:
        """Every variable may change on one factor, each on whichever: whether there is more to gain than that."""
        found = first = self.tried(near(self.solver.problem, self.domains, self.best, self.also))
        while found:
            found = self.tried(near(self.solver.problem, self.domains, self.best))
        return first is not False

    def pairs(self) -> None:
        """Every variable may change on two factors, one pair after the other; on single ones where a pair is too wide."""
        problem = self.solver.problem
        m = len(problem.sizes)
        moves: list[tuple[int, ...]] = list(itertools.combinations(range(m), 2)) if m > 1 else [(0,)]
        waiting = list(moves)
        while waiting:
            move = waiting.pop(0)
            step = [problem.with_factors(v, self.best.states[v], move, d, later=False) for v, d in enumerate(self.domains)]
            found = self.tried(step)
            if found is None and len(move) > 1:
                single = [(f,) for f in move if (f,) not in moves]
                moves += single
                waiting += single
            elif found:
                waiting = [m for m in moves if m != move]


def near(problem: Problem, domains: Sequence[Domain], of: Solution, also: Sequence[Domain] = ()) -> list[Domain]:
    """For each variable the layouts that differ from a solution's on one factor at most, and those of ``also``."""
    found = [problem.near(v, of.states[v], domain) for v, domain in enumerate(domains)]
    if not also:
        return found
    memo: dict[tuple[Domain, Domain, Domain], Domain] = {}
    rows = list(zip(domains, found, also, strict=True))
    for row in rows:
        if row not in memo:
            wanted = {*row[1], *row[2]}
            memo[row] = tuple(s for s in row[0] if s in wanted)
    return [memo[row] for row in rows]


def polish(
    solver: Solver,
    domains: Sequence[Domain],
    start: Solution,
    watch: Watch | None = None,
    *,
    points: Sequence[int] = (),
    price: float = 0.0,
    also: Sequence[Domain] = (),
) -> Solution:
    """Chooses pairs of levels anew, the others held, until nothing improves.

    With three levels and more, single ones first, and among the layouts of ``also``: where nothing of this is better, pairs are
    not tried.
    """
    work = _Polish(solver, domains, start, watch, points, price, float("inf") if points else start.seconds, also)
    if len(solver.problem.sizes) < 3 or work.singles():
        work.pairs()
    return work.best
