"""Lower bounds on the time after a task, with which a simulation knows early that a step takes too long."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shardplan.placement import task_loop
from shardplan.placement.configurations import Configuration
from shardplan.placement.structure import Structure
from shardplan.placement.task_graph import Table

Ints = NDArray[np.int64]


class Tails:
    """[groups]: ticks that pass at least after the end of any task of a group, by the chains of operators behind it.

    Every part of a backward pass sends a gradient to some part of each operator before it. In the forward pass this holds for
    tensors of which no part holds a copy: of copies, some may have no reader.
    """

    def __init__(self, structure: Structure, tables: Sequence[Table], fastest: float) -> None:
        self._structure, self._tables, self._fastest = structure, tables, fastest
        graph = structure.graph
        self._ends = np.array([(e.producer, e.consumer, e.gradient) for e in graph.edges], np.int64).reshape(-1, 3)
        self._phases = np.array([structure.backward, structure.update], bool)
        self._order = np.array(structure.from_last, np.int64)
        self._users = np.array([(w, u) for w, weight in enumerate(graph.weights) for u in weight.users], np.int64).reshape(-1, 2)
        self._owners = np.array([w.users[0] for w in graph.weights], np.int64)
        self._ticks = np.zeros((len(graph.operators), 3), np.int64)
        self._alone = np.zeros(len(graph.edges), bool)

    def change(self, i: int, chosen: Configuration) -> None:
        """Changes operator i."""
        self._ticks[i] = [int(t / self._fastest) for t in self._tables[i][chosen.degrees]]
        for k in self._structure.edges_of[i]:
            edge = self._structure.graph.edges[k]
            if edge.producer == i:
                self._alone[k] = all(d == 1 or n in edge.produced for n, d in enumerate(chosen.degrees))

    def leave_open(self, i: int, least: Sequence[int]) -> None:
        """Leaves the configuration of operator i open: its parts take at least so many ticks in each phase."""
        self._ticks[i] = least
        for k in self._structure.edges_of[i]:
            if self._structure.graph.edges[k].producer == i:
                self._alone[k] = False

    def bounds(self, reduced: Ints, loop: Callable[..., None] = task_loop.tails) -> Ints:
        """The bounds. ``reduced`` [weights] are the ticks of reductions; ``loop`` is `task_loop.tails` or the same compiled."""
        bound = np.zeros(self._structure.groups, np.int64)
        weights = (self._users, self._owners, reduced, self._structure.weight_group(0))
        loop(self._ticks, self._ends, self._alone, self._order, self._phases[0], self._phases[1], *weights, bound)
        return bound
