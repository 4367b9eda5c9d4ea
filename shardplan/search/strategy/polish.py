"""Polish: every variable chosen anew near where it is, to a fixpoint: on one factor, and if that gained, on pairs of factors.

Pairs reach further and cost several times as much; on models over three levels they seldom find what single factors do not.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.search.inference.anytime import Watch
from shardplan.search.inference.solver import Solver
from shardplan.search.problem.pricing import Domain
from shardplan.search.problem.problem import Problem
from shardplan.search.problem.solution import Solution

JOINT_ENTRIES = 30_000_000
"""Up to this many predicted entries in one table variables are solved jointly, again and again where need be."""

FEW_ENTRIES = 3_000_000
"""Up to so many predicted entries in all, pairs of factors are tried in any case: the tables are small."""

_NEAR = 1 - 1e-9  # what gains less than the rest gains nothing


@dataclass(slots=True)
class _Polish:
    """The best so far. ``cost`` is what it costs with the price on bytes: infinite until something was solved at that price."""

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
        if cost >= self.cost * _NEAR or not (self.points or solution.seconds <= self.best.seconds):
            return False
        better = self.cost < float("inf") or solution.states != self.best.states
        self.best, self.cost = solution, cost
        return better

    def small(self) -> bool:
        """Whether the tables of a pair of factors are small."""
        step = [
            self.solver.problem.with_factors(v, self.best.states[v], (0, 1), d, later=False) for v, d in enumerate(self.domains)
        ]
        return self.solver.order(step).total <= FEW_ENTRIES

    def singles(self, also: Sequence[Domain] = ()) -> bool | None:
        """Every variable may change on one factor, each on whichever, or (once) to any of ``also``: as `tried`."""
        found = first = self.tried(near(self.solver.problem, self.domains, self.best, also))
        while found:
            found = self.tried(near(self.solver.problem, self.domains, self.best))
        return first

    def pairs(self) -> bool:
        """Every variable may change on two factors, one pair after the other; on single ones where a pair is too wide.

        Whether that was better.
        """
        problem, gained = self.solver.problem, False
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
                gained = True
                waiting = [m for m in moves if m != move]
        return gained


def near(problem: Problem, domains: Sequence[Domain], of: Solution, also: Sequence[Domain] = ()) -> list[Domain]:
    """For each variable the layouts that differ from a solution's on one factor at most, and those of ``also``.

    With these, what stands behind a transposition has those of its other end where they are fewer: nothing is lost by that.
    """
    found = [problem.near(v, of.states[v], domain) for v, domain in enumerate(domains)]
    if not also:
        return found
    memo: dict[tuple[Domain, Domain, Domain], Domain] = {}
    rows = list(zip(domains, found, also, strict=True))
    for row in rows:
        if row not in memo:
            wanted = {*row[1], *row[2]}
            memo[row] = tuple(s for s in row[0] if s in wanted)
    return _behind_transpositions(problem, domains, of, [memo[row] for row in rows])


def _behind_transpositions(problem: Problem, domains: Sequence[Domain], of: Solution, found: list[Domain]) -> list[Domain]:
    """``found``, but what is `Problem.turned` has the layouts of its other end, and that of ``of``, where these are fewer."""
    for v, (n, other) in problem.turned.items():
        node = problem.graph.nodes[n]
        rows = problem.ops.options(node)
        made, read = rows.gives[:, 0], rows.needs[:, 0]
        mine, others = (made, read) if problem.coarse.of[node.outputs[0]] == v else (read, made)
        wanted = {of.states[v], *mine[np.isin(others, found[other])].tolist()}
        turned = tuple(s for s in domains[v] if s in wanted)
        if len(turned) < len(found[v]):
            found[v] = turned
    return found


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
    """Chooses pairs of factors anew, the others held, until nothing improves.

    With three factors and more, every variable on single ones too, or to the layouts of ``also`` (with which the domains must
    not be too wide): the result is no worse than the best of these. Where that gains nothing, pairs are not tried but on small
    problems, which begin with them.
    """
    work = _Polish(solver, domains, start, watch, points, price, float("inf") if points else start.seconds)
    if len(solver.problem.sizes) < 3 or work.small():
        work.pairs()
    if len(solver.problem.sizes) < 3:
        return work.best
    found = work.singles(also)
    assert found is not None or not also, "the layouts to be reached are too many"
    while found is not False and work.pairs():
        found = work.singles()
    return work.best
