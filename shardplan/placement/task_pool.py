"""Tasks and arcs in growing arrays. Groups and bundles are replaced by new ones at the end; old ones stay a while."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.placement.structure import Structure

Ints = NDArray[np.int64]
ShortInts = NDArray[np.int32]
NO_TASKS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Mark:
    """The data that bring a pool back to an earlier state: its ends, and where the replaced groups and bundles were."""

    tasks: int
    arcs: int
    groups: tuple[tuple[int, int, int], ...]
    bundles: tuple[tuple[int, int], ...]


class TaskPool:
    """Arrays by task: ``work`` in ticks, ``stream`` (-1: none), ``key``, ``group``, ``alive``, ``ready``, ``end``.

    Group g has the tasks ``base[g]`` to ``base[g] + count[g]``. Bundle b has at ``pointer[b]`` of ``arcs`` an offset for each
    task of its source group and one more, then the tasks that wait for them.
    """

    def __init__(self, structure: Structure, tasks: int = 1 << 12, arcs: int = 1 << 14) -> None:
        self.structure = structure
        self.columns = ("work", "stream", "key", "group", "ready", "end", "new_ready", "new_end", "waits")
        for name in self.columns:
            setattr(self, name, np.zeros(tasks, np.int32 if name in _SHORT else np.int64))
        self.work: Ints
        self.stream: ShortInts
        self.key: Ints
        self.group: ShortInts
        self.ready: Ints
        self.end: Ints
        self.new_ready: Ints
        self.new_end: Ints
        self.waits: ShortInts
        self.alive = np.zeros(tasks, bool)
        self.arcs = np.zeros(arcs, np.int32)
        self.base = np.zeros(structure.groups, np.int64)
        self.count = np.zeros(structure.groups, np.int64)
        self.pointer = np.zeros(len(structure.sources), np.int64)
        self.top = 0
        self.arcs_top = 0

    @property
    def tasks(self) -> int:
        """The number of tasks of the present assignment."""
        return int(self.count.sum())

    def clear(self) -> None:
        """Takes all tasks and arcs out."""
        self.alive[:] = False
        self.count[:] = 0
        self.top = self.arcs_top = 0

    # -- building ----------------------------------------------------------------------------------------------------

    def put_group(self, g: int, work: Ints, stream: Ints) -> None:
        """Replaces the tasks of a group. Tasks without a stream come before others that are ready at the same time."""
        k = len(work)
        while self.top + k > len(self.work):
            self._grow_tasks()
        at = slice(self.top, self.top + k)
        self.work[at], self.stream[at], self.group[at] = work, stream, g
        self.key[at] = (g << 24) + np.arange(k) - np.where(stream < 0, 1 << 60, 0)
        self.alive[self.base[g] : self.base[g] + self.count[g]] = False
        self.alive[at] = True
        self.base[g], self.count[g] = self.top, k
        self.top += k

    def put_bundle(self, b: int, source: Ints, target: Ints) -> None:
        """Replaces the arcs of a bundle: from these places in its source group, ascending, to these tasks."""
        k = int(self.count[self.structure.sources[b]])
        size = k + 1 + len(target)
        while self.arcs_top + size > len(self.arcs):
            self.arcs = np.concatenate([self.arcs, np.zeros_like(self.arcs)])
        at = self.arcs_top
        self.pointer[b] = at
        self.arcs[at : at + k + 1] = at + k + 1 + np.searchsorted(source, np.arange(k + 1))
        self.arcs[at + k + 1 : at + size] = target
        self.arcs_top += size

    def _grow_tasks(self) -> None:
        for name in self.columns:
            old: NDArray[np.int32 | np.int64] = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        self.alive = np.concatenate([self.alive, np.zeros_like(self.alive)])

    # -- going back --------------------------------------------------------------------------------------------------

    def mark(self, groups: list[int], bundles: list[int]) -> Mark:
        """The present state of the groups and bundles that are about to be replaced."""
        return Mark(
            self.top,
            self.arcs_top,
            tuple((g, int(self.base[g]), int(self.count[g])) for g in groups),
            tuple((b, int(self.pointer[b])) for b in bundles),
        )

    def go_back(self, mark: Mark) -> None:
        """Takes back everything that was put since a mark."""
        self.alive[mark.tasks : self.top] = False
        for g, base, count in mark.groups:
            self.base[g], self.count[g] = base, count
            self.alive[base : base + count] = True
        for b, pointer in mark.bundles:
            self.pointer[b] = pointer
        self.top, self.arcs_top = mark.tasks, mark.arcs

    def slots(self, g: int) -> Ints:
        """The tasks of a group."""
        return np.arange(self.base[g], self.base[g] + self.count[g])

    def sources_of(self, b: int) -> Ints:
        """The tasks of a bundle's source group from which an arc goes."""
        g = int(self.structure.sources[b])
        at, k = int(self.pointer[b]), int(self.count[g])
        return int(self.base[g]) + np.flatnonzero(np.diff(self.arcs[at : at + k + 1]))


_SHORT = frozenset({"stream", "group", "waits"})
"""Columns of 32 bits: a simulation spends most of its time waiting for memory."""
