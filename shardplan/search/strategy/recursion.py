"""The recursion over the factors, slowest first: each is added to those before it (Tofu, section 5.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardplan.search.baselines.tofu_premise import everything_cut, everything_split
from shardplan.search.inference.solver import Solver
from shardplan.search.problem.pricing import Domain
from shardplan.search.problem.solution import Solution


@dataclass(frozen=True, slots=True)
class RecursionResult:
    """A recursion's assignment, and its cost in seconds after each step, while later factors are still unused."""

    solution: Solution
    after_s: tuple[float, ...]


def recurse(solver: Solver, domains: Sequence[Domain]) -> RecursionResult:
    """Solves factor by factor: a split tensor stays split, ops may be cut anew.

    With the objective "bytes" every step splits every tensor (within ``domains``, which hold the pins) and cuts every op over its
    factor, as Tofu's recursion does.
    """
    problem = solver.problem
    tofu = problem.objective.everything_split
    solution: Solution | None = None
    after: list[float] = []
    for f in range(len(problem.sizes)):
        step = everything_split(problem, domains, upto=f + 1) if tofu else domains
        states = None if solution is None else solution.states
        if not tofu or states is not None:
            step = tuple(
                problem.with_factors(v, None if states is None else states[v], (f,), d, later=True) for v, d in enumerate(step)
            )
        solution, _ = solver.minimum("recursion", step, limits=everything_cut(problem, upto=f + 1) if tofu else None)
        after.append(solution.seconds)
    assert solution is not None
    return RecursionResult(solution, tuple(after))
