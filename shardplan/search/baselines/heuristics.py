"""The algorithms that Tofu is compared with (section 7.3), under its premise that everything is split.

AllRow-Greedy splits every tensor along its first dim. EqualChop chops each tensor along one dim, whichever is best for all.
Spartan's chops the largest tensor first, then the next, each where the ops around it move least. ICML18 never cuts a reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shardplan.search.baselines.recipes import Restriction
from shardplan.search.baselines.tofu_premise import everything_cut, everything_split
from shardplan.search.problem.pricing import Domain, Limits
from shardplan.search.problem.problem import Problem
from shardplan.search.problem.tables import BIG, Term


def heuristics(problem: Problem) -> tuple[Restriction, ...]:
    """All four, as restrictions of the problem."""
    split, limits = everything_split(problem, problem.domains), everything_cut(problem)
    unreduced = everything_cut(problem, reduce=False)
    chopped = _each(problem, split, _one_dim)
    return (
        Restriction("AllRow-Greedy", _each(problem, split, _by_rows), limits),
        Restriction("Spartan", _largest_first(problem, chopped, limits), limits),
        Restriction("EqualChop", chopped, limits),
        Restriction("ICML18", split, unreduced),
    )


Dims = tuple[tuple[int, ...], ...]


def _each(problem: Problem, domains: Sequence[Domain], choose: Callable[[dict[int, Dims]], Domain]) -> tuple[Domain, ...]:
    memo: dict[tuple[int, Domain], Domain] = {}
    found: list[Domain] = []
    for variable, domain in zip(problem.coarse.variables, domains, strict=True):
        space = problem.space(variable.id)
        key = space.rank, domain
        if key not in memo:
            memo[key] = choose({s: space.state(s)[0] for s in domain})
        found.append(memo[key])
    return tuple(found)


def _by_rows(states: dict[int, Dims]) -> Domain:
    """The state with as many factors as can be on the first dim, then on the second, and so on."""
    return (max(states, key=lambda s: (tuple(len(fs) for fs in states[s]), -s)),)


def _one_dim(states: dict[int, Dims]) -> Domain:
    """The states that split one dim; where several must be split to split most, all."""
    return tuple(s for s, dims in states.items() if sum(bool(fs) for fs in dims) <= 1) or tuple(states)


def _largest_first(problem: Problem, domains: Sequence[Domain], limits: Limits) -> tuple[Domain, ...]:
    """Places one variable after the other for the least cost of the ops around it, what is not yet placed at its best."""
    graph = problem.graph
    held = list(domains)
    weight = [sum(graph.tensors[t].nbytes for t in v.tensors) for v in problem.coarse.variables]
    for v in sorted(range(len(held)), key=lambda v: (-weight[v], v)):
        if len(held[v]) > 1:
            cost = problem.ops.least(v, held, limits)
            for term in problem.terms_of(v, held, limits=limits, ops=False):
                cost = np.minimum(cost + _least(problem, term, v), BIG)
            held[v] = (held[v][int(np.argmin(cost))],)
    return tuple(held)


def _least(problem: Problem, term: Term, v: int) -> np.ndarray:
    """[states of v]: the least of a term over all other variables."""
    table = problem.store.tables[term.table]
    return table.min(axis=tuple(i for i, u in enumerate(term.scope) if u != v))
