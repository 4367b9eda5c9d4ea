"""The search: the cheapest assignment within the memory limit, and every baseline scored in the same tables.

Two levels are solved jointly and exactly where the tables allow; more by recursion over the levels, slowest first, and polish of
pairs of levels to a fixpoint (Tofu, section 5.2, made joint). Memory is priced at the points where it peaks.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardplan.search import memory, repair
from shardplan.search.baselines import LeftOut, Restriction, examined
from shardplan.search.bound import Bound
from shardplan.search.eliminate import Eliminator, Order, find_order
from shardplan.search.heuristics import heuristics
from shardplan.search.options import Groups
from shardplan.search.premise import everything_cut, everything_split
from shardplan.search.pricing import Domain, Limits
from shardplan.search.problem import Problem
from shardplan.search.recursion import recurse
from shardplan.search.tables import BIG

JOINT_ENTRIES = 30_000_000
"""Up to this many predicted table entries in one table all levels are solved jointly."""

RIVAL_ENTRIES = 1_000_000
"""Likewise for a baseline: there are many, and none is worth as much time as the plan."""

SEEDS = 3
"""So many of the fastest baselines, and of the fastest that fit, start the search where it is not exact."""

REPAIRS = 3
"""So many solutions that hold too much are changed until they fit."""

Observer = Callable[[str, float], None]
"""Told what is being done and how far it is (0 to 1)."""


@dataclass(frozen=True, slots=True)
class Solution:
    """An assignment with its cost: ``keep`` are the backward views that reuse the forward copy; ``seconds`` leaves memory
    prices out.
    """

    name: str
    states: tuple[int, ...]
    keep: frozenset[int]
    regather: bool
    seconds: float
    peak_bytes: int
    limits: Limits | None = field(default=None, compare=False, repr=False)

    def fits(self, limit: int) -> bool:
        """Whether a device's peak is within the limit."""
        return self.peak_bytes <= limit


@dataclass(frozen=True, slots=True)
class Outcome:
    """The best solution, the baselines, a lower bound on any solution's seconds, and how it was found.

    ``exact``: it is the optimum, where memory has no limit.
    """

    best: Solution
    rivals: Rivals
    bound: Bound
    exact: bool
    smallest: Solution | None


class Solver:
    """Solves one problem again and again: for restrictions, prices and levels. ``limits`` hold where a call gives none."""

    def __init__(self, problem: Problem, live: memory.Liveness, limits: Limits | None = None) -> None:
        self.problem, self.live, self.limits = problem, live, limits
        self.eliminator = Eliminator(problem.store)
        self._orders: dict[tuple[int, ...], Order] = {}

    def order(self, domains: Sequence[Domain]) -> Order:
        """The elimination order for domains of these sizes."""
        sizes = tuple(len(d) for d in domains)
        if sizes not in self._orders:
            self._orders[sizes] = find_order(self.problem.scopes, sizes)
        return self._orders[sizes]

    def minimum(
        self,
        name: str,
        domains: Sequence[Domain],
        *,
        regather: bool = False,
        points: Sequence[int] = (),
        price: float = 0.0,
        order: Order | None = None,
        limits: Limits | None = None,
    ) -> tuple[Solution, float]:
        """(the cheapest assignment in these domains, its cost with prices): cost infinite where none is feasible."""
        limits = self.limits if limits is None else limits
        keep_s = self._keep_prices(regather, points, price)
        terms = self.problem.terms(domains, keep_s, limits)
        if points:
            terms += memory.price_terms(self.problem, self.live, points, price, domains, limits)
        sizes = [len(d) for d in domains]
        total, chosen = self.eliminator.solve(terms, sizes, order or self.order(domains))
        states = tuple(d[i] for d, i in zip(domains, chosen, strict=True))
        priced = float("inf") if total >= BIG else total / 1e12
        return self.rate(name, states, keep_s, regather, limits, seconds=None if points else total / 1e12), priced

    def rate(
        self,
        name: str,
        states: tuple[int, ...],
        keep_s: Mapping[int, float],
        regather: bool,
        limits: Limits | None = None,
        *,
        seconds: float | None = None,
    ) -> Solution:
        """A solution from its states: true seconds (those given, where they are known without prices), and its peak."""
        limits = self.limits if limits is None else limits
        keep = frozenset(v for v in self.problem.backward_views if self.problem.keeps(v, states, keep_s.get(v, 0.0)))
        if seconds is None:
            again = {v: float("inf") for v in self.problem.backward_views if v not in keep}
            seconds = self.problem.seconds(states, again, limits)
        peak = int(memory.profile(self.problem, self.live, states, keep, limits).max())
        return Solution(name, states, keep, regather, seconds, peak, limits)

    def unlimited(self, solution: Solution) -> Solution:
        """The same layouts with every op cut the best way: never slower."""
        again = {v: float("inf") for v in self.problem.backward_views if v not in solution.keep}
        return self.rate(solution.name, solution.states, again, solution.regather)

    def peak_point(self, solution: Solution) -> int:
        """Where the solution's memory peaks."""
        return int(memory.profile(self.problem, self.live, solution.states, solution.keep, solution.limits).argmax())

    def _keep_prices(self, regather: bool, points: Sequence[int], price: float) -> dict[int, float]:
        if regather:
            return {v: float("inf") for v in self.problem.backward_views}
        return memory.keep_price(self.live, points, price) if points else {}


class Rivals:
    """The baselines of a problem, solved when they are first asked for: an exact optimum that fits needs none of them."""

    def __init__(self, solver: Solver) -> None:
        self._solver = solver
        self._found: dict[str, tuple[Solution, ...]] = {}

    @cached_property
    def _examined(self) -> tuple[Restriction | LeftOut, ...]:
        return examined(self._solver.problem)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """The baselines that do not exist here."""
        return tuple(r for r in self._examined if isinstance(r, LeftOut))

    @cached_property
    def restrictions(self) -> tuple[Restriction, ...]:
        """The baselines that exist."""
        found = [*self._examined, *heuristics(self._solver.problem)]
        return tuple(self._joined(r) for r in found if isinstance(r, Restriction))

    def outside(self, spaces: Mapping[Groups, Sequence[Domain]]) -> tuple[Solution, ...]:
        """The baselines that are in none of these spaces, each of all layouts in which the factors of a group do the same."""
        problem = self._solver.problem
        if problem.sizes[2:] and spaces.keys() >= set(groupings(len(problem.sizes))):
            some = examined(problem, parts=3)
            found = [self._joined(r) for r in some if isinstance(r, Restriction)]
        else:
            found = [r for r in self.restrictions if r.limits.groups not in spaces]
        return tuple(s for r in found for s in self._solved(r))

    def _joined(self, r: Restriction) -> Restriction:
        """With three factors and more a baseline does the same with the factors of each of its parts.

        One that has no parts does so with all but the last. A value that it lays out in no such way is completed freely.
        """
        problem = self._solver.problem
        if len(problem.sizes) <= 2:
            return r
        groups = r.parts if len(r.parts) > 1 else groupings(len(problem.sizes))[-1]
        free = problem.together(problem.domains, groups)
        return replace(r, domains=problem.together(r.domains, groups, free), limits=replace(r.limits, groups=groups))

    @cached_property
    def solutions(self) -> tuple[Solution, ...]:
        """Every baseline that exists, at its best; level by level where its tables are large."""
        return tuple(s for r in self.restrictions for s in self._solved(r))

    def _solved(self, r: Restriction) -> tuple[Solution, ...]:
        if r.name not in self._found:
            if self._solver.order(r.domains).largest <= RIVAL_ENTRIES:
                solution, priced = self._solver.minimum(r.name, r.domains, regather=r.regather, limits=r.limits)
            else:
                solution, priced = _by_levels(self._solver, r)
            self._found[r.name] = (replace(solution, name=r.name),) if priced < float("inf") else ()
        return self._found[r.name]


def search(
    problem: Problem,
    *,
    limit: int,
    donated: frozenset[int],
    domains: Sequence[Domain],
    deadline: float | None,
    observer: Observer,
) -> Outcome:
    """Solves within ``limit`` bytes a device. ``domains`` hold the pins. ``deadline`` is a `time.monotonic` instant.

    With the objective "bytes" Tofu's premise holds, which the baselines do not share: they seed nothing.
    """
    live = memory.liveness(problem, donated)
    if problem.objective == "bytes":
        solver = Solver(problem, live, everything_cut(problem))
        pinned, domains = domains, everything_split(problem, domains)
    else:
        pinned = domains
        solver = Solver(problem, live)
    rivals = Rivals(solver)
    joint_fits = len(problem.sizes) <= 2 and solver.order(domains).largest <= JOINT_ENTRIES

    def seeds(spaces: Mapping[Groups, Sequence[Domain]]) -> list[Solution]:
        if problem.objective == "bytes":
            return []
        observer("baselines", 0.1)
        agreeing = [s for s in rivals.outside(spaces) if all(at in d for at, d in zip(s.states, domains, strict=True))]
        fastest = sorted(agreeing, key=lambda s: s.seconds)
        fitting = [s for s in fastest if s.fits(limit)]
        return [solver.unlimited(s) for s in dict.fromkeys([*fastest[:SEEDS], *fitting[:SEEDS]])]

    spaces = {} if joint_fits else _spaces(solver, domains)
    observer("search", 0.1)
    starts = [
        solver.unlimited(solver.minimum("plan", space, limits=Limits(groups=groups))[0]) for groups, space in spaces.items()
    ]
    if not joint_fits and not starts:
        starts = [recurse(solver, pinned).solution]
    inside = [] if joint_fits else [*starts, *seeds(spaces)]
    observer("search", 0.5)
    best, exact = _best(solver, domains, inside, joint_fits, deadline)
    candidates = [best, *inside]
    smallest: Solution | None = None
    if not best.fits(limit):
        observer("memory", 0.7)
        inside = [*starts, *seeds({})]
        more, smallest = _within(solver, domains, limit, best, joint_fits, inside, deadline)
        candidates += [*inside, *more]
        candidates += _repaired(solver, domains, limit, candidates, deadline)
    fitting = [s for s in candidates if s.fits(limit)]
    smallest = min([*candidates, *([smallest] if smallest else [])], key=lambda s: s.peak_bytes)
    chosen = min(fitting, key=lambda s: s.seconds) if fitting else smallest
    assert all(s in d for s, d in zip(chosen.states, pinned, strict=True)), "a pin is not held"
    observer("done", 1.0)
    unlimited_s = best.seconds if exact else None
    bound = Bound(problem, live, domains, free=best, chosen=chosen, limit=limit, unlimited_s=unlimited_s)
    return Outcome(replace(chosen, name="plan"), rivals, bound, exact, smallest)


def in_seconds(problem: Problem, outcome: Outcome, donated: frozenset[int]) -> tuple[Problem, Outcome]:
    """What a search for the fewest bytes found, priced in seconds; the baselines are solved for seconds.

    The bound is that of all plans for seconds.
    """
    timed = Problem(problem.graph, problem.coarse, problem.cluster, problem.factors)
    live = memory.liveness(timed, donated)
    solver = Solver(timed, live, everything_cut(timed))

    def priced(s: Solution) -> Solution:
        return solver.rate(s.name, s.states, {v: float("inf") for v in timed.backward_views if v not in s.keep}, s.regather)

    smallest = priced(outcome.smallest) if outcome.smallest is not None else None
    best = priced(outcome.best)
    bound = Bound(timed, live, timed.domains, free=best, chosen=best, limit=best.peak_bytes, unlimited_s=None)
    return timed, Outcome(best, Rivals(Solver(timed, live)), bound, False, smallest)


def _best(
    solver: Solver,
    domains: Sequence[Domain],
    seeds: Sequence[Solution],
    joint_fits: bool,
    deadline: float | None,
) -> tuple[Solution, bool]:
    """(the best solution in these domains, whether it is exact)."""
    if joint_fits:
        return solver.minimum("plan", domains)[0], True
    found = min(seeds, key=lambda s: s.seconds)
    return _polish(solver, domains, found, deadline), False


def groupings(count: int) -> tuple[Groups, ...]:
    """The ways to part the factors in two: slower ones, and faster ones."""
    every = tuple(range(count))
    return tuple((every[:i], every[i:]) for i in range(1, count))


def _spaces(solver: Solver, domains: Sequence[Domain]) -> dict[Groups, tuple[Domain, ...]]:
    """For three factors and more: the layouts that treat slower ones alike, and faster ones, where these solve jointly."""
    problem = solver.problem
    if len(problem.sizes) <= 2 or problem.objective == "bytes":
        return {}
    found = {groups: problem.together(domains, groups) for groups in groupings(len(problem.sizes))}
    return {groups: space for groups, space in found.items() if solver.order(space).largest <= JOINT_ENTRIES}


def _polish(
    solver: Solver,
    domains: Sequence[Domain],
    start: Solution,
    deadline: float | None,
    *,
    points: Sequence[int] = (),
    price: float = 0.0,
) -> Solution:
    """Chooses pairs of levels anew, the others held, until nothing improves; single levels where a pair is too wide."""
    problem, best, best_cost = solver.problem, start, float("inf")
    m = len(problem.sizes)
    moves = list(itertools.combinations(range(m), 2)) if m > 1 else [(0,)]
    waiting = list(moves)
    while waiting and (deadline is None or time.monotonic() < deadline):
        move = waiting.pop(0)
        step = [problem.with_factors(v, best.states[v], move, d, later=False) for v, d in enumerate(domains)]
        order = solver.order(step)
        if order.largest > JOINT_ENTRIES:
            single = [(f,) for f in move if len(move) > 1 and (f,) not in moves]
            moves += single
            waiting += single
            continue
        solution, cost = solver.minimum(start.name, step, points=points, price=price, order=order, regather=start.regather)
        if cost < best_cost * (1 - 1e-9) and (points or solution.seconds <= best.seconds):
            if best_cost < float("inf") or solution.states != best.states:
                waiting = [m for m in moves if m != move]
            best, best_cost = solution, cost
    return best


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


def _repaired(
    solver: Solver, domains: Sequence[Domain], limit: int, found: Sequence[Solution], deadline: float | None
) -> list[Solution]:
    """Those just above the limit, and the fastest, changed until they fit: where that may beat what fits already."""
    fitting = min((s.seconds for s in found if s.fits(limit)), default=float("inf"))
    over = [s for s in dict.fromkeys(found) if not s.fits(limit) and s.seconds < fitting]
    repaired: list[Solution] = []
    for start in sorted(over, key=lambda s: s.peak_bytes)[:REPAIRS]:
        if all(s in d for s, d in zip(start.states, domains, strict=True)) and (deadline is None or time.monotonic() < deadline):
            better = repair.repaired(solver, domains, start, limit)
            repaired += [better] if better is not None else []
    return repaired


def _within(
    solver: Solver,
    domains: Sequence[Domain],
    limit: int,
    start: Solution,
    joint_fits: bool,
    seeds: Sequence[Solution],
    deadline: float | None,
) -> tuple[list[Solution], Solution | None]:
    """(solutions found on the way to the limit, the smallest): one price on the bytes at every peak met so far, by bisection."""

    def at(price: float) -> Solution:
        if joint_fits:
            return solver.minimum("plan", domains, points=points, price=price)[0]
        seed = min([start, *seeds], key=lambda s: s.seconds + price * max(0, s.peak_bytes - limit))
        return _polish(solver, domains, seed, deadline, points=points, price=price)

    points = [solver.peak_point(start)]
    found: list[Solution] = []
    low, high = 0.0, max(start.seconds, 1e-6) / max(start.peak_bytes, 1)
    for _ in range(24):
        solution = at(high)
        found.append(solution)
        peak = solver.peak_point(solution)
        if solution.fits(limit):
            break
        if peak not in points:
            points.append(peak)
        else:
            low, high = high, high * 8
        if high > 1e3 or (deadline is not None and time.monotonic() > deadline):
            break
    if not found[-1].fits(limit):
        return found, min(found, key=lambda s: s.peak_bytes)
    for _ in range(7):
        if deadline is not None and time.monotonic() > deadline:
            break
        middle = (low * high) ** 0.5 if low else high / 8
        solution = at(middle)
        found.append(solution)
        if solution.fits(limit):
            high = middle
        else:
            peak = solver.peak_point(solution)
            if peak not in points:
                points.append(peak)
            low = middle
    return found, min(found, key=lambda s: s.peak_bytes)
