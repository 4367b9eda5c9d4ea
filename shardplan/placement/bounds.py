"""A lower bound on the time of a strategy that needs no simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from shardplan.placement.configurations import Configuration
from shardplan.placement.placement_problem import PlacementProblem

Ints = NDArray[np.int64]


class Loads:
    """The ticks that each device computes: no step takes less than the most of them."""

    def __init__(self, problem: PlacementProblem, strategy: Sequence[Configuration]) -> None:
        self._problem = problem
        self.ticks = np.zeros(problem.machine.count, np.int64)
        for i, chosen in enumerate(strategy):
            self.ticks += self._own(i, chosen)

    def changed(self, before: Mapping[int, Configuration], after: Mapping[int, Configuration]) -> Ints:
        """[n]: the ticks of each device if some operators change."""
        return self.ticks + sum(self._own(i, own) - self._own(i, before[i]) for i, own in after.items())

    def _own(self, i: int, chosen: Configuration) -> Ints:
        devices = np.array(chosen.devices)
        each = sum(self._problem.tables[i][chosen.degrees]) / self._problem.machine.speed[devices]
        # each phase is rounded, so that a part may take up to a tick less than its share of the sum
        return np.bincount(devices, np.maximum(each - 3, 0), self._problem.machine.count).astype(np.int64)
