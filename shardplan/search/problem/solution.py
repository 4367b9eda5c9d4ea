"""An assignment of layouts to all variables, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shardplan.search.problem.pricing import Limits


class Peak:
    """The most bytes that a device holds, worked out when they are first asked for: of most solutions nobody asks.

    ``work`` is `memory.peak` of a limit, ``_found`` what it gave: bytes, and whether these are the most or only no fewer.
    """

    def __init__(self, work: Callable[[int | None], tuple[int, bool]]) -> None:
        self._work = work
        self._found: tuple[int, bool] | None = None

    @property
    def nbytes(self) -> int:
        """Of one device."""
        if self._found is None or not self._found[1]:
            self._found = self._work(None)
        return self._found[0]

    def within(self, limit: int) -> bool:
        """Whether they are no more than that."""
        if self._found is None or (not self._found[1] and self._found[0] > limit):
            self._found = self._work(limit)
        return self._found[0] <= limit


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
    peak: Peak = field(compare=False, repr=False)
    limits: Limits | None = field(default=None, compare=False, repr=False)

    @property
    def peak_bytes(self) -> int:
        """The most that a device holds."""
        return self.peak.nbytes

    def fits(self, limit: int) -> bool:
        """Whether a device's peak is within the limit."""
        return self.peak.within(limit)
