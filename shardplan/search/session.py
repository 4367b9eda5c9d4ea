"""The search behind a plan, kept for later questions: runner-ups, baselines, the bound, other sizes.

Printing a plan needs no session. `shardplan.plan` leaves one behind; a loaded plan gets a new one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from shardplan.cost import Objective
from shardplan.graph import Graph, flatten
from shardplan.ir import Layout, Program
from shardplan.search.baselines.rivals import Rivals
from shardplan.search.coarsening import coarsen
from shardplan.search.inference import anytime
from shardplan.search.inference.bound import Bound
from shardplan.search.problem.extract import Decisions, Extractor
from shardplan.search.problem.problem import Problem
from shardplan.search.problem.solution import Solution
from shardplan.search.problem.tables import BIG, seconds_of
from shardplan.search.strategy.factoring_search import Found, Wanted
from shardplan.search.strategy.overlap import best_overlapped, step_time_s
from shardplan.search.strategy.pins import Pins, for_pins, pinned_domains
from shardplan.search.strategy.resizing import resized
from shardplan.search.strategy.solve import in_seconds, search


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

    def padded_seconds(self, old: int, new: int) -> float | None:
        """Step time of the best plan with ``new`` in place of every ``old`` in the step's shapes; infinite where none fits.

        None where this cannot be told: the step derives other sizes from this one. The plan's pins and objective still apply.
        This takes as long as planning.
        """
        program = resized(self.program, old, new)
        if program is None:
            return None
        graph = flatten(program, replicate=self.replicate, backend=self.graph.backend)
        coarse = coarsen(graph, self.problem.coarse.one_choice)

        def solved(wanted: Wanted) -> Found:
            """The outcome of the padded step's search under this objective, over the plan's own factors."""
            cluster, over = self.problem.cluster, self.problem.factors
            problem = for_pins(Problem(graph, coarse, cluster, over, objective=wanted.objective), self.pins)
            return problem, search(
                problem,
                limit=wanted.memory,
                donated=wanted.donated,
                domains=pinned_domains(problem, self.pins),
                deadline=None,
                observer=anytime.silent,
            )

        wanted = Wanted(self.memory_limit, self.donated, self.pins, None, anytime.silent, self.objective)
        overlaps, contention = self.objective.overlaps, self.problem.cluster.device.contention
        problem, outcome = best_overlapped(solved, contention, wanted) if overlaps else solved(wanted)
        if not outcome.best.fits(self.memory_limit):
            return math.inf
        return step_time_s(in_seconds(problem, outcome, self.donated, self.problem.objective))
