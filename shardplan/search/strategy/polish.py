"""Polish: chooses every variable anew near its layout, to a fixpoint: on one factor and, if that gained, on pairs of factors.

Pairs reach further and cost several times as much; on models over three levels they seldom find what single factors do not.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.constants import CONSTANTS
from shardplan.search.inference.anytime import Watch
from shardplan.search.inference.solver import Solver
from shardplan.search.problem.pricing import Domain
from shardplan.search.problem.problem import Problem
from shardplan.search.problem.solution import Solution


@dataclass(slots=True)
class _Polish:
    """The best solution so far. ``cost`` is its cost with the price on bytes: infinite until one is solved at that price."""

    solver: Solver
    domains: Sequence[Domain]
    best: Solution
    watch: Watch | None
    points: Sequence[int]
    price: float
    cost: float

    def tried(self, step: Sequence[Domain]) -> bool | None:
        """Solves these domains; returns whether the best solution improved, None if the tables would be too large."""
        if self.watch is not None:
            self.watch.tell("memory" if self.points else "polish", 0.7 if self.points else 0.6)
        order = self.solver.order(step)
        if order.largest > CONSTANTS.joint_entries:
            return None
        solution, cost = self.solver.minimum(
            self.best.name, step, points=self.points, price=self.price, order=order, regather=self.best.regather
        )
        if cost >= self.cost * (1 - CONSTANTS.rounding) or not (self.points or solution.seconds <= self.best.seconds):
            return False
        better = self.cost < float("inf") or solution.states != self.best.states
        self.best, self.cost = solution, cost
        return better

    def small(self) -> bool:
        """Whether the tables of a pair of factors are small."""
        step = [
            self.solver.problem.with_factors(v, self.best.states[v], (0, 1), d, later=False) for v, d in enumerate(self.domains)
        ]
        return self.solver.order(step).total <= CONSTANTS.few_entries

    def singles(self, also: Sequence[Domain] = ()) -> bool | None:
        """Lets every variable change on any one factor, or (once) to a layout of ``also``.

        Returns the first result of `tried`.
        """
        result = first = self.tried(near(self.solver.problem, self.domains, self.best, also))
        while result:
            result = self.tried(near(self.solver.problem, self.domains, self.best))
        return first

    def pairs(self) -> bool:
        """Lets every variable change on two factors, pair by pair; on single factors where a pair's tables are too large.

        Returns whether the best solution improved.
        """
        problem, gained = self.solver.problem, False
        m = len(problem.sizes)
        moves: list[tuple[int, ...]] = list(itertools.combinations(range(m), 2)) if m > 1 else [(0,)]
        waiting = list(moves)
        while waiting:
            move = waiting.pop(0)
            step = [problem.with_factors(v, self.best.states[v], move, d, later=False) for v, d in enumerate(self.domains)]
            result = self.tried(step)
            if result is None and len(move) > 1:
                single = [(f,) for f in move if (f,) not in moves]
                moves += single
                waiting += single
            elif result:
                gained = True
                waiting = [m for m in moves if m != move]
        return gained


def near(problem: Problem, domains: Sequence[Domain], of: Solution, also: Sequence[Domain] = ()) -> list[Domain]:
    """For each variable, the layouts that differ from a solution's on at most one factor, and the layouts of ``also``.

    With ``also``, variables behind a transpose take the other side's layouts if those are fewer: this loses nothing.
    """
    result = [problem.near(v, of.states[v], domain) for v, domain in enumerate(domains)]
    if not also:
        return result
    memo: dict[tuple[Domain, Domain, Domain], Domain] = {}
    rows = list(zip(domains, result, also, strict=True))
    for row in rows:
        if row not in memo:
            wanted = {*row[1], *row[2]}
            memo[row] = tuple(s for s in row[0] if s in wanted)
    return _behind_transpositions(problem, domains, of, [memo[row] for row in rows])


def _behind_transpositions(problem: Problem, domains: Sequence[Domain], of: Solution, result: list[Domain]) -> list[Domain]:
    """Gives variables in `Problem.turned` the layouts of their other end, and their own of ``of``, where these are fewer."""
    for v, (n, other) in problem.turned.items():
        node = problem.graph.nodes[n]
        rows = problem.ops.options(node)
        given, needed = rows.gives[:, 0], rows.needs[:, 0]
        mine, others = (given, needed) if problem.coarse.of[node.outputs[0]] == v else (needed, given)
        wanted = {of.states[v], *mine[np.isin(others, result[other])].tolist()}
        turned = tuple(s for s in domains[v] if s in wanted)
        if len(turned) < len(result[v]):
            result[v] = turned
    return result


def polish(
    solver: Solver,
    domains: Sequence[Domain],
    start: Solution,
    watch: Watch | None = None,
    *,
    points: Sequence[int] = (),
    price: float = 0.0,
    also: Sequence[Domain] = (),
    pairs: bool = True,
) -> Solution:
    """Chooses pairs of factors anew, with the others fixed, until nothing improves. Without ``pairs``, only where that is fast.

    With three or more factors, every variable may also change on single factors, or to a layout of ``also`` (whose tables must
    not be too large): the result is no worse than the best assignment of these. If that gains nothing, pairs are tried only on
    small problems, which begin with them.
    """
    work = _Polish(solver, domains, start, watch, points, price, float("inf") if points else start.seconds)
    if len(solver.problem.sizes) < 3 or work.small():
        work.pairs()
    if len(solver.problem.sizes) < 3:
        return work.best
    result = work.singles(also)
    if result is None and also:  # the pairs have led to where its tables are too large
        reached = work.tried(near(solver.problem, domains, start, also))
        assert reached is not None, "the layouts of `also` need too large tables"
        result = work.singles()
    while result is not False and pairs and work.pairs():
        result = work.singles()
    return work.best
