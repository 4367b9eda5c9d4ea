"""A search that can be stopped at any time: its deadline, who is told of it, and the best that it has found so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shardplan.search.problem.pricing import Domain
from shardplan.search.problem.solution import Solution
from shardplan.search.problem.tables import BIG, PER_SECOND

Observer = Callable[[str, float], None]
"""Told what is being done and how far it is (0 to 1)."""

now_s = time.monotonic
"""The clock that deadlines are read from."""

Stopped = Literal["", "time budget", "interrupted"]
"""What ended a search before it was done; empty where nothing did."""


class OutOfTimeError(Exception):
    """Raised inside a search whose deadline has passed, once something is found. It never leaves the search."""


@dataclass(slots=True)
class Incumbent:
    """The best solution so far: of those that keep to ``limit`` bytes the fastest, until there is one the smallest.

    ``least_s`` are seconds that every solution is known to take.
    """

    limit: int
    best: Solution | None = None
    least_s: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether there is a solution within the limit."""
        return self.best is not None and self.best.fits(self.limit)

    def offer(self, solution: Solution) -> bool:
        """Whether the solution is better than all before it, and so the best now."""
        if self.best is not None and (self._slower(solution, self.best) or not self._better(solution, self.best)):
            return False
        self.best = solution
        return True

    def _slower(self, a: Solution, b: Solution) -> bool:
        """Whether ``a`` cannot be better whatever it holds, which is work to find out."""
        return b.fits(self.limit) and a.seconds >= b.seconds

    def _better(self, a: Solution, b: Solution) -> bool:
        if a.fits(self.limit) != b.fits(self.limit):
            return a.fits(self.limit)
        return a.seconds < b.seconds if a.fits(self.limit) else a.peak_bytes < b.peak_bytes


@dataclass(slots=True)
class Watch:
    """Follows one search. ``deadline`` is an instant of `now_s`; ``domains`` hold the pins, which the best must keep.

    The search calls `check` wherever it may be stopped. An interrupt (`KeyboardInterrupt`, from Ctrl-C or from the observer) may
    come anywhere: what the search remembers is written so that it is right after one, too.
    """

    incumbent: Incumbent
    domains: Sequence[Domain]
    deadline: float | None = None
    observer: Observer = field(default=lambda _what, _part: None)
    _open: bool = True
    _told: float = 0.0

    def check(self) -> None:
        """Raises `OutOfTimeError` if the deadline has passed and anything is found, be it over the limit."""
        over = self.deadline is not None and now_s() >= self.deadline
        if over and self._open and self.incumbent.best is not None:
            raise OutOfTimeError

    def tell(self, what: str, part: float) -> None:
        """Tells the observer what is being done and how far it is, never less far than before, and checks the time."""
        if self._open:
            self._told = max(self._told, part)
            self.observer(what, self._told)
            self.check()

    def take(self, solution: Solution) -> None:
        """Remembers a solution if it is the best yet; none that breaks a pin, none that cannot run."""
        if (
            self._open
            and solution.seconds * PER_SECOND < BIG
            and all(s in d for s, d in zip(solution.states, self.domains, strict=True))
        ):
            self.incumbent.offer(solution)

    def close(self) -> None:
        """The search is over: what is solved later, for a report, has no deadline."""
        self._open = False
