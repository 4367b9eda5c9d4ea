"""The best plan over all factorings of a cluster that are worth a try."""

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
    """What a search is held to: bytes a device, donated leaves, pins as entries, the end of its time (`anytime.now_s`); and what
    it makes least.
    """

    memory: int
    donated: frozenset[int]
    pins: Pins
    deadline: float | None
    observer: Observer
    objective: Objective


def best_of_factorings(graph: Graph, coarse: Coarse, cluster: Cluster, wanted: Wanted) -> Found:
    """The best outcome with its problem: levels whole, and split where dims need it. It may not fit.

    Stopped by the deadline or an interrupt, it gives the best so far; an interrupt before anything fits is raised.

    Raises:
        PinError: for pins that can be held on no factoring.
    """
    problems = [Problem(graph, coarse, cluster, over, objective=wanted.objective) for over in factor_choices(cluster, graph)]
    tried = _pinned(problems, wanted.pins)
    best: Found | None = None
    told = 0.0

    def tell(what: str, part: float) -> None:
        nonlocal told
        told = max(told, part)
        wanted.observer(what, told)

    for n, (problem, domains) in enumerate(tried):

        def solved(over: Problem, domains: Sequence[Domain], n: int = n) -> Outcome:
            """The search over these factors, with its share of the progress."""
            return search(
                over,
                limit=wanted.memory,
                donated=wanted.donated,
                domains=domains,
                deadline=wanted.deadline,
                observer=lambda what, part: tell(what, (n + part) / len(tried)),
            )

        try:
            found = problem, solved(problem, domains)
            if len(problem.factors) > len(problems[0].factors) and not wanted.pins:
                found = _fewest_factors(found, solved, wanted)
        except KeyboardInterrupt:
            if best is None or not best[1].best.fits(wanted.memory):
                raise
            return _stopped_by(best, "interrupted")
        if best is None or better(found, best, wanted.memory):
            best = found
        if found[1].stopped:
            return _stopped_by(best, found[1].stopped)
    assert best is not None
    return best


def _fewest_factors(found: Found, solved: _Solve, wanted: Wanted) -> Found:
    """The same with neighbouring factors of a level made one where that is no slower: each is a mesh axis, and pays latency."""
    while not found[1].stopped and (fewer := merged(found[0], found[1].best.states)) is not None:
        problem = Problem(found[0].graph, found[0].coarse, found[0].cluster, fewer, objective=wanted.objective)
        try:
            again = problem, solved(problem, problem.domains)
        except KeyboardInterrupt:
            if not found[1].best.fits(wanted.memory):
                raise
            return _stopped_by(found, "interrupted")
        if better(found, again, wanted.memory):
            return _stopped_by(found, again[1].stopped) if again[1].stopped else found
        found = again
    return found


def _stopped_by(found: Found, stopped: Stopped) -> Found:
    return found[0], replace(found[1], stopped=stopped, exact=False)


def _pinned(problems: Sequence[Problem], pins: Pins) -> list[tuple[Problem, tuple[Domain, ...]]]:
    """The factorings that the pins can hold on, each with its domains: a part of a level is an axis of one of them alone.

    Raises:
        PinError: where there is none: what is wrong with the pins on the levels themselves.
    """
    found: list[tuple[Problem, tuple[Domain, ...]]] = []
    refusals: list[PinError] = []
    for problem in problems:
        try:
            own = for_pins(problem, pins)
            found.append((own, pinned_domains(own, pins)))
        except PinError as error:
            refusals.append(error)
    if not found:
        raise refusals[0]
    return found


def better(a: Found, b: Found, limit: int) -> bool:
    """A plan that fits before one that does not, then the faster (the smaller, where neither fits)."""
    one, other = a[1].best, b[1].best
    if one.fits(limit) != other.fits(limit):
        return one.fits(limit)
    return one.seconds < other.seconds if one.fits(limit) else one.peak_bytes < other.peak_bytes
