"""The search: the cheapest assignment within the memory limit, and every baseline scored in the same tables.

Two levels are solved jointly and exactly where the tables allow; more by recursion over the levels, slowest first, and polish of
pairs of levels to a fixpoint (Tofu, section 5.2, made joint). Memory is priced at the points where it peaks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardplan.search import memory, repair
from shardplan.search.anytime import Incumbent, Observer, OutOfTimeError, Stopped, Watch
from shardplan.search.baselines import LeftOut, Restriction, examined
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

LONG_ENTRIES = 50_000_000
"""From so many predicted table entries in all on, a joint solve takes seconds: something simpler is found first, in case it is
interrupted.
"""


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
    """The best solution, the baselines, a lower bound on any solution's seconds without a memory limit, and how it was found.

    ``stopped`` says what ended the search early: then ``best`` is the best so far, not ``exact``, and the baselines are those
    that were solved by then.
    """

    best: Solution
    rivals: Rivals
    bound_s: float
    exact: bool
    smallest: Solution | None
    stopped: Stopped = ""


class Solver:
    """Solves one problem again and again: for restrictions, prices and levels. ``limits`` hold where a call gives none.

    A ``watch`` sees every solution, and may end the work.
    """

    def __init__(self, problem: Problem, live: memory.Liveness, limits: Limits | None = None, watch: Watch | None = None) -> None:
        self.problem, self.live, self.limits, self.watch = problem, live, limits, watch
        self.eliminator = Eliminator(problem.store) if watch is None else Eliminator(problem.store, watch.check)
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
        solution = Solution(name, states, keep, regather, seconds, peak, limits)
        if self.watch is not None:
            self.watch.take(solution)
        return solution

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

    @property
    def solutions(self) -> tuple[Solution, ...]:
        """Every baseline that exists, at its best; level by level where its tables are large."""
        return tuple(s for r in self.restrictions for s in self._solved(r))

    def close(self) -> None:
        """Those that are not solved yet never will be."""
        self._closed = True

    def _solved(self, r: Restriction) -> tuple[Solution, ...]:
        if r.name not in self._found:
            if self._closed:
                return ()
            if self._solver.watch is not None:
                self._solver.watch.tell("baselines", 0.1 + 0.3 * len(self._found) / len(self.restrictions))
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
    """Solves within ``limit`` bytes a device. ``domains`` hold the pins. ``deadline`` is an instant of `anytime.now_s`.

    At the deadline, or when it is interrupted, it returns the best so far. The deadline waits until there is any solution (its
    tables cannot be made in part); an interrupt that comes before one keeps to the limit is raised.

    With the objective "bytes" Tofu's premise holds, which the baselines do not share: they seed nothing.
    """
    live = memory.liveness(problem, donated)
    incumbent = Incumbent(limit)
    watch = Watch(incumbent, domains, deadline, observer)
    solver = Solver(problem, live, everything_cut(problem) if problem.objective == "bytes" else None, watch)
    rivals = Rivals(solver)
    try:
        outcome = _searched(solver, rivals, limit, domains, watch)
        observer("done", 1.0)
        return outcome
    except OutOfTimeError:
        stopped: Stopped = "time budget"
    except KeyboardInterrupt:
        if not incumbent.fits:
            raise
        stopped = "interrupted"
    finally:
        watch.close()
    rivals.close()
    assert incumbent.best is not None
    best = replace(incumbent.best, name="plan")
    return Outcome(best, rivals, problem.floor_seconds(), False, best, stopped)


def _searched(solver: Solver, rivals: Rivals, limit: int, pinned: Sequence[Domain], watch: Watch) -> Outcome:
    """The whole search, of which ``watch`` keeps the best so far."""
    problem = solver.problem
    domains = everything_split(problem, pinned) if problem.objective == "bytes" else pinned
    order = solver.order(domains)
    joint_fits = len(problem.sizes) <= 2 and order.largest <= JOINT_ENTRIES
    watch.tell("tables", 0.05)
    if watch.deadline is not None or (joint_fits and order.total > LONG_ENTRIES):
        # in case there is no time for more: everything in the layout that uses the fewest factors, then level by level
        solver.minimum("first", [(s,) for s in problem.narrowest(domains)])
        watch.tell("levels", 0.1)
        if joint_fits:
            recurse(solver, pinned)

    def seeds(spaces: Mapping[Groups, Sequence[Domain]]) -> list[Solution]:
        if problem.objective == "bytes":
            return []
        agreeing = [s for s in rivals.outside(spaces) if all(at in d for at, d in zip(s.states, domains, strict=True))]
        fastest = sorted(agreeing, key=lambda s: s.seconds)
        fitting = [s for s in fastest if s.fits(limit)]
        return [solver.unlimited(s) for s in dict.fromkeys([*fastest[:SEEDS], *fitting[:SEEDS]])]

    spaces = {} if joint_fits else _spaces(solver, domains)
    starts: list[Solution] = []
    for groups, space in spaces.items():
        watch.tell("levels", 0.1)
        starts.append(solver.unlimited(solver.minimum("plan", space, limits=Limits(groups=groups))[0]))
    if not joint_fits and not starts:
        starts = [recurse(solver, pinned).solution]
    inside = [] if joint_fits else [*starts, *seeds(spaces)]
    watch.tell("search", 0.4)
    best, bound, exact = _best(solver, domains, inside, joint_fits, watch)
    candidates = [best, *inside]
    smallest: Solution | None = None
    if not best.fits(limit):
        watch.tell("memory", 0.7)
        inside = [*starts, *seeds({})]
        more, smallest = _within(solver, domains, limit, best, joint_fits, inside, watch)
        candidates += [*inside, *more]
        if not any(s.fits(limit) for s in candidates):
            # the same way whatever the limit is, so that the limit that the error names is met
            _, least = _within(solver, domains, 0, best, joint_fits, inside, watch)
            smallest = repair.smaller(solver, domains, min(least, smallest, key=lambda s: s.peak_bytes))
            candidates.append(smallest)
        repaired = repair.faster(solver, domains, limit, candidates)
        candidates += [repaired] if repaired is not None else []
    fitting = [s for s in candidates if s.fits(limit)]
    smallest = min([*candidates, *([smallest] if smallest else [])], key=lambda s: s.peak_bytes)
    chosen = min(fitting, key=lambda s: s.seconds) if fitting else smallest
    assert all(s in d for s, d in zip(chosen.states, pinned, strict=True)), "a pin is not held"
    return Outcome(replace(chosen, name="plan"), rivals, bound, exact, smallest)


def in_seconds(problem: Problem, outcome: Outcome, donated: frozenset[int]) -> tuple[Problem, Outcome]:
    """What a search for the fewest bytes found, priced in seconds; the baselines are solved for seconds.

    The bound is that of seconds: every op at its fastest, nothing communicated.
    """
    timed = Problem(problem.graph, problem.coarse, problem.cluster, problem.factors)
    live = memory.liveness(timed, donated)
    solver = Solver(timed, live, everything_cut(timed))

    def priced(s: Solution) -> Solution:
        return solver.rate(s.name, s.states, {v: float("inf") for v in timed.backward_views if v not in s.keep}, s.regather)

    smallest = priced(outcome.smallest) if outcome.smallest is not None else None
    rivals = Rivals(Solver(timed, live))
    if outcome.stopped:
        rivals.close()
    found = replace(outcome, best=priced(outcome.best), rivals=rivals, smallest=smallest)
    return timed, replace(found, bound_s=timed.floor_seconds(), exact=False)


def _best(
    solver: Solver,
    domains: Sequence[Domain],
    seeds: Sequence[Solution],
    joint_fits: bool,
    watch: Watch,
) -> tuple[Solution, float, bool]:
    """(the best solution in these domains, a lower bound, whether it is exact)."""
    if joint_fits:
        solution, priced = solver.minimum("plan", domains)
        return solution, priced, True
    found = min(seeds, key=lambda s: s.seconds)
    return _polish(solver, domains, found, watch), solver.problem.floor_seconds(), False


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
    watch: Watch | None = None,
    *,
    points: Sequence[int] = (),
    price: float = 0.0,
) -> Solution:
    """Chooses pairs of levels anew, the others held, until nothing improves; single levels where a pair is too wide."""
    problem, best, best_cost = solver.problem, start, float("inf")
    m = len(problem.sizes)
    moves: list[tuple[int, ...]] = list(itertools.combinations(range(m), 2)) if m > 1 else [(0,)]
    waiting = list(moves)
    while waiting:
        if watch is not None:
            watch.tell("memory" if points else "polish", 0.7 if points else 0.6)
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


def _within(
    solver: Solver,
    domains: Sequence[Domain],
    limit: int,
    start: Solution,
    joint_fits: bool,
    seeds: Sequence[Solution],
    watch: Watch,
) -> tuple[list[Solution], Solution]:
    """(solutions found on the way to the limit, the smallest): one price on the bytes at every peak met so far, by bisection."""

    def at(price: float) -> Solution:
        if joint_fits:
            return solver.minimum("plan", domains, points=points, price=price)[0]
        seed = min([start, *seeds], key=lambda s: s.seconds + price * max(0, s.peak_bytes - limit))
        return _polish(solver, domains, seed, watch, points=points, price=price)

    points = [solver.peak_point(start)]
    found: list[Solution] = []
    low, high = 0.0, max(start.seconds, 1e-6) / max(start.peak_bytes, 1)
    for tried in range(24):
        watch.tell("memory", 0.7 + 0.2 * tried / 24)
        solution = at(high)
        found.append(solution)
        peak = solver.peak_point(solution)
        if solution.fits(limit):
            break
        if peak not in points:
            points.append(peak)
        else:
            low, high = high, high * 8
        if high > 1e3:
            break
    if not found[-1].fits(limit):
        return found, min(found, key=lambda s: s.peak_bytes)
    for tried in range(7):
        watch.tell("memory", 0.9 + 0.1 * tried / 7)
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
