"""The baselines as solutions, solved in the tables of the problem itself."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from shardplan.search.baselines.heuristics import heuristics
from shardplan.search.baselines.recipes import LeftOut, Restriction, alike, examined
from shardplan.search.inference.solver import Solver
from shardplan.search.problem.pricing import Domain
from shardplan.search.problem.solution import Solution
from shardplan.search.problem.strategies import Groups

RIVAL_ENTRIES = 1_000_000
"""Up to this many predicted table entries in one table a baseline is solved jointly: none is worth as much time as the plan."""

SEEDS = 3
"""So many of the fastest baselines, and of the fastest that fit, start a search that is not exact and does not reach them."""


class Rivals:
    """The baselines of a problem, solved when they are first asked for: an exact optimum that fits needs none of them."""

    def __init__(self, solver: Solver) -> None:
        self._solver = solver
        self._found: dict[str, tuple[Solution, ...]] = {}
        self._closed = False

    @cached_property
    def _examined(self) -> tuple[Restriction | LeftOut, ...]:
        return examined(self._solver.problem)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """The baselines that do not exist here; in a search that was stopped, those that it did not come to, too."""
        missing = [r for r in self._examined if isinstance(r, LeftOut)]
        unsolved = [r for r in self.restrictions if r.name not in self._found] if self._closed else []
        return (*missing, *(LeftOut(r.name, "the search was stopped before it came to them") for r in unsolved))

    @cached_property
    def restrictions(self) -> tuple[Restriction, ...]:
        """The baselines that exist."""
        found = [*self._examined, *heuristics(self._solver.problem)]
        return tuple(self._joined(r) for r in found if isinstance(r, Restriction))

    def outside(self, spaces: Mapping[Groups, Sequence[Domain]]) -> tuple[Solution, ...]:
        """The baselines that are in none of these spaces, each of all layouts in which the factors of a group do the same."""
        found = [r for r in self.restrictions if r.limits.groups not in spaces]
        return tuple(s for r in found for s in self._solved(r))

    def reach(self, domains: Sequence[Domain], spaces: Collection[Groups]) -> tuple[Domain, ...]:
        """For each variable the layouts in these domains that any baseline outside the spaces gives it.

        The best of all assignments of these is no slower than any of these baselines.
        """
        memo: dict[tuple[Domain, Domain], frozenset[int]] = {}
        rows: list[list[frozenset[int]]] = []
        for r in examined(self._solver.problem, beside=spaces, limited=False):
            if isinstance(r, Restriction):
                pairs = list(zip(self._joined(r).domains, domains, strict=True))
                memo.update((pair, frozenset(pair[0]).intersection(pair[1])) for pair in pairs if pair not in memo)
                rows.append([memo[pair] for pair in pairs])
        agreeing = [row for row in rows if all(row)]
        every = [frozenset[int]().union(*each) for each in zip(*agreeing, strict=True)] or [frozenset[int]()] * len(domains)
        return tuple(tuple(s for s in domain if s in mine) for domain, mine in zip(domains, every, strict=True))

    def _joined(self, r: Restriction) -> Restriction:
        """With three factors and more a baseline does the same with the factors of each of its parts.

        One that has no parts does so with all but the last. A value that it lays out in no such way is completed freely.
        """
        problem = self._solver.problem
        if len(problem.sizes) <= 2:
            return r
        groups = alike(r.parts, len(problem.sizes))
        free = problem.together(problem.domains, groups)
        return replace(r, domains=problem.together(r.domains, groups, free), limits=replace(r.limits, groups=groups))

    @property
    def solutions(self) -> tuple[Solution, ...]:
        """Every baseline that exists, at its best; level by level where its tables are large."""
        return tuple(s for r in self.restrictions for s in self._solved(r))

    def seeds(
        self, domains: Sequence[Domain], limit: int, spaces: Mapping[Groups, Sequence[Domain]] | None = None
    ) -> list[Solution]:
        """The fastest baselines in these domains but outside the spaces, and the fastest that fit (if none does, the smallest).

        As they are, and with their ops cut the best way, which may hold more. Tofu's objective is not theirs: none then.
        """
        if self._solver.problem.objective.everything_split:
            return []
        agreeing = [s for s in self.outside(spaces or {}) if all(at in d for at, d in zip(s.states, domains, strict=True))]
        fastest = sorted(agreeing, key=lambda s: s.seconds)
        fitting = list(itertools.islice((s for s in fastest if s.fits(limit)), SEEDS))
        fitting = fitting or sorted(agreeing, key=lambda s: s.peak_bytes)[:SEEDS]
        few = list(dict.fromkeys([*fastest[:SEEDS], *fitting]))
        return [*(self._solver.unlimited(s) for s in few), *few]

    def close(self) -> None:
        """Those that are not solved yet never will be."""
        self._closed = True

    def _solved(self, r: Restriction) -> tuple[Solution, ...]:
        if r.name not in self._found:
            if self._closed:
                return ()
            if self._solver.watch is not None:
                self._solver.watch.tell("baselines", 0.4 - 0.3 * 0.8 ** len(self._found))
            if self._solver.order(r.domains).largest <= RIVAL_ENTRIES:
                solution, priced = self._solver.minimum(r.name, r.domains, regather=r.regather, limits=r.limits)
            else:
                solution, priced = _by_levels(self._solver, r)
            self._found[r.name] = (replace(solution, name=r.name),) if priced < float("inf") else ()
        return self._found[r.name]


def _by_levels(solver: Solver, r: Restriction) -> tuple[Solution, float]:
    """A baseline where the joint solve is too wide: recursion and polish inside its restriction."""
    problem = solver.problem
    start = problem.narrowest(r.domains)
    solution, cost = solver.minimum(r.name, [(s,) for s in start], regather=r.regather, limits=r.limits)
    states = solution
    for f in range(len(problem.sizes)):
        step = [problem.with_factors(v, states.states[v], (f,), d, later=False) for v, d in enumerate(r.domains)]
        found, priced = solver.minimum(r.name, step, regather=r.regather, limits=r.limits)
        if priced <= cost:
            states, cost = found, priced
    return states, cost
