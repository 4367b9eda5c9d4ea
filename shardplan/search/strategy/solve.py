"""The search: the cheapest assignment within the memory limit, and every baseline scored in the same tables.

Two factors are solved jointly: exactly where the tables allow, else by a beam that mostly proves its optimum. More factors are
solved jointly too if the tables are small. If they are not, the factors are solved as one group of slower and one of faster ones
(else by recursion, slowest level first). Then every layout is polished on one factor and, if that gained, on pairs of factors,
to a fixpoint, and from other groupings too (Tofu, section 5.2, made joint).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardplan.constants import CONSTANTS
from shardplan.cost import TIME, Objective
from shardplan.search.baselines.recipes import groupings
from shardplan.search.baselines.rivals import Rivals
from shardplan.search.baselines.tofu_premise import everything_cut, everything_split, fewest_bytes
from shardplan.search.inference.anytime import Incumbent, Observer, OutOfTimeError, Stopped, Watch, ignored
from shardplan.search.inference.bound import Bound
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem.composite_strategies import Groups
from shardplan.search.problem.pricing import Domain, Limits
from shardplan.search.problem.problem import Problem
from shardplan.search.problem.solution import Solution, Tried
from shardplan.search.strategy.memory_pricing import Descent
from shardplan.search.strategy.polish import near, polish
from shardplan.search.strategy.purposes import Purpose
from shardplan.search.strategy.recursion import recurse


@dataclass(frozen=True, slots=True)
class Outcome:
    """The best solution, the baselines, a lower bound on any solution's seconds, and how the search ended.

    ``exact``: the optimum without a memory limit is proved. ``smallest``, where nothing fits, is the solution with the fewest
    bytes found. ``stopped`` says what ended the search early: then ``best`` is the best so far, not ``exact``, and only the
    baselines solved by then are there. ``free`` is the best solution without a memory limit, ``tried`` are the factorings that a
    search over them came to, ``purposes`` those that the user has fixed for the factors. ``others`` are the outcomes of other
    factorings that fit, fastest first: as scheduled, one of them may be faster. ``limit_costs`` is the fraction
    by which the memory limit makes the step slower, over all factorings and multipliers that were searched.
    """

    best: Solution
    rivals: Rivals
    bound: Bound
    exact: bool
    smallest: Solution | None
    free: Solution
    stopped: Stopped = ""
    tried: tuple[Tried, ...] = ()
    purposes: tuple[Purpose, ...] = ()
    others: tuple[tuple[Problem, Outcome], ...] = ()
    limit_costs: float = 0.0


def limit_costs(best: Solution, found: Sequence[Outcome], limit: int) -> float:
    """The fraction by which the best of these outcomes is slower, under this limit, than the best of them without one; 0 for less
    than ``least_gain``, infinite where the best does not fit.
    """
    if not best.fits(limit):
        return math.inf
    free_s = min(outcome.free.seconds for outcome in found)
    if best.seconds <= free_s * (1 + CONSTANTS.least_gain):
        return 0.0
    return best.seconds / free_s - 1 if free_s > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Start:
    """A solution that is known already: its states, the weights whose forward copy it keeps, and whether it keeps none."""

    states: tuple[int, ...]
    keep: frozenset[int]
    regather: bool


def search(
    problem: Problem,
    *,
    limit: int,
    donated: frozenset[int],
    domains: Sequence[Domain],
    deadline: float | None,
    observer: Observer,
    starts: Sequence[Start] = (),
    offer: Callable[[Outcome], None] = ignored,
    worth_s: float = math.inf,
) -> Outcome:
    """Solves within ``limit`` bytes per device. ``domains`` hold the pins. ``deadline`` is an instant of `anytime.now_s`.

    ``starts`` are solutions to improve on: the result is no worse than any of them. With three or more factors that are not
    solved jointly, they take the place of the groupings. Where the best solution without a limit takes ``worth_s`` or more and is
    not proved, no time is spent on solutions within the limit: another problem has a better one.

    At the deadline it returns the best so far. The deadline waits until there is a solution (tables cannot be built in part). On
    an interrupt it offers the best so far, if that fits, and raises the interrupt.

    The objective "bytes" follows Tofu's premise, which the baselines do not share, so no baseline is a start.
    """
    live = memory.liveness(problem, donated)
    incumbent = Incumbent(limit)
    watch = Watch(incumbent, domains, deadline, observer)
    solver = Solver(problem, live, everything_cut(problem) if problem.objective.everything_split else None, watch)
    rivals = Rivals(solver)
    try:
        outcome = _searched(solver, rivals, limit, domains, watch, starts, worth_s)
        observer("done", 1.0)
        return outcome
    except OutOfTimeError:
        watch.close()
        return _unfinished(solver, rivals, watch, "time budget")
    except KeyboardInterrupt:
        watch.close()
        if incumbent.fits:
            offer(_unfinished(solver, rivals, watch, "interrupted"))
        raise
    finally:
        watch.close()


def _unfinished(solver: Solver, rivals: Rivals, watch: Watch, stopped: Stopped) -> Outcome:
    """The outcome of a search that was stopped: the best so far."""
    rivals.close()
    incumbent = watch.incumbent
    assert incumbent.best is not None
    best = replace(incumbent.best, name="plan")
    bound = Bound(
        solver.problem,
        solver.live,
        watch.domains,
        free=best,
        chosen=best,
        limit=incumbent.limit,
        unlimited_s=None,
        known_s=incumbent.least_s,
        work=CONSTANTS.unfinished_bound_work,
    )
    return Outcome(best, rivals, bound, False, best, best, stopped)


@dataclass(frozen=True, slots=True)
class _Free:
    """The result without a memory limit: the best solution, a lower bound on every plan, other solutions, and ``levels``, from
    which another search may start. ``wide``: the joint tables are too large to be solved repeatedly.
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


def _searched(
    solver: Solver,
    rivals: Rivals,
    limit: int,
    pinned: Sequence[Domain],
    watch: Watch,
    starts: Sequence[Start],
    worth_s: float,
) -> Outcome:
    """The whole search; ``watch`` keeps the best solution so far."""
    problem = solver.problem
    domains = everything_split(problem, pinned) if problem.objective.everything_split else pinned
    known = [
        solver.rate("plan", start.states, problem.regathered(start.keep), start.regather)
        for start in starts
        if all(s in d for s, d in zip(start.states, domains, strict=True))
    ]
    free = _unlimited(solver, rivals, limit, domains, pinned, watch, known)
    best = free.best
    candidates = [best, *free.others, *known]
    smallest: Solution | None = None
    if not best.fits(limit) and not free.exact and best.seconds >= worth_s:
        smallest = min(candidates, key=lambda s: s.peak_bytes)
    elif not best.fits(limit):
        watch.tell("memory", 0.7)
        jointly = free.exact and not free.wide
        others = known or (free.levels.every if free.levels is not None else [])
        candidates += (result := Descent(solver, rivals, domains, best, others, jointly, watch).within(limit))
        smallest = None if any(s.fits(limit) for s in candidates) else result[-1]
    chosen = next((s for s in sorted(candidates, key=lambda s: s.seconds) if s.fits(limit)), smallest)
    assert chosen is not None
    assert all(s in d for s, d in zip(chosen.states, pinned, strict=True)), "a pin is violated"
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
    return Outcome(replace(chosen, name="plan"), rivals, bound, free.exact, smallest, best)


def _unlimited(
    solver: Solver,
    rivals: Rivals,
    limit: int,
    domains: Sequence[Domain],
    pinned: Sequence[Domain],
    watch: Watch,
    known: Sequence[Solution],
) -> _Free:
    """The search without a memory limit; ``limit`` only selects the baselines that seed it, where no polish reaches them.

    ``known`` are solutions to improve on.
    """
    count = len(solver.problem.sizes)
    order = solver.order(domains)
    if count > 2 and order.total > CONSTANTS.few_entries:
        order = None
    watch.tell("tables", 0.05)
    if not known and (watch.deadline is not None or (order is not None and order.total > CONSTANTS.long_entries)):
        # in case there is no time for more: every tensor in the layout with the fewest factors, then level by level
        _narrowest(solver, domains)
        watch.tell("levels", 0.1)
        if count == 2:
            recurse(solver, pinned)
    joint: list[Solution] = []
    known_s, wide = 0.0, order is None or order.largest > CONSTANTS.joint_entries
    if order is not None:
        best, known_s = solver.bounded("plan", domains)
        watch.incumbent.least_s = known_s
        if known_s >= best.seconds:
            watch.tell("search", 0.4)
            return _Free(best, known_s, (), None, wide)
        joint = [best]
    levels = _Levels(solver, domains, pinned, watch)
    best = _reached(solver, rivals, levels, watch, known)
    if best is None:
        others = [*known, *joint] if known and not levels.premise else [*known, *levels.every, *joint]
        if all(math.isinf(s.seconds) for s in others):
            others.append(_narrowest(solver, domains))
        if not known:  # known solutions are no worse than the baselines over fewer factors
            others += rivals.seeds(domains, limit, levels.spaces)
        watch.tell("search", 0.4)
        best = polish(solver, domains, _fastest(others), watch, pairs=count < 4 or not known)
    else:
        others = []
    return _Free(best, known_s, others, levels, wide)


def _reached(solver: Solver, rivals: Rivals, levels: _Levels, watch: Watch, known: Sequence[Solution]) -> Solution | None:
    """With three or more factors: the best solution of one grouping, or that is known, polished so that no baseline is better.

    The other groupings are solved only if the polish gains. None if the tables of the polish would be too large, or if the
    grouping has no feasible assignment.
    """
    domains = levels.domains
    if known and len(solver.problem.sizes) > 2 and not levels.premise:
        reach, start = rivals.reach(domains, ()), _fastest(known)
        if solver.order(near(solver.problem, domains, start, reach)).largest > CONSTANTS.joint_entries:
            return None
        watch.tell("search", 0.4)
        return polish(solver, domains, start, watch, also=reach, pairs=len(solver.problem.sizes) < 4)
    groups = levels.coarsest()
    if groups is None:
        return None
    start = levels.of(groups)
    reach = rivals.reach(domains, (groups,))
    step = near(solver.problem, domains, start, reach)
    if math.isinf(start.seconds) or solver.order(step).largest > CONSTANTS.joint_entries:
        return None
    watch.tell("search", 0.4)
    best = polish(solver, domains, start, watch, also=reach)
    if best.states == start.states:
        return solver.unlimited(best, step) if best is start else best
    other = _fastest(levels.every)
    return best if other.states == start.states else _fastest([best, polish(solver, domains, other, watch)])


def _fastest(of: Sequence[Solution]) -> Solution:
    return min(of, key=lambda s: s.seconds)


def _narrowest(solver: Solver, domains: Sequence[Domain]) -> Solution:
    """The solution with every tensor in the layout that uses the fewest factors."""
    return solver.minimum("first", [(s,) for s in solver.problem.narrowest(domains)])[0]


def in_seconds(
    problem: Problem, outcome: Outcome, donated: frozenset[int], objective: Objective = TIME
) -> tuple[Problem, Outcome]:
    """The outcome of a search for the fewest bytes, priced in seconds, with baselines solved for seconds.

    The outcome of a search for time stays as it is. Ops keep the cuts that send the fewest bytes. The new bound is on seconds,
    over all layouts and all cuts of ops.
    """
    if problem.objective.counts_time:
        return problem, outcome
    timed = Problem(problem.graph, problem.coarse, problem.cluster, problem.factors, objective=objective)
    live = memory.liveness(timed, donated)
    solver = Solver(timed, live, everything_cut(timed))

    def repriced(solution: Solution) -> Solution:
        return solver.again(solution, fewest_bytes(problem, timed, solution))

    smallest = repriced(outcome.smallest) if outcome.smallest is not None else None
    rivals = Rivals(Solver(timed, live))
    if outcome.stopped:
        rivals.close()
    best = repriced(outcome.best)
    bound = Bound(timed, live, timed.domains, free=best, chosen=best, limit=best.peak_bytes, unlimited_s=None)
    return timed, Outcome(best, rivals, bound, False, smallest, repriced(outcome.free), outcome.stopped, outcome.tried)


class _Levels:
    """The best solution of each grouping of the factors that solves jointly, computed on first use.

    With two factors or fewer there are no groupings: recursion over the levels takes their place.
    """

    def __init__(self, solver: Solver, domains: Sequence[Domain], pinned: Sequence[Domain], watch: Watch) -> None:
        problem = solver.problem
        self.domains, self.premise = domains, problem.objective.everything_split
        self._groupings = groupings(len(problem.sizes)) if len(problem.sizes) > 2 and not self.premise else ()
        self._solver, self._pinned, self._watch = solver, pinned, watch
        self._spaces: dict[Groups, tuple[Domain, ...] | None] = {}
        self._solutions: dict[Groups, Solution] = {}

    def _space(self, groups: Groups) -> tuple[Domain, ...] | None:
        """The layouts that treat the factors of each group alike; None where these cannot be solved jointly."""
        if groups not in self._spaces:
            space = self._solver.problem.together(self.domains, groups)
            self._spaces[groups] = space if self._solver.order(space).largest <= CONSTANTS.joint_entries else None
        return self._spaces[groups]

    def coarsest(self) -> Groups | None:
        """The jointly solvable grouping that treats the most slower factors alike; None where there is none."""
        return next((groups for groups in reversed(self._groupings) if self._space(groups) is not None), None)

    @cached_property
    def spaces(self) -> dict[Groups, tuple[Domain, ...]]:
        """The layouts of every grouping that can be solved jointly."""
        result = {groups: self._space(groups) for groups in self._groupings}
        return {groups: space for groups, space in result.items() if space is not None}

    def of(self, groups: Groups) -> Solution:
        """The best solution in which the factors of each group split and cut alike, in layouts and in ops."""
        if groups not in self._solutions:
            self._watch.tell("levels", 0.1)
            space = self._space(groups)
            assert space is not None, "this grouping cannot be solved jointly"
            self._solutions[groups], _ = self._solver.minimum("plan", space, limits=Limits(groups=groups))
        return self._solutions[groups]

    @cached_property
    def every(self) -> list[Solution]:
        """The solutions of all groupings, with their ops cut the best way; if there is no grouping, the solution of the
        recursion.
        """
        result = [self._solver.unlimited(self.of(groups)) for groups in self.spaces]
        return result or [recurse(self._solver, self._pinned).solution]
