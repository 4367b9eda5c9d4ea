"""Tables: integer costs over the layouts of a few variables, interned by content.

Costs are int64 picoseconds; `BIG` stands for infinite. Each table is stored once with its minimum subtracted, so that isomorphic
layers share tables and the elimination of equal tables is done once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.int64]

BIG = 1 << 50
"""Infinite: larger than any finite cost (`LONGEST_S`), small enough that sums of it do not overflow. A sum that reaches it counts
as infinite, though two of the longest finite costs do."""

_PER_SECOND = 1e12
"""Cost units (picoseconds) in a second."""

LONGEST_S = 1e3
"""The largest finite table entry, in seconds. Longer costs are clipped to it, so they are not told apart."""

MOST_BYTES = 1 << 29
"""The most bytes that a search keeps of each kind of result that it can compute again: prices of moves, and results of
eliminations.
"""
_FORGOTTEN = np.zeros(0, np.int64)


def picoseconds(seconds: NDArray[np.float64]) -> Costs:
    """Seconds as integer picoseconds; infinities and NaN become `BIG`."""
    return np.where(np.isfinite(seconds), np.rint(np.fmin(seconds, LONGEST_S) * _PER_SECOND).astype(np.int64), BIG)


def seconds_of(cost: float) -> float:
    """A sum of costs in seconds; infinite if one of them is."""
    return float("inf") if cost >= BIG else cost / _PER_SECOND


def seconds_of_each(costs: NDArray[Any]) -> NDArray[np.float64]:
    """Sums of costs in seconds; infinite where one of a sum is."""
    return np.where(costs >= BIG, np.inf, costs / _PER_SECOND)


@dataclass(slots=True)
class TableStore:
    """All distinct tables of one planning run. ``passing`` tables (the results of eliminations) may be forgotten again:
    ``forgotten`` counts how often that has happened.
    """

    tables: list[Costs] = field(default_factory=list[Costs])
    forgotten: int = 0
    _passing: set[int] = field(default_factory=set[int])
    _passing_bytes: int = 0
    _ids: dict[tuple[tuple[int, ...], int], list[int]] = field(default_factory=dict[tuple[tuple[int, ...], int], list[int]])

    def intern(self, costs: Costs, *, passing: bool = False) -> tuple[int, int]:
        """(id, minimum): the table with its minimum subtracted, infinite entries left infinite."""
        low = min(int(costs.min()), BIG)
        shifted = np.ascontiguousarray(costs - low)
        if low < BIG <= costs.max():
            shifted[costs >= BIG] = BIG
        candidates = self._ids.setdefault((shifted.shape, int(shifted.sum())), [])  # few tables share shape and sum
        for candidate in candidates:
            if np.array_equal(self.tables[candidate], shifted):
                if not passing and candidate in self._passing:
                    self._passing.remove(candidate)
                    self._passing_bytes -= shifted.nbytes
                return candidate, low
        shifted.setflags(write=False)
        self.tables.append(shifted)  # before its id: an interrupt in between does no harm
        candidates.append(len(self.tables) - 1)
        if passing:
            self._passing.add(candidates[-1])
            self._passing_bytes += shifted.nbytes
        return candidates[-1], low

    def tidy(self, most_bytes: int) -> None:
        """Forgets the passing tables if they take more than this. Nobody may use their ids any more."""
        if self._passing_bytes <= most_bytes:
            return
        self.forgotten += 1
        for key, own in self._ids.items():
            self._ids[key] = [table for table in own if table not in self._passing]
        for table in self._passing:
            self.tables[table] = _FORGOTTEN
        self._passing, self._passing_bytes = set(), 0


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of the problem: a table over ``scope`` (distinct variables, in the table's axis order) plus a constant."""

    scope: tuple[int, ...]
    table: int
    constant: int = 0
