"""An assignment of layouts to all variables, and its cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shardplan.ir import Factor
from shardplan.search.problem.pricing import Limits


class Peak:
    """The peak memory of one device, computed on first use because most solutions never need it.

    ``work`` is `memory.peak` as a function of the limit. ``_known`` is its last result: (bytes, whether they are
    exact); otherwise the bytes are an upper bound.
    """

    def __init__(self, work: Callable[[int | None], tuple[int, bool]]) -> None:
        self._work = work
        self._known: tuple[int, bool] | None = None

    @property
    def nbytes(self) -> int:
        """The exact peak in bytes."""
        if self._known is None or not self._known[1]:
            self._known = self._work(None)
        return self._known[0]

    def within(self, limit: int) -> bool:
        """Whether the peak is at most ``limit`` bytes."""
        if self._known is None or (not self._known[1] and self._known[0] > limit):
            self._known = self._work(limit)
        return self._known[0] <= limit


@dataclass(frozen=True, slots=True)
class Solution:
    """An assignment with its cost. ``keep`` are the backward views that reuse the forward copy; ``seconds`` excludes memory
    prices.
    """

    name: str
    states: tuple[int, ...]
    keep: frozenset[int]
    regather: bool
    seconds: float
    peak: Peak = field(compare=False, repr=False)
    limits: Limits | None = field(default=None, compare=False, repr=False)

    @property
    def peak_bytes(self) -> int:
        """The peak memory of one device."""
        return self.peak.nbytes

    def fits(self, limit: int) -> bool:
        """Whether a device's peak is within the limit."""
        return self.peak.within(limit)

    def rank(self, limit: int, seconds: float | None = None) -> tuple[bool, float]:
        """The order of solutions: what fits comes first, then the faster by ``seconds`` (the search's own, where they are not
        given), or the smaller, where it does not fit.
        """
        if self.fits(limit):
            return False, self.seconds if seconds is None else seconds
        return True, float(self.peak_bytes)


@dataclass(frozen=True, slots=True)
class Tried:
    """A factoring that the search came to: the seconds of its best plan, whether that fits, and a lower bound on all its plans.

    One that was left out has no seconds; ``why`` says the reason.
    """

    factors: tuple[Factor, ...]
    seconds: float | None
    fits: bool
    bound_s: float | None
    why: str = ""
