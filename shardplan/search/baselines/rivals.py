"""The baselines as solutions, solved in the tables of the problem itself."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from shardplan.constants import CONSTANTS
from shardplan.search.baselines.heuristics import heuristics
from shardplan.search.baselines.recipes import LeftOut, Restriction, alike, examined
from shardplan.search.inference.solver import Solver
from shardplan.search.problem.composite_strategies import Groups
from shardplan.search.problem.pricing import Domain
from shardplan.search.problem.problem import Problem
from shardplan.search.problem.solution import Solution


class Rivals:
    """The baselines of a problem, solved on first use: an exact optimum that fits needs none of them."""

    def __init__(self, solver: Solver) -> None:
        self._solver = solver
        self._by_name: dict[str, tuple[Solution, ...]] = {}
        self._closed = False

    @cached_property
    def _examined(self) -> tuple[Restriction | LeftOut, ...]:
        return examined(self._solver.problem)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """The baselines that do not exist here, and those that a stopped search did not reach."""
        missing = [r for r in self._examined if isinstance(r, LeftOut)]
        unsolved = [r for r in self.restrictions if r.name not in self._by_name] if self._closed else []
        return (*missing, *(LeftOut(r.name, "the search was stopped before it came to them") for r in unsolved))

    @cached_property
    def restrictions(self) -> tuple[Restriction, ...]:
        """The baselines that exist."""
        result = [*self._examined, *heuristics(self._solver.problem)]
        return tuple(joined(self._solver.problem, r) for r in result if isinstance(r, Restriction))

    def outside(self, spaces: Mapping[Groups, Sequence[Domain]]) -> tuple[Solution, ...]:
        """Solutions of the baselines outside these spaces; a space holds the layouts that treat the factors of a group alike."""
        result = [r for r in self.restrictions if r.limits.groups not in spaces]
        return tuple(s for r in result for s in self.of(r))

    def reach(self, domains: Sequence[Domain], spaces: Collection[Groups]) -> tuple[Domain, ...]:
        """For each variable, the layouts in these domains that some baseline outside the spaces allows.

        The best assignment of these layouts is no slower than any of these baselines.
        """
        memo: dict[tuple[Domain, Domain], frozenset[int]] = {}
        rows: list[list[frozenset[int]]] = []
        for r in examined(self._solver.problem, beside=spaces, limited=False):
            if isinstance(r, Restriction):
                pairs = list(zip(joined(self._solver.problem, r).domains, domains, strict=True))
                memo.update((pair, frozenset(pair[0]).intersection(pair[1])) for pair in pairs if pair not in memo)
                rows.append([memo[pair] for pair in pairs])
        agreeing = [row for row in rows if all(row)]
        allowed = [frozenset[int]().union(*each) for each in zip(*agreeing, strict=True)] or [frozenset[int]()] * len(domains)
        return tuple(tuple(s for s in domain if s in mine) for domain, mine in zip(domains, allowed, strict=True))

    @property
    def solutions(self) -> tuple[Solution, ...]:
        """The best solution of every baseline that exists; solved level by level where its tables are large."""
        return tuple(s for r in self.restrictions for s in self.of(r))

    def seeds(
        self, domains: Sequence[Domain], limit: int, spaces: Mapping[Groups, Sequence[Domain]] | None = None
    ) -> list[Solution]:
        """The fastest baselines in these domains but outside the spaces, and the fastest that fit (if none does, the smallest).

        Each baseline counts twice: as it is, and with its ops cut the best way, which may hold more. Empty under Tofu's
        objective, which baselines do not share.
        """
        if self._solver.problem.objective.everything_split:
            return []
        agreeing = [s for s in self.outside(spaces or {}) if all(at in d for at, d in zip(s.states, domains, strict=True))]
        fastest = sorted(agreeing, key=lambda s: s.seconds)
        fitting = list(itertools.islice((s for s in fastest if s.fits(limit)), CONSTANTS.rival_seeds))
        fitting = fitting or sorted(agreeing, key=lambda s: s.peak_bytes)[: CONSTANTS.rival_seeds]
        chosen = list(dict.fromkeys([*fastest[: CONSTANTS.rival_seeds], *fitting]))
        return [*(self._solver.unlimited(s) for s in chosen), *chosen]

    def close(self) -> None:
        """Stops solving: baselines that are not solved yet never will be."""
        self._closed = True

    def of(self, r: Restriction) -> tuple[Solution, ...]:
        """The best solution of a baseline; none if it has none, or if solving was stopped before."""
        if r.name not in self._by_name:
            if self._closed:
                return ()
            if self._solver.watch is not None:
                self._solver.watch.tell("baselines", 0.4 - 0.3 * 0.8 ** len(self._by_name))
            solution, priced = solved(self._solver, r)
            self._by_name[r.name] = (replace(solution, name=r.name),) if priced < float("inf") else ()
        return self._by_name[r.name]


def joined(problem: Problem, r: Restriction) -> Restriction:
    """With three or more factors, a baseline that does the same with the factors of each of its parts.

    Without parts it does the same with all factors but the last. A variable without such a layout in the baseline may take
    any such layout.
    """
    if len(problem.sizes) <= 2:
        return r
    groups = alike(r.parts, len(problem.sizes))
    free = problem.together(problem.domains, groups)
    return replace(r, domains=problem.together(r.domains, groups, free), limits=replace(r.limits, groups=groups))


def alone(solver: Solver, r: Restriction) -> Solution | None:
    """The best solution of one restriction, without a search for the plan; None where it has none."""
    solution, seconds = solved(solver, joined(solver.problem, r))
    return replace(solution, name=r.name) if seconds < float("inf") else None


def solved(solver: Solver, r: Restriction) -> tuple[Solution, float]:
    """(the best solution of a restriction, its seconds or infinity); solved level by level where its tables are large."""
    if solver.order(r.domains).largest <= CONSTANTS.rival_entries:
        return solver.minimum(r.name, r.domains, regather=r.regather, limits=r.limits)
    return _by_levels(solver, r)


def _by_levels(solver: Solver, r: Restriction) -> tuple[Solution, float]:
    """Solves a baseline whose joint tables are too large: one factor after the other, inside its restriction."""
    problem = solver.problem
    start = problem.narrowest(r.domains)
    solution, cost = solver.minimum(r.name, [(s,) for s in start], regather=r.regather, limits=r.limits)
    states = solution
    for f in range(len(problem.sizes)):
        step = [problem.with_factors(v, states.states[v], (f,), d, later=False) for v, d in enumerate(r.domains)]
        result, priced = solver.minimum(r.name, step, regather=r.regather, limits=r.limits)
        if priced <= cost:
            states, cost = result, priced
    return states, cost
