"""Which of the solutions of a search becomes the plan: the fastest as scheduled. The search prices collectives one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from shardplan.collectives.step import BUNDLED, StepKind
from shardplan.constants import CONSTANTS
from shardplan.cost.overlap import step_s
from shardplan.graph.equal_values import equal_values
from shardplan.planning.scheduled import Scheduled, scheduled
from shardplan.search.inference import anytime
from shardplan.search.problem.problem import Domain
from shardplan.search.problem.solution import Solution
from shardplan.search.session import Session
from shardplan.search.strategy.pins import pinned_domains


class Fastest:
    """The session that is fastest as scheduled, of those looked at so far.

    The search prices collectives one by one, each with its part of a bundle's time. If fewer moves share a bundle, or readers
    share a move, another solution may be faster: one over another factoring, or a baseline. A solution whose bound is longer is
    not scheduled.
    """

    def __init__(self, session: Session, deadline: float | None = None, best: anytime.Best = anytime.unheard) -> None:
        """Schedules the search's own solution. After ``deadline`` (an instant of `anytime.now_s`) nothing more is looked at:
        then ``unfinished`` says that something was left. ``best`` hears of each that is faster.
        """
        self.unfinished = False
        self._deadline, self._best = deadline, best
        self._take(session, scheduled(session))

    def _take(self, session: Session, run: Scheduled) -> None:
        self.session, self.run = session, run
        if self._best is not anytime.unheard:
            self._best(run.step_time_s, session.bound.at_once_s if session.bound is not None else 0.0)

    def late(self) -> bool:
        """Whether the time for scheduling is over."""
        self.unfinished |= anytime.late(self._deadline)
        return self.unfinished

    def among(self, others: Iterable[Session], patience: int = CONSTANTS.patience) -> None:
        """Schedules the others, the most promising first, until ``patience`` in a row are no faster."""
        slower = 0  # in a row that were no faster
        promising = [(_at_least_s(o), o) for o in itertools.takewhile(lambda _: not self.late(), others)]
        for least_s, other in sorted(promising, key=lambda row: row[0]):
            if slower == patience or self.late():
                return
            before = self.session
            self._look([(least_s, other)])
            slower = 0 if self.session is not before else slower + 1

    def among_baselines(self) -> None:
        """Looks at the baselines that fit and that the pins allow."""
        self._look(list(_rivals(self.session, self)))

    def _look(self, others: Iterable[tuple[float, Session]]) -> None:
        """Schedules sessions that fit, given with bounds on their seconds, the most promising first, while one may be faster."""
        for least_s, other in sorted(others, key=lambda row: row[0]):
            if least_s >= self.run.step_time_s * (1 - CONSTANTS.least_gain) or self.late():
                return
            if not other.solution.fits(other.memory_limit):
                continue
            if (run := scheduled(other)).step_time_s < self.run.step_time_s * (1 - CONSTANTS.least_gain):
                self._take(other, run)


def _rivals(session: Session, fastest: Fastest) -> Iterator[tuple[float, Session]]:
    """The baselines that the pins allow, with bounds on their seconds, until it is late."""
    domains = pinned_domains(session.problem, session.pins)
    seen = {_identity(session.solution)}
    for restriction in session.rivals.restrictions:
        if fastest.late():
            return
        for solution in session.rivals.of(restriction):
            if (same := _identity(solution)) in seen:
                continue
            seen.add(same)
            if _within(solution.states, domains):
                rival = session.at(replace(solution, name=session.solution.name))
                yield _at_least_s(rival), rival


def _identity(solution: Solution) -> object:
    """Equal for solutions that run alike."""
    limits = solution.limits
    return solution.states, solution.keep, (frozenset(limits.cuts.items()), limits.groups) if limits is not None else None


def _within(states: Sequence[int], domains: Sequence[Domain]) -> bool:
    """Whether the user's pins and the step's own constraints allow these states."""
    return all(s in domain for s, domain in zip(states, domains, strict=True))


def _at_least_s(session: Session) -> float:
    """A lower bound on the step of a solution as scheduled, except for values that only the schedule finds equal (one less a
    zero).

    All of its communication hides, equal values that are moved alike are moved once (but again in the backward pass, where a
    barrier keeps both apart), and collectives that may travel together fill their bundles.
    """
    problem, resharder, decisions = session.problem, session.problem.resharder, session.decisions
    equal = problem.coarse.once(equal_values, lambda: equal_values(problem.graph))
    moved = {(equal[i.tensor], i.again, i.step.kind, i.step.before, i.step.after, i.times): i for i in decisions.issued}
    together: dict[tuple[StepKind, tuple[int, ...], float], float] = {}  # bytes by collective and executions
    communication_s = 0.0
    for i in moved.values():
        kind, over, nbytes = i.step.kind, i.step.factors, i.step.nbytes
        if kind in BUNDLED and nbytes < resharder.full_bytes(kind, over):
            together[kind, over, i.times] = together.get((kind, over, i.times), 0.0) + nbytes
        else:
            communication_s += i.step.seconds * i.times
    for (kind, over, times), nbytes in together.items():
        bundles = max(1.0, nbytes / resharder.full_bytes(kind, over))
        communication_s += times * bundles * resharder.seconds(kind, over, nbytes / bundles)
    if not problem.objective.overlaps:
        return decisions.host_s + decisions.compute_s + communication_s
    return decisions.host_s + step_s(decisions.compute_s, 0.0, communication_s, decisions.contention)
