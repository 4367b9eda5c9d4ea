"""The search: the cheapest assignment within the memory limit, and every baseline scored in the same tables.

Two levels are solved jointly: exactly where the tables allow, else by a beam that mostly proves its optimum. More are solved over
a group of slower and one of faster levels (else by recursion, slowest level first). Then every layout is polished on one level,
and if that gained, on pairs of levels, to a fixpoint, and from other groupings too (Tofu, section 5.2, made joint).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardplan.search.baselines.recipes import groupings
from shardplan.search.baselines.rivals import Rivals
from shardplan.search.baselines.tofu_premise import everything_cut, everything_split
from shardplan.search.inference.anytime import Incumbent, Observer, OutOfTimeError, Stopped, Watch
from shardplan.search.inference.bound import WORK, Bound
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem.pricing import Domain, Limits
from shardplan.search.problem.problem import Problem
from shardplan.search.problem.solution import Solution
from shardplan.search.problem.strategies import Groups
from shardplan.search.strategy.memory_pricing import Descent
from shardplan.search.strategy.polish import JOINT_ENTRIES, near, polish
from shardplan.search.strategy.recursion import recurse

LONG_ENTRIES = 50_000_000
"""From so many predicted table entries in all on, a joint solve takes seconds: something simpler is found first, in case it is
interrupted.
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The best solution, the baselines, a lower bound on any solution's seconds, and how it was found.

    ``exact``: it is the optimum, where memory has no limit. ``smallest`` is there where nothing fits: the fewest bytes that were
    found. ``stopped`` says what ended the search early: then ``best`` is the best so far, not ``exact``, and the baselines are
    those that were solved by then.
    """

    best: Solution
    rivals: Rivals
    bound: Bound
    exact: bool
    smallest: Solution | None
    stopped: Stopped = ""


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
    solver = Solver(problem, live, everything_cut(problem) if problem.objective.everything_split else None, watch)
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
    bound = Bound(
        problem, live, domains, free=best, chosen=best, limit=limit, unlimited_s=None, known_s=incumbent.least_s, work=WORK / 20
    )
    return Outcome(best, rivals, bound, False, best, stopped)


@dataclass(frozen=True, slots=True)
class _Free:
    """What is found where memory has no limit: the best, what every plan costs at least, other plans, and (``levels``) where
    another search may begin. ``wide``: the joint tables are too large to be solved again and again.
    """

    best: Solution
    known_s: float
    others: Sequence[Solution]
    levels: _Levels | None
    wide: bool

    @property
    def exact(self) -> bool:
        """Whether the best is proved to be the optimum."""
        return self.known_s >= self.best.seconds


def _searched(solver: Solver, rivals: Rivals, limit: int, pinned: Sequence[Domain], watch: Watch) -> Outcome:
    """The whole search, of which ``watch`` keeps the best so far."""
    problem = solver.problem
    domains = everything_split(problem, pinned) if problem.objective.everything_split else pinned
    free = _unlimited(solver, rivals, limit, domains, pinned, watch)
    best = free.best
    candidates = [best, *free.others]
    smallest: Solution | None = None
    if not best.fits(limit):
        watch.tell("memory", 0.7)
        again = free.exact and not free.wide
        starts = free.levels.every if free.levels is not None else []
        candidates += (found := Descent(solver, rivals, domains, best, starts, again, watch).within(limit))
        smallest = None if any(s.fits(limit) for s in candidates) else found[-1]
    chosen = next((s for s in sorted(candidates, key=lambda s: s.seconds) if s.fits(limit)), smallest)
    assert chosen is not None
    assert all(s in d for s, d in zip(chosen.states, pinned, strict=True)), "a pin is not held"
    bound = Bound(
        problem,
        solver.live,
        domains,
        free=best,
        chosen=chosen,
        limit=limit,
        unlimited_s=best.seconds if free.exact else None,
        known_s=free.known_s,
    )
    return Outcome(replace(chosen, name="plan"), rivals, bound, free.exact, smallest)


def _unlimited(
    solver: Solver, rivals: Rivals, limit: int, domains: Sequence[Domain], pinned: Sequence[Domain], watch: Watch
) -> _Free:
    """The search where memory has no limit; ``limit`` says which baselines seed it, too, where no polish reaches them."""
    count = len(solver.problem.sizes)
    order = solver.order(domains) if count <= 2 else None
    watch.tell("tables", 0.05)
    if watch.deadline is not None or (order is not None and order.total > LONG_ENTRIES):
        # in case there is no time for more: everything in the layout that uses the fewest factors, then level by level
        _first(solver, domains)
        watch.tell("levels", 0.1)
        if count == 2:
            recurse(solver, pinned)
    joint: list[Solution] = []
    known_s, wide = 0.0, order is None or order.largest > JOINT_ENTRIES
    if order is not None:
        best, known_s = solver.bounded("plan", domains)
        watch.incumbent.least_s = known_s
        if known_s >= best.seconds:
            watch.tell("search", 0.4)
            return _Free(best, known_s, (), None, wide)
        joint = [best]
    levels = _Levels(solver, domains, pinned, watch)
    best = _reached(solver, rivals, levels, watch)
    if best is None:
        others = [*levels.every, *joint]
        if all(math.isinf(s.seconds) for s in others):
            others.append(_first(solver, domains))
        others += rivals.seeds(domains, limit, levels.spaces)
        watch.tell("search", 0.4)
        best = polish(solver, domains, _fastest(others), watch)
    else:
        others = []
    return _Free(best, known_s, others, levels, wide)


def _reached(solver: Solver, rivals: Rivals, levels: _Levels, watch: Watch) -> Solution | None:
    """With three factors and more: the best over one grouping, polished so that no baseline is better.

    Only where that gained anything the other groupings are solved, too. None where the tables of that would be too large, or
    where no assignment of the grouping is possible.
    """
    groups = levels.coarsest()
    if groups is None:
        return None
    start, domains = levels.of(groups), levels.domains
    reach = rivals.reach(domains, (groups,))
    step = near(solver.problem, domains, start, reach)
    if math.isinf(start.seconds) or solver.order(step).largest > JOINT_ENTRIES:
        return None
    watch.tell("search", 0.4)
    best = polish(solver, domains, start, watch, also=reach)
    if best.states == start.states:
        return solver.unlimited(best, step) if best is start else best
    other = _fastest(levels.every)
    return best if other.states == start.states else _fastest([best, polish(solver, domains, other, watch)])


def _fastest(of: Sequence[Solution]) -> Solution:
    return min(of, key=lambda s: s.seconds)


def _first(solver: Solver, domains: Sequence[Domain]) -> Solution:
    """Everything in the layout that uses the fewest factors."""
    return solver.minimum("first", [(s,) for s in solver.problem.narrowest(domains)])[0]


def in_seconds(problem: Problem, outcome: Outcome, donated: frozenset[int]) -> tuple[Problem, Outcome]:
    """What a search for the fewest bytes found, priced in seconds; the baselines are solved for seconds.

    What was found for time stays as it is. The bound is that of seconds: every op at its fastest, nothing communicated.
    """
    if problem.objective.unit == "picosecond":
        return problem, outcome
    timed = Problem(problem.graph, problem.coarse, problem.cluster, problem.factors)
    live = memory.liveness(timed, donated)
    solver = Solver(timed, live, everything_cut(timed))

    def priced(s: Solution) -> Solution:
        return solver.rate(s.name, s.states, timed.regathered(s.keep), s.regather)

    smallest = priced(outcome.smallest) if outcome.smallest is not None else None
    rivals = Rivals(Solver(timed, live))
    if outcome.stopped:
        rivals.close()
    best = priced(outcome.best)
    bound = Bound(timed, live, timed.domains, free=best, chosen=best, limit=best.peak_bytes, unlimited_s=None)
    return timed, Outcome(best, rivals, bound, False, smallest, outcome.stopped)


class _Levels:
    """The best over each grouping of the factors that solves jointly, found when it is first asked for.

    With two factors and fewer there are none: recursion over the levels takes their place.
    """

    def __init__(self, solver: Solver, domains: Sequence[Domain], pinned: Sequence[Domain], watch: Watch) -> None:
        problem = solver.problem
        self.domains = domains
        self._groupings = (
            groupings(len(problem.sizes)) if len(problem.sizes) > 2 and not problem.objective.everything_split else ()
        )
        self._solver, self._pinned, self._watch = solver, pinned, watch
        self._spaces: dict[Groups, tuple[Domain, ...] | None] = {}
        self._found: dict[Groups, Solution] = {}

    def _space(self, groups: Groups) -> tuple[Domain, ...] | None:
        """The layouts that treat the factors of each group alike; None where these do not solve jointly."""
        if groups not in self._spaces:
            space = self._solver.problem.together(self.domains, groups)
            self._spaces[groups] = space if self._solver.order(space).largest <= JOINT_ENTRIES else None
        return self._spaces[groups]

    def coarsest(self) -> Groups | None:
        """Of those that solve jointly the one that treats the most slower factors alike."""
        return next((groups for groups in reversed(self._groupings) if self._space(groups) is not None), None)

    @cached_property
    def spaces(self) -> dict[Groups, tuple[Domain, ...]]:
        """The layouts of every grouping."""
        found = {groups: self._space(groups) for groups in self._groupings}
        return {groups: space for groups, space in found.items() if space is not None}

    def of(self, groups: Groups) -> Solution:
        """The best in which the factors of each group do the same, in layouts and in ops."""
        if groups not in self._found:
            self._watch.tell("levels", 0.1)
            space = self._space(groups)
            assert space is not None, "this grouping does not solve jointly"
            self._found[groups], _ = self._solver.minimum("plan", space, limits=Limits(groups=groups))
        return self._found[groups]

    @cached_property
    def every(self) -> list[Solution]:
        """All of them, their ops cut the best way."""
        found = [self._solver.unlimited(self.of(groups)) for groups in self.spaces]
        return found or [recurse(self._solver, self._pinned).solution]
