"""The search behind a plan, kept for later questions: runner-ups, baselines, the bound, other sizes.

Printing a plan needs no session. `shardplan.plan` leaves one behind; a loaded plan gets a new one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from shardplan.cost import Objective
from shardplan.graph import Graph
from shardplan.ir import Layout, Program
from shardplan.search.baselines.rivals import Rivals
from shardplan.search.inference.bound import Bound
from shardplan.search.problem.cost_tables import BIG, seconds_of
from shardplan.search.problem.extract import Decisions, Extractor
from shardplan.search.problem.problem import Problem
from shardplan.search.problem.solution import Solution
from shardplan.search.strategy.pins import Pins


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another layout of one variable; with it, and all else fixed, the plan takes ``more_s`` seconds more (less, if negative)."""

    layout: Layout
    more_s: float


@dataclass(frozen=True, slots=True)
class Session:
    """A problem with the plan's solution. ``bound`` is None for a loaded plan, whose file holds the bound.

    ``objective`` is what the search minimised; the problem itself is priced in seconds.
    """

    program: Program
    problem: Problem
    solution: Solution
    rivals: Rivals
    bound: Bound | None
    extractor: Extractor
    donated: frozenset[int]
    pins: Pins
    memory_limit: int
    objective: Objective
    replicate: tuple[str, ...]

    @property
    def graph(self) -> Graph:
        """The program, flat."""
        return self.problem.graph

    @property
    def decisions(self) -> Decisions:
        """The decisions of the solution, indexed by the graph's numbers."""
        return self.extractor.decide(self.solution)

    def at(self, solution: Solution) -> Session:
        """The same session with another solution."""
        return replace(self, solution=solution)

    def variable(self, argument: int) -> int:
        """The variable of an argument, given by its number; `FREE` where it has none."""
        return self.problem.coarse.of[self.graph.inputs[argument]]

    def alternatives(self, v: int) -> list[Alternative]:
        """Every other layout of a variable, cheapest first."""
        problem, solution = self.problem, self.solution
        keep_s = problem.regathered(solution.keep)
        domains: list[tuple[int, ...]] = [(s,) for s in solution.states]
        domains[v] = problem.domains[v]
        if solution.states[v] not in domains[v]:
            return []
        total = np.zeros(len(domains[v]))
        for term in problem.terms_of(v, domains, keep_s, solution.limits):
            total = total + term.constant + problem.store.tables[term.table].reshape(-1)
        current = seconds_of(float(total[domains[v].index(solution.states[v])]))
        shape = problem.coarse.variables[v].shape
        others = [
            Alternative(problem.resharder.layout(shape, s), seconds_of(float(c)) - current)
            for s, c in zip(domains[v], total, strict=True)
            if s != solution.states[v] and c < BIG
        ]
        return sorted(others, key=lambda a: (a.more_s, str(a.layout)))
