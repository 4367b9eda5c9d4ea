"""The layouts of a plan on another cluster: they are a plan there, and a search for that cluster begins from them.

The levels of both clusters are matched from the fastest one up. If a level has another size, its major factor changes. Factors
of levels that are gone leave every layout. Layouts are not a plan if they do not divide the dims that they then split, or do not
fit in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardplan.cost import TIME
from shardplan.errors import PinError, PlanFileError
from shardplan.graph import flatten
from shardplan.ir import BodyChoices, Choices, Factor, Layout, Program, Use
from shardplan.mesh import Cluster
from shardplan.mesh.factoring import factors
from shardplan.planning.planner import Made, session_of
from shardplan.planning.scheduled import scheduled
from shardplan.planning.wanted import Planned, Wanted
from shardplan.plans.data import PlanData
from shardplan.plans.summary import limits_of, states_of
from shardplan.search.baselines.rivals import Rivals
from shardplan.search.coarsening import coarsen
from shardplan.search.inference.bound import Bound
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem.problem import Domain, Problem
from shardplan.search.problem.solution import Solution, Tried
from shardplan.search.strategy.pins import for_pins, pinned_domains
from shardplan.search.strategy.solve import Outcome, Start, search


@dataclass(frozen=True, slots=True)
class Matched:
    """The factors of another cluster that stand for a plan's: ``of[f]`` for the plan's factor f, None if it is gone."""

    factors: tuple[Factor, ...]
    of: tuple[int | None, ...]

    def layout(self, layout: Layout) -> Layout:
        """The layout over the other cluster's factors."""
        return replace(layout, dims=tuple(map(self._kept, layout.dims)), partial=self._kept(layout.partial))

    def choices(self, choices: Choices) -> Choices:
        """The choices over the other cluster's factors."""
        bodies = {
            where: BodyChoices(
                tuple(map(self._or_none, body.layouts)), {op: self._use(use) for op, use in body.uses.items()}, body.reads
            )
            for where, body in choices.bodies.items()
        }
        return Choices(bodies, tuple(replace(copy, layout=self.layout(copy.layout)) for copy in choices.copies))

    def _use(self, use: Use) -> Use:
        loops = [-1] * len(self.factors)
        for old, new in enumerate(self.of):
            if new is not None:
                loops[new] = use.loops[old]
        needs, stored = (tuple(map(self._or_none, own)) for own in (use.needs, use.stored))
        return replace(use, loops=tuple(loops), needs=needs, gives=tuple(map(self.layout, use.gives)), stored=stored)

    def _or_none(self, layout: Layout | None) -> Layout | None:
        return None if layout is None else self.layout(layout)

    def _kept(self, over: Sequence[int]) -> tuple[int, ...]:
        return tuple(new for f in over if (new := self.of[f]) is not None)


def matched(cluster: Cluster, of: Sequence[Factor], other: Cluster) -> Matched | None:
    """The factors of ``other`` that stand for these of ``cluster``; None where a level's parts do not divide its new size.

    >>> two, one = Cluster.load("2x8"), Cluster.load("8")
    >>> found = matched(two, factors(two, {"gpu": (4, 2)}), one)
    >>> [f.name for f in found.factors], found.of
    (['gpu0', 'gpu1'], (None, 0, 1))
    """
    back = len(other.levels) - len(cluster.levels)
    parts: dict[int, list[int]] = {}  # the factors of each level of the other cluster
    for i, f in enumerate(of):
        if f.level + back >= 0:
            parts.setdefault(f.level + back, []).append(i)
    splits: dict[str, tuple[int, ...]] = {}
    for level, own in parts.items():
        rest = [of[i].size for i in own[1:]]
        major, left = divmod(other.levels[level].size, math.prod(rest))
        if left:
            return None
        splits[other.levels[level].name] = (major, *rest)
    found = factors(other, {name: [n for n in sizes if n > 1] or [1] for name, sizes in splits.items()})
    place = {(f.level, f.stride): n for n, f in enumerate(found)}
    strides = {i: (level, of[i].stride) for level, own in parts.items() for i in own}
    sizes = {i: splits[other.levels[level].name][k] for level, own in parts.items() for k, i in enumerate(own)}
    return Matched(found, tuple(place[strides[i]] if sizes.get(i, 1) > 1 else None for i in range(len(of))))


def inherited(
    data: PlanData, program: Program, cluster: Cluster, wanted: Wanted, fresh: Made | None, *, search_again: bool = False
) -> list[Made]:
    """Plans with the layouts of another plan of this program on a cluster, and with the layouts that a search from them finds,
    under the conditions ``wanted``; none if they do not match, fit in memory or keep to the pins. ``fresh`` is the plan that was
    made anew. Over two factors or fewer, its search has found the best from any start: a search from these layouts runs there
    only with ``search_again``.
    """
    over = matched(data.cluster, data.factors, cluster)
    if over is None or (wanted.axes and over.of != tuple(range(len(data.factors)))):
        return []
    graph = flatten(program, replicate=data.replicate, backend=wanted.backend)
    timed = replace(TIME, overlaps=wanted.timed.overlaps, weights=data.weights)
    coarse = coarsen(graph, data.one_choice)
    problem = Problem(graph, coarse, cluster, over.factors, objective=timed, company=data.company)
    own = replace(data, choices=over.choices(data.choices))
    try:
        problem = for_pins(problem, wanted.pins)
        domains = pinned_domains(problem, wanted.pins)
        states, keep = states_of(own.choices, problem)
    except (PinError, PlanFileError, KeyError, ValueError):  # no pin, variable or layout of these factors is like the plan's
        return []
    if not all(s in domain for s, domain in zip(states, domains, strict=True)):
        return []
    rated = _rated(own, problem, domains, wanted, (states, keep))
    found = [rated] if rated.best.seconds < math.inf and rated.best.fits(wanted.memory) else []
    stopped = fresh is not None and bool(fresh.stopped)
    if found and not stopped and (search_again or len(over.factors) > 2):
        found.append(_searched(problem, domains, wanted, rated.best))
    tried = () if fresh is None else fresh.planned.found[1].tried
    return [_made(own, program, (problem, outcome), wanted, tried) for outcome in found]


def _rated(
    data: PlanData, problem: Problem, domains: Sequence[Domain], wanted: Wanted, at: tuple[tuple[int, ...], frozenset[int]]
) -> Outcome:
    """The layouts as they are."""
    live = memory.liveness(problem, wanted.donated)
    solver = Solver(problem, live)
    states, keep = at
    best = solver.rate("plan", states, problem.regathered(keep), data.regather, limits_of(data, problem.graph))
    bound = Bound(problem, live, domains, free=best, chosen=best, limit=wanted.memory, unlimited_s=None)
    return Outcome(best, Rivals(solver), bound, False, None, best)


def _searched(problem: Problem, domains: Sequence[Domain], wanted: Wanted, start: Solution) -> Outcome:
    """The result of a search from these layouts."""
    return search(
        problem,
        limit=wanted.memory,
        donated=wanted.donated,
        domains=domains,
        deadline=wanted.deadline,
        observer=wanted.observer,
        starts=[Start(start.states, start.keep, start.regather)],
    )


def _made(data: PlanData, program: Program, found: tuple[Problem, Outcome], wanted: Wanted, tried: tuple[Tried, ...]) -> Made:
    problem, outcome = found
    if all(t.factors != problem.factors for t in tried):
        tried = (*tried, Tried(problem.factors, outcome.best.seconds, True, None))
    axes = tuple(shares[0][0] for shares in data.purposes) if wanted.axes else ()
    outcome = replace(outcome, tried=tried, purposes=axes, exact=False)
    session = session_of(program, (problem, outcome), wanted, data.replicate)
    run = scheduled(session) if wanted.backend == "explicit" else None
    return Made(Planned(program, (problem, outcome), data.remat, data.hosted), session, run, outcome.stopped)


def step_time_s(made: Made) -> float:
    """The seconds of a step, as scheduled where the explicit backend runs it."""
    return made.session.decisions.step_time_s if made.run is None else made.run.step_time_s
