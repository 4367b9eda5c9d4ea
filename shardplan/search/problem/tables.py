"""Tables: integer costs over the layouts of a few variables, interned by content.

Costs are int64 picoseconds; `BIG` stands for infinite. Each table is stored once with its minimum subtracted, so that isomorphic
layers share tables and the elimination of equal tables is done once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.int64]

BIG = 1 << 50
"""Infinite: larger than any sum of finite costs, small enough that sums of it do not overflow."""

PER_SECOND = 1e12
"""Costs of tables in a second."""

LONGEST_S = 1e3
"""No entry of a table is more: steps that take longer are not told apart."""


def picoseconds(seconds: NDArray[np.float64]) -> Costs:
    """Seconds as integer picoseconds; infinities, and what is no number, as `BIG`."""
    return np.where(np.isfinite(seconds), np.rint(np.fmin(seconds, LONGEST_S) * PER_SECOND).astype(np.int64), BIG)


def seconds_of(cost: float) -> float:
    """A sum of costs in seconds; infinite where one of them is."""
    return float("inf") if cost >= BIG else cost / PER_SECOND


@dataclass(slots=True)
class Store:
    """All distinct tables of one planning run."""

    tables: list[Costs] = field(default_factory=list[Costs])
    _ids: dict[tuple[tuple[int, ...], int], list[int]] = field(default_factory=dict[tuple[tuple[int, ...], int], list[int]])

    def intern(self, costs: Costs) -> tuple[int, int]:
        """(id, minimum): the table with its minimum subtracted, infinite entries left infinite."""
        low = min(int(costs.min()), BIG)
        shifted = np.ascontiguousarray(costs - low)
        if low < BIG <= costs.max():
            shifted[costs >= BIG] = BIG
        alike = self._ids.setdefault((shifted.shape, int(shifted.sum())), [])  # few others have both
        for found in alike:
            if np.array_equal(self.tables[found], shifted):
                return found, low
        shifted.setflags(write=False)
        self.tables.append(shifted)  # first: an interrupt in between leaves nothing wrong
        alike.append(len(self.tables) - 1)
        return alike[-1], low


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of the problem: a table over ``scope`` (distinct variables, in the table's axis order) plus a constant."""

    scope: tuple[int, ...]
    table: int
    constant: int = 0
