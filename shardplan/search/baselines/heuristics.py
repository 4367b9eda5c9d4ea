"""The algorithms that Tofu is compared with (section 7.3), under its premise that everything is split.

AllRow-Greedy splits every tensor along its first dim. EqualChop splits each tensor along one dim, the best choice overall.
Spartan splits the largest tensor first, then the next, each where the ops around it move least. ICML18 never cuts a reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from shardplan.search.baselines.recipes import Restriction, alike
from shardplan.search.baselines.tofu_premise import everything_cut, everything_split
from shardplan.search.problem.cost_tables import BIG, Term
from shardplan.search.problem.pricing import Domain, Limits
from shardplan.search.problem.problem import Problem


def heuristics(problem: Problem) -> tuple[Restriction, ...]:
    """The four algorithms, as restrictions of the problem. With three or more factors, all but the last make equal cuts."""
    groups = alike((), len(problem.sizes)) if len(problem.sizes) > 2 else ()
    domains = problem.together(problem.domains, groups) if groups else problem.domains
    split, limits = everything_split(problem, domains), replace(everything_cut(problem), groups=groups)
    unreduced = replace(everything_cut(problem, reduce=False), groups=groups)
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
    result: list[Domain] = []
    for variable, domain in zip(problem.coarse.variables, domains, strict=True):
        space = problem.space(variable.id)
        key = space.rank, domain
        if key not in memo:
            memo[key] = choose({s: space.state(s)[0] for s in domain})
        result.append(memo[key])
    return tuple(result)


def _by_rows(states: dict[int, Dims]) -> Domain:
    """The state with as many factors as possible on the first dim, then on the second, and so on."""
    return (max(states, key=lambda s: (tuple(len(fs) for fs in states[s]), -s)),)


def _one_dim(states: dict[int, Dims]) -> Domain:
    """The states that split at most one dim; all states where every one splits several."""
    return tuple(s for s, dims in states.items() if sum(bool(fs) for fs in dims) <= 1) or tuple(states)


def _largest_first(problem: Problem, domains: Sequence[Domain], limits: Limits) -> tuple[Domain, ...]:
    """Fixes variable by variable, the largest first, at the least cost of the terms around it, the others at their best."""
    graph = problem.graph
    fixed = list(domains)
    weight = [sum(graph.tensors[t].nbytes for t in v.tensors) for v in problem.coarse.variables]
    for v in sorted(range(len(fixed)), key=lambda v: (-weight[v], v)):
        if len(fixed[v]) > 1:
            cost = problem.ops.least(v, fixed, limits)
            for term in problem.terms_of(v, fixed, limits=limits, ops=False):
                cost = np.minimum(cost + _least(problem, term, v), BIG)
            fixed[v] = (fixed[v][int(np.argmin(cost))],)
    return tuple(fixed)


def _least(problem: Problem, term: Term, v: int) -> np.ndarray:
    """[states of v]: the minimum of a term over all other variables."""
    table = problem.store.tables[term.table]
    return table.min(axis=tuple(i for i, u in enumerate(term.scope) if u != v))
