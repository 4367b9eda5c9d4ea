"""The best plan over all factorings of a cluster that are worth trying."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardplan.cost import Objective
from shardplan.errors import PinError
from shardplan.graph.flattening import Graph
from shardplan.mesh import Cluster
from shardplan.search.coarsening.coarsen import Coarse
from shardplan.search.inference.anytime import Observer, Stopped
from shardplan.search.problem.problem import Domain, Problem
from shardplan.search.strategy.factorings import factor_choices, merged
from shardplan.search.strategy.pins import Pins, for_pins, pinned_domains
from shardplan.search.strategy.solve import Outcome, search

Found = tuple[Problem, Outcome]
_Solve = Callable[[Problem, Sequence[Domain]], Outcome]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The conditions of a search: bytes per device, donated leaves, pins, a deadline (an instant of `anytime.now_s`), an observer
    of its progress, and the objective to minimise.
    """

    memory: int
    donated: frozenset[int]
    pins: Pins
    deadline: float | None
    observer: Observer
    objective: Objective


def best_of_factorings(graph: Graph, coarse: Coarse, cluster: Cluster, wanted: Wanted) -> Found:
    """The best outcome, with its problem, over whole levels and levels split where dims need it. It may not fit.

    Stopped by the deadline or an interrupt, it returns the best so far; an interrupt before a plan fits is raised.

    Raises:
        PinError: if no factoring can hold the pins.
    """
    problems = [Problem(graph, coarse, cluster, over, objective=wanted.objective) for over in factor_choices(cluster, graph)]
    candidates = _pinned(problems, wanted.pins)
    best: Found | None = None
    progress = 0.0

    def tell(what: str, part: float) -> None:
        nonlocal progress
        progress = max(progress, part)
        wanted.observer(what, progress)

    for n, (problem, domains) in enumerate(candidates):

        def solve(over: Problem, domains: Sequence[Domain], n: int = n) -> Outcome:
            """Searches over these factors and reports their share of the progress."""
            return search(
                over,
                limit=wanted.memory,
                donated=wanted.donated,
                domains=domains,
                deadline=wanted.deadline,
                observer=lambda what, part: tell(what, (n + part) / len(candidates)),
            )

        try:
            result = problem, solve(problem, domains)
            if len(problem.factors) > len(problems[0].factors) and not wanted.pins:
                result = _fewest_factors(result, solve, wanted)
        except KeyboardInterrupt:
            if best is None or not best[1].best.fits(wanted.memory):
                raise
            return _stopped_by(best, "interrupted")
        if best is None or better(result, best, wanted.memory):
            best = result
        if result[1].stopped:
            return _stopped_by(best, result[1].stopped)
    assert best is not None
    return best


def _fewest_factors(result: Found, solve: _Solve, wanted: Wanted) -> Found:
    """Merges neighbouring factors of a level where that is no slower: each factor is a mesh axis and pays latency."""
    while not result[1].stopped and (fewer := merged(result[0], result[1].best.states)) is not None:
        problem = Problem(result[0].graph, result[0].coarse, result[0].cluster, fewer, objective=wanted.objective)
        try:
            coarser = problem, solve(problem, problem.domains)
        except KeyboardInterrupt:
            if not result[1].best.fits(wanted.memory):
                raise
            return _stopped_by(result, "interrupted")
        if better(result, coarser, wanted.memory):
            return _stopped_by(result, coarser[1].stopped) if coarser[1].stopped else result
        result = coarser
    return result


def _stopped_by(result: Found, stopped: Stopped) -> Found:
    return result[0], replace(result[1], stopped=stopped, exact=False)


def _pinned(problems: Sequence[Problem], pins: Pins) -> list[tuple[Problem, tuple[Domain, ...]]]:
    """The factorings that can hold the pins, each with its domains. A part of a level is an axis in only one factoring.

    Raises:
        PinError: if there is none; it is the error of the pins on whole levels.
    """
    result: list[tuple[Problem, tuple[Domain, ...]]] = []
    refusals: list[PinError] = []
    for problem in problems:
        try:
            pinned = for_pins(problem, pins)
            result.append((pinned, pinned_domains(pinned, pins)))
        except PinError as error:
            refusals.append(error)
    if not result:
        raise refusals[0]
    return result


def better(a: Found, b: Found, limit: int) -> bool:
    """Whether ``a`` beats ``b``: a plan that fits beats one that does not, then the faster wins (the smaller if neither fits)."""
    one, other = a[1].best, b[1].best
    if one.fits(limit) != other.fits(limit):
        return one.fits(limit)
    return one.seconds < other.seconds if one.fits(limit) else one.peak_bytes < other.peak_bytes
