"""Lower bounds on the time of a strategy, which need no simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shardplan.placement import event_loop
from shardplan.placement.configurations import Configuration
from shardplan.placement.problem import PlacementProblem
from shardplan.placement.structure import Structure

Ints = NDArray[np.int64]


class Loads:
    """The ticks that each device computes: no step takes less than the most of them."""

    def __init__(self, problem: PlacementProblem, strategy: Sequence[Configuration]) -> None:
        self._problem = problem
        self.ticks = np.zeros(problem.machine.count, np.int64)
        for i, chosen in enumerate(strategy):
            self.ticks += self._own(i, chosen)

    def with_change(self, i: int, before: Configuration, after: Configuration) -> int:
        """The most ticks of a device if operator i changes."""
        return int((self.ticks - self._own(i, before) + self._own(i, after)).max())

    def change(self, i: int, before: Configuration, after: Configuration) -> None:
        """Changes operator i."""
        self.ticks += self._own(i, after) - self._own(i, before)

    def _own(self, i: int, chosen: Configuration) -> Ints:
        devices = np.array(chosen.devices)
        each = sum(self._problem.tables[i][chosen.degrees]) / self._problem.machine.speed[devices]
        # each phase is rounded, so that a part may take up to a tick less than its share of the sum
        return np.bincount(devices, np.maximum(each - 3, 0), self._problem.machine.count).astype(np.int64)


class Tails:
    """[groups]: ticks that pass at least after the end of any task of a group, by the chains of operators behind it.

    Every part of a backward pass sends a gradient to some part of each operator before it. In the forward pass this holds for
    tensors of which no part holds a copy: of copies, some may have no reader.
    """

    def __init__(self, problem: PlacementProblem, structure: Structure, strategy: Sequence[Configuration]) -> None:
        self._problem, self._structure = problem, structure
        edges = structure.graph.edges
        self._ends = np.array([(e.producer, e.consumer, e.gradient) for e in edges], np.int64).reshape(len(edges), 3)
        self._phases = np.array([structure.backward, structure.update], bool)
        self._order = np.array(structure.from_last, np.int64)
        self._ticks = np.zeros((len(strategy), 3), np.int64)
        self._alone = np.zeros(len(edges), bool)
        for i, chosen in enumerate(strategy):
            self.change(i, chosen)

    def change(self, i: int, chosen: Configuration) -> None:
        """Changes operator i."""
        fastest = float(self._problem.machine.speed.max())
        self._ticks[i] = [int(t / fastest) for t in self._problem.tables[i][chosen.degrees]]
        for k in self._structure.edges_of[i]:
            edge = self._structure.graph.edges[k]
            if edge.producer == i:
                self._alone[k] = all(d == 1 or n in edge.produced for n, d in enumerate(chosen.degrees))

    def bounds(self, loop: Callable[..., None] = event_loop.tails) -> Ints:
        """The bounds; ``loop`` is `event_loop.tails` or the same compiled."""
        bound = np.zeros(self._structure.groups, np.int64)
        loop(self._ticks, self._ends, self._alone, self._order, self._phases[0], self._phases[1], bound)
        return bound
