"""The exact optimum where the joint tables are too large: domains are narrowed until the tables fit.

Dual ascent (`bound`) gives a lower bound, an assignment, and for every state of every variable a lower bound on all assignments
with it. A state whose bound exceeds the cost of a known assignment is in no optimum. Once few enough states are left the tables
fit, and their minimum is the optimum over all layouts (reduced-cost fixing).
"""

from __future__ import annotations

from collections.abc import Sequence

from shardplan.search.inference.bound import Ascent, narrowed, stars
from shardplan.search.inference.solver import Solver
from shardplan.search.problem.pricing import Domain
from shardplan.search.problem.solution import Solution

ROUNDS = (6, 4, 10, 20, 20, 20, 20)
"""Sweeps before each attempt to solve the remaining states exactly."""

_WORST = 4.0  # infeasible states cost this multiple of the known assignment's cost


def optimum(solver: Solver, domains: Sequence[Domain], known: Solution, *, entries: int) -> tuple[Solution, bool]:
    """(the best solution found, whether it is proved optimal), from a ``known`` solution.

    Tables have at most ``entries`` entries each, ten times as many in all.
    """
    problem = solver.problem
    ascent = Ascent(stars(problem, domains, worst_s=_WORST * known.seconds))
    turn = 0
    for sweeps in ROUNDS:
        for _ in range(sweeps):
            ascent.sweep(backwards=turn % 2 == 1)
            turn += 1
        states = tuple(d[i] for d, i in zip(domains, ascent.decoded(), strict=True))
        known = min(known, solver.rate("plan", states, {}, False), key=lambda s: s.seconds)
        left = narrowed(ascent, domains, known.seconds + 2 * problem.rounding_s)
        order = solver.order(left)
        if order.largest <= entries and order.total <= 10 * entries:
            return solver.minimum("plan", left, order=order)[0], True
    return known, False
