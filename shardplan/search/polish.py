"""Polish: pairs of factors chosen anew while the others are held, to a fixpoint."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from shardplan.search.anytime import Watch
from shardplan.search.pricing import Domain
from shardplan.search.solver import Solution, Solver

JOINT_ENTRIES = 30_000_000
"""Up to this many predicted entries in one table pairs of factors are solved jointly, again and again where need be."""


def polish(
    solver: Solver,
    domains: Sequence[Domain],
    start: Solution,
    watch: Watch | None = None,
    *,
    points: Sequence[int] = (),
    price: float = 0.0,
) -> Solution:
    """Chooses pairs of levels anew, the others held, until nothing improves; single levels where a pair is too wide."""
    problem, best, best_cost = solver.problem, start, float("inf")
    m = len(problem.sizes)
    moves: list[tuple[int, ...]] = list(itertools.combinations(range(m), 2)) if m > 1 else [(0,)]
    waiting = list(moves)
    while waiting:
        if watch is not None:
            watch.tell("memory" if points else "polish", 0.7 if points else 0.6)
        move = waiting.pop(0)
        step = [problem.with_factors(v, best.states[v], move, d, later=False) for v, d in enumerate(domains)]
        order = solver.order(step)
        if order.largest > JOINT_ENTRIES and len(move) > 1:
            single = [(f,) for f in move if (f,) not in moves]
            moves += single
            waiting += single
            continue
        solution, cost = solver.minimum(start.name, step, points=points, price=price, order=order, regather=start.regather)
        if cost < best_cost * (1 - 1e-9) and (points or solution.seconds <= best.seconds):
            if best_cost < float("inf") or solution.states != best.states:
                waiting = [m for m in moves if m != move]
            best, best_cost = solution, cost
    return best
