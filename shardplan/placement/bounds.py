"""Lower bounds on the time of a strategy, which need no simulation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardplan.placement.configurations import Configuration
from shardplan.placement.operators import BACKWARD, FORWARD, UPDATE
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


def tails(problem: PlacementProblem, structure: Structure, strategy: Sequence[Configuration]) -> Ints:
    """[groups]: ticks that pass at least after the end of any task of a group, by the chains of operators behind it.

    Every part of a backward pass sends a gradient to some part of each operator before it. In the forward pass this holds for
    tensors of which no part holds a copy: of copies, some may have no reader.
    """
    graph = structure.graph
    fastest = float(problem.machine.speed.max())
    ticks = [[int(t / fastest) for t in problem.tables[i][c.degrees]] for i, c in enumerate(strategy)]
    bound = [0] * structure.groups
    for i in range(len(graph.operators)):
        update = ticks[i][UPDATE] if structure.update[i] else 0
        back, own = 3 * i + BACKWARD, 3 * i + FORWARD
        bound[back if structure.backward[i] else own] = update
    for e in graph.edges:  # producers come first, so that their bounds are complete
        if e.gradient:
            p, c = 3 * e.producer + BACKWARD, 3 * e.consumer + BACKWARD
            bound[c] = max(bound[c], ticks[e.producer][BACKWARD] + bound[p])
    for i in range(len(graph.operators)):
        if structure.backward[i]:
            bound[3 * i] = ticks[i][BACKWARD] + bound[3 * i + BACKWARD]
    for k in structure.from_last:
        e = graph.edges[k]
        degrees = strategy[e.producer].degrees
        after = ticks[e.consumer][FORWARD] + bound[3 * e.consumer]
        if all(d == 1 or n in e.produced for n, d in enumerate(degrees)):
            bound[3 * e.producer] = max(bound[3 * e.producer], after)
        bound[structure.edge_group(k)] = after
        if e.gradient:
            bound[structure.edge_group(k) + 1] = ticks[e.producer][BACKWARD] + bound[3 * e.producer + BACKWARD]
    return np.array(bound, np.int64)
