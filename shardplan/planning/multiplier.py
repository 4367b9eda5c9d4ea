"""The best plan where communication hides behind compute: it minimises a maximum of two linear functions by one multiplier.

A step takes E + max(C + k' H, H + k' C) seconds (`shardplan.cost.overlap`). Every weighted sum of the two functions is a lower
bound that the search can minimise over its tables. First the search assumes that compute is longer than all hideable
communication. If this holds for the plan that it finds, that plan is the best. Otherwise it assumes the reverse. If neither plan
meets its assumption, the multiplier is set to the value at which the two plans cost the same, and the search is repeated; this
walks along the hull of the plans' costs. The plan with the shortest step is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from shardplan.collectives.step import BUNDLED
from shardplan.constants import CONSTANTS
from shardplan.cost.overlap import POOLS, slowdown, weights_at
from shardplan.ir import Factor
from shardplan.planning.wanted import Found, Wanted, cut_short
from shardplan.search.inference import anytime
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem.extract import Decisions, Extractor
from shardplan.search.problem.problem import Company
from shardplan.search.problem.solution import Solution, Tried
from shardplan.search.strategy.purposes import Purpose

_TOLD = 1 - 0.5 ** (2 + CONSTANTS.multipliers_between)
"""The progress that one search at all multipliers has told at the most (`_later`)."""


@dataclass(frozen=True, slots=True)
class _Point:
    """A search's outcome at a ``share`` of the multiplier, with the cost of its best plan."""

    found: Found
    share: float
    cost: Decisions

    @property
    def matrix(self) -> tuple[tuple[Factor, ...], tuple[Purpose, ...]]:
        """The factors, and what the user has fixed them to be for."""
        return self.found[0].factors, self.found[1].purposes

    @property
    def surplus_s(self) -> float:
        """Seconds by which compute exceeds the communication that can hide behind it."""
        return self.cost.compute_s - self.cost.hideable_s

    def met(self, k: float) -> bool:
        """Whether the cost at this share is the plan's step time: compute is the longer where it should be, or nothing hides."""
        return k >= 1.0 or (self.share == 1.0 and self.surplus_s >= 0) or (self.share == 0.0 and self.surplus_s <= 0)

    def at(self, share: float, k: float) -> float:
        """The plan's cost in seconds at another share."""
        compute_s, hideable_s = self.cost.compute_s, self.cost.hideable_s
        return (
            self.cost.host_s
            + self.cost.exposed_s
            + share * (compute_s + k * hideable_s)
            + (1 - share) * (hideable_s + k * compute_s)
        )


def best_overlapped(search: Callable[[Wanted], Found], contention: float, wanted: Wanted) -> Found:
    """The best outcome of a search whose objective counts overlap. ``search`` finds the best plan at fixed weights.

    The first search takes for granted that all values that may travel together do. Where the plan moves far fewer of them, the
    step is searched again in their company; the outcome is the first of ``others``.

    At the deadline, it returns the best plan so far. All outcomes that it offers have the prices of the first company.
    """
    found = _best_overlapped(search, contention, wanted)
    done = found[1].stopped or anytime.late(wanted.deadline) or not found[1].best.fits(wanted.memory)
    if done or (company := _smaller_company(found)) is None:
        return found
    again = replace(wanted, company=company, observer=_rising(wanted.observer), offer=anytime.ignored)
    second = _best_overlapped(search, contention, again)
    if second[1].stopped:
        found = cut_short(found, second[1].stopped)
    if not second[1].best.fits(wanted.memory):
        return found
    return found[0], replace(found[1], others=(second, *found[1].others))


def _rising(observer: anytime.Observer) -> anytime.Observer:
    """An observer of a second search, which takes the rest of the progress: the first search has reported nearly all of it."""

    def tell(what: str, part: float) -> None:
        if what != "done":
            observer(what, _TOLD + (1 - _TOLD) * part)

    return tell


def _smaller_company(found: Found) -> Company | None:
    """The bytes that travel together under the best solution; None unless its step is slower by over ``company_matters`` in that
    company.
    """
    problem, outcome = found
    decisions = Extractor.of(problem).decide(outcome.best)
    tensors = problem.graph.tensors
    moved = {(i.pool, i.tensor) for i in decisions.issued if i.pool and i.step.kind in BUNDLED}
    company = {pool: float(sum(tensors[t].nbytes for own, t in moved if own == pool)) for pool in POOLS}
    in_company_s = Extractor.of(problem.among(company)).decide(outcome.best).step_time_s
    return company if in_company_s > decisions.step_time_s * (1 + CONSTANTS.company_matters) else None


def _best_overlapped(search: Callable[[Wanted], Found], contention: float, wanted: Wanted) -> Found:
    """`best_overlapped`, for the company that the search takes for granted."""
    k = slowdown(contention)

    def solved(share: float, among: Wanted) -> _Point:
        """The best plan at a share."""
        objective = replace(wanted.objective, weights=weights_at(share, contention))
        problem, outcome = search(replace(among, objective=objective, observer=_later(wanted, len(points))))
        return _Point((problem, outcome), share, Extractor.of(problem).decide(outcome.best))

    points = list[_Point]()
    points.append(first := solved(1.0, wanted))
    fits = any(_fits(own, wanted) for own in _factorings(first))  # no multiplier makes plans smaller
    met = _fits(first, wanted) and first.met(k)
    if met or not fits or _late(wanted, points) or (left := _open(points, wanted)) is None:
        return _best(points, k, wanted)
    points.append(solved(0.0, left))
    low, high = points[1], points[0]
    while len(points) < 2 + CONSTANTS.multipliers_between and low.surplus_s > 0 and not _late(wanted, points):
        if (left := _open(points, wanted)) is None:
            break
        share = _meeting(low, high, k)
        value = high.at(share, k)
        points.append(solved(share, left))
        if points[-1].at(share, k) >= value * (1 - CONSTANTS.least_gain):
            break
        low, high = (points[-1], high) if points[-1].surplus_s > 0 else (low, points[-1])
    return _best(points, k, wanted)


def _open(points: Sequence[_Point], wanted: Wanted) -> Wanted | None:
    """The search of the candidates that may still win, at another multiplier, from the known solutions; None if no candidate may
    win.

    A step takes at least its cost at any share. So a factoring is out where its cheapest plan costs as much as the shortest step
    takes.
    """
    every = [own for p in points for own in _factorings(p) if _fits(own, wanted)]
    if not every or wanted.factors is not None or wanted.axes is not None:
        return wanted
    shortest_s = min(own.cost.step_time_s for own in every)
    out = {own.found[0].factors for own in every if own.found[1].best.seconds >= shortest_s * (1 - CONSTANTS.rounding)}
    again = {own.found[0].factors: own.found for own in every if own.found[0].factors not in out}
    return replace(wanted, again=again, slower=frozenset(out)) if again else None


def _later(wanted: Wanted, after: int) -> anytime.Observer:
    """An observer for the search ``after`` as many others: each search takes half of the progress that is left."""
    first = 1 - 0.5**after

    def tell(what: str, part: float) -> None:
        """Passes on the progress, except for the end, which comes after the last search."""
        if what != "done":
            wanted.observer(what, first + (1 - first) * part / 2)

    return tell


def _late(wanted: Wanted, points: Sequence[_Point]) -> bool:
    return anytime.late(wanted.deadline) or any(p.found[1].stopped for p in points)


def _meeting(low: _Point, high: _Point, k: float) -> float:
    """The share at which two plans cost the same: ``low`` costs less below it, ``high`` above."""
    at_0, at_1 = low.at(0.0, k) - high.at(0.0, k), low.at(1.0, k) - high.at(1.0, k)
    return min(max(at_0 / (at_0 - at_1), 0.0), 1.0) if at_0 != at_1 else 0.5


def _fits(point: _Point, wanted: Wanted) -> bool:
    return point.found[1].best.fits(wanted.memory)


def _best(points: Sequence[_Point], k: float, wanted: Wanted) -> Found:
    """The outcome with the fastest plan that fits, priced at the last multiplier tried over the same factors and purposes.

    The plans of all factorings take part, not only the cheapest at each multiplier: a factoring whose steps take longer may have
    looked cheaper at its weights. ``others`` of the result holds the rest, the fastest first.
    """
    every = [own for p in points for own in _factorings(p)]
    fitting = [p for p in every if _fits(p, wanted)]
    if not fitting:
        return min(points, key=lambda p: p.found[1].best.peak_bytes).found
    best, *rest = _distinct(fitting)
    last = next(p for p in reversed(every) if p.matrix == best.matrix)
    problem, outcome = _at_weights_of(last, best, wanted)
    stopped = next((p.found[1].stopped for p in points if p.found[1].stopped), outcome.stopped)
    cheapest = any(best is p for p in points)  # over all factorings at its multiplier
    outcome = replace(
        outcome,
        others=tuple((p.found[0], replace(p.found[1], exact=False)) for p in rest),
        tried=_tried(points, every),
        limit_costs=max(p.found[1].limit_costs for p in points),
        exact=outcome.exact and cheapest and best is last and best.met(k),
        stopped=stopped,
    )
    return problem, outcome


def _factorings(point: _Point) -> list[_Point]:
    """The outcome of every factoring that a point's search came to, as a point of its own."""
    others = (_Point(found, point.share, Extractor.of(found[0]).decide(found[1].best)) for found in point.found[1].others)
    return [point, *others]


def _distinct(points: Iterable[_Point]) -> list[_Point]:
    """The points, fastest first. If several take equally long (one plan over finer factors, or found again), only the one with
    the fewest factors counts.
    """
    kept: list[_Point] = []
    for point in sorted(points, key=lambda p: p.cost.step_time_s):
        if not kept or point.cost.step_time_s > kept[-1].cost.step_time_s * (1 + CONSTANTS.least_gain):
            kept.append(point)
        elif len(point.found[0].factors) < len(kept[-1].found[0].factors):
            kept[-1] = point
    return kept


def _tried(points: Sequence[_Point], every: Sequence[_Point]) -> tuple[Tried, ...]:
    """A row for each factoring over all points: the shortest step found there, and the largest of its lower bounds.

    Candidates that were left out at every multiplier stay left out.
    """
    shortest: dict[tuple[Factor, ...], float] = {}
    for own in every:
        over = own.found[0].factors
        shortest[over] = min(own.cost.step_time_s, shortest.get(over, math.inf))
    rows: dict[tuple[Factor, ...], Tried] = {}
    for row in (t for p in points for t in p.found[1].tried):
        known = rows.get(row.factors)
        if row.seconds is None:
            rows.setdefault(row.factors, row)
            continue
        bounds = [b for b in (row.bound_s, known.bound_s if known else None) if b is not None]
        fits = row.fits or (known is not None and known.fits)
        rows[row.factors] = Tried(row.factors, shortest.get(row.factors, row.seconds), fits, max(bounds, default=None))
    return tuple(rows.values())


def _at_weights_of(last: _Point, point: _Point, wanted: Wanted) -> Found:
    """A point's outcome with its plan priced in the problem of another point, where that has the same factors and variables.

    Other weights may prefer other cuts of the ops, which hold more: a plan that would no longer fit stays in its own problem.
    """
    if point is last or not _alike(last, point):
        return point.found
    priced = _priced(last.found, point.found[1].best, wanted)
    return (last.found[0], replace(last.found[1], best=priced)) if priced.fits(wanted.memory) else point.found


def _alike(one: _Point, other: _Point) -> bool:
    """Whether the problems of two points have the same variables."""
    return one.found[0].coarse.variables == other.found[0].coarse.variables


def _priced(found: Found, of: Solution, wanted: Wanted) -> Solution:
    """A solution of another problem over the same factors, priced in this one."""
    problem = found[0]
    solver = Solver(problem, memory.liveness(problem, wanted.donated))
    return solver.again(of, of.limits)
