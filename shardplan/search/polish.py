"""Polish: single factors, then pairs of factors chosen anew while the others are held, to a fixpoint."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardplan.search.anytime import Watch
from shardplan.search.pricing import Domain
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
        found = self.tried(list(self._near()))
        if not found:
            return found is None
        while found:
            found = self.tried(list(self._near()))
        return True

    def _near(self) -> Iterator[Domain]:
        for v, domain in enumerate(self.domains):
            yield self.solver.problem.near(v, self.best.states[v], domain)

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


def polish(
    solver: Solver,
    domains: Sequence[Domain],
    start: Solution,
    watch: Watch | None = None,
    *,
    points: Sequence[int] = (),
    price: float = 0.0,
) -> Solution:
    """Chooses pairs of levels anew, the others held, until nothing improves.

    With three levels and more, single ones first: where no change of these is better, pairs are not tried.
    """
    work = _Polish(solver, domains, start, watch, points, price, float("inf") if points else start.seconds)
    if len(solver.problem.sizes) < 3 or work.singles():
        work.pairs()
    return work.best
