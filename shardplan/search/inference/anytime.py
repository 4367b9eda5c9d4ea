"""A search that can be stopped at any time: its deadline, its observer, and its best solution so far."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from shardplan.search.problem.pricing import Domain
from shardplan.search.problem.solution import Solution

Observer = Callable[[str, float], None]
"""Called with the current activity and the progress of the search (0 to 1)."""


Best = Callable[[float, float], None]
"""Called with the seconds of the best plan so far, infinite without one, and a lower bound on them, 0 if none is known."""


def silent(_what: str, _part: float) -> None:
    """The observer that does nothing."""


def unheard(_best_s: float, _least_s: float) -> None:
    """Hears of the best plan so far, and does nothing."""


class Part:
    """An observer of a part of some work: its progress is that from ``first`` to ``last`` of another observer.

    What hears of the best plan is the same. ``name``, if any, is said before the activity.
    """

    def __init__(self, to: Observer, first: float, last: float, name: str = "") -> None:
        self.best = best_of(to)
        self._to, self._first, self._width, self._name = to, first, last - first, f"{name}: " if name else ""

    def __call__(self, what: str, part: float) -> None:
        """Tells the other observer."""
        self._to(f"{self._name}{what}", self._first + self._width * part)


def best_of(observer: Observer) -> Best:
    """What hears of the best plan so far: the observer's method ``best``, if it has one."""
    return getattr(observer, "best", unheard)


def ignored(_found: object) -> None:
    """Takes what a search offers, and does nothing with it."""


now_s = time.monotonic
"""The clock that deadlines are read from."""


def late(deadline: float | None) -> bool:
    """Whether a deadline, an instant of `now_s`, has passed; None is never."""
    return deadline is not None and now_s() >= deadline


Stopped = Literal["", "time budget", "interrupted"]
"""The reason for which a search ended early; empty if it finished."""


class OutOfTimeError(Exception):
    """Raised inside a search whose deadline has passed, once it has a solution. It never leaves the search."""


@dataclass(slots=True)
class Incumbent:
    """The best solution so far: the fastest within ``limit`` bytes; until one fits, the smallest.

    ``least_s`` is a known lower bound on the seconds of every solution.
    """

    limit: int
    best: Solution | None = None
    least_s: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether there is a solution within the limit."""
        return self.best is not None and self.best.fits(self.limit)

    def offer(self, solution: Solution) -> bool:
        """Takes the solution if it comes before the best so far; returns whether it does.

        The peak of a slower solution is not computed, since that takes long.
        """
        if self.best is not None:
            slower = self.best.fits(self.limit) and solution.seconds >= self.best.seconds
            if slower or solution.rank(self.limit) >= self.best.rank(self.limit):
                return False
        self.best = solution
        return True


@dataclass(slots=True)
class Watch:
    """Follows one search. ``deadline`` is an instant of `now_s`; the best solution must lie in ``domains``, which hold the pins.

    The search calls `check` wherever it may be stopped. An interrupt (`KeyboardInterrupt`, from Ctrl-C or from the observer) may
    come anywhere, so memos are written in an order that keeps them valid after one.
    """

    incumbent: Incumbent
    domains: Sequence[Domain]
    deadline: float | None = None
    observer: Observer = silent
    _open: bool = True
    _progress: float = 0.0

    def check(self) -> None:
        """Raises `OutOfTimeError` if the deadline has passed and there is a solution, even one over the limit."""
        if late(self.deadline) and self._open and self.incumbent.best is not None:
            raise OutOfTimeError

    def tell(self, what: str, part: float) -> None:
        """Reports the activity and the progress, which never decreases, to the observer; then checks the deadline."""
        if self._open:
            self._progress = max(self._progress, part)
            self.observer(what, self._progress)
            self.check()

    def take(self, solution: Solution) -> None:
        """Offers a solution to the incumbent, unless it breaks a pin or cannot run."""
        if (
            self._open
            and math.isfinite(solution.seconds)
            and all(s in d for s, d in zip(solution.states, self.domains, strict=True))
        ):
            self.incumbent.offer(solution)

    def close(self) -> None:
        """Ends the search: later solutions, for a report, have no deadline. The observer is dropped, since it may refer to large
        values.
        """
        self._open, self.observer = False, silent
