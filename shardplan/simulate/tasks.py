"""The tasks of a step as arrays: the compute and the collectives of a device's program, and the values in its memory.

All devices run one program, so the tasks of one device stand for all. Tasks are numbered in program order. An op that takes no
time (a reshape, an op inside its reader's kernel) is no task: its results wait for the same tasks as its operands. A collective
runs on the links of the slowest level that it crosses. A program over several levels spends most of its time there, and leaves
its faster levels free for most of it.

XLA runs a loop as one op: it begins when all its operands are ready, and an iteration begins when the one before it has ended. So
all iterations are copies of the first, with other task numbers. Only a few iterations of a long loop are written out
(`shardplan.simulate.folds`).
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardplan.simulate.engine import NONE, Stream, TaskGraph
from shardplan.simulate.folds import Fold


@dataclass(frozen=True, slots=True)
class Label:
    """The name of a task's op or collective, with the user's ``source`` line.

    A collective also has its ``nbytes`` on one device (of the operand; of the result for an all-gather) and its mesh ``axes``.
    """

    name: str
    source: str
    nbytes: float = 0.0
    axes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HeldValues:
    """Values [v] in a device's memory, of ``nbytes`` [v], made by task ``birth`` [v] (-1: in memory when the step begins).

    Value ``value[k]`` lives at least until task ``reader[k]`` has ended. The number after the last task means the step's end.
    """

    nbytes: NDArray[np.float64]
    birth: NDArray[np.int64]
    value: NDArray[np.int64]
    reader: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepTasks:
    """The tasks [n] of a step: their graph, the ``label`` [n] of each (an index into ``labels``; -1: none), and the memory held.

    ``folds`` are the iterations of loops that stand for others, those of inner loops first.
    """

    graph: TaskGraph
    labels: tuple[Label, ...]
    label: NDArray[np.int32]
    held: HeldValues
    folds: tuple[Fold, ...] = ()

    def __len__(self) -> int:
        return len(self.graph)

    def in_program_order(self) -> StepTasks:
        """The same tasks on one stream, in program order: nothing overlaps."""
        graph = self.graph
        stream = np.where(graph.stream == NONE, NONE, 0).astype(np.int32)
        order = np.arange(len(graph), dtype=np.int64)
        return replace(self, graph=replace(graph, streams=(Stream("device", "compute"),), stream=stream, priority=order))


class Growing:
    """The arrays of `StepTasks` while they grow; loops repeat parts of them."""

    def __init__(self) -> None:
        self.seconds, self.stream, self.label = array("d"), array("q"), array("q")
        self.counts, self.waits_for = array("q"), array("q")
        self.nbytes, self.birth = array("d"), array("q")
        self.value, self.reader = array("q"), array("q")
        self.fold_last, self.fold_size, self.fold_more = array("q"), array("q"), array("q")

    def task(self, seconds: float, stream: int, label: int, waits_for: tuple[int, ...]) -> int:
        """Adds a task, and returns its number."""
        self.seconds.append(seconds)
        self.stream.append(stream)
        self.label.append(label)
        self.counts.append(len(waits_for))
        self.waits_for.extend(waits_for)
        return len(self.seconds) - 1

    def hold(self, nbytes: float, birth: int) -> int:
        """Adds a value in memory, and returns its number."""
        self.nbytes.append(nbytes)
        self.birth.append(birth)
        return len(self.nbytes) - 1

    def read(self, values: tuple[int, ...], reader: int) -> None:
        """Keeps values in memory until task ``reader`` has ended."""
        self.value.extend(values)
        self.reader.extend([reader] * len(values))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The length of each array."""
        return tuple(len(x) for x in self._arrays)

    @property
    def _arrays(self) -> tuple[array[float] | array[int], ...]:
        return (
            self.seconds, self.stream, self.label, self.counts, self.waits_for, self.nbytes, self.birth, self.value, self.reader,
            self.fold_last, self.fold_size, self.fold_more,
        )  # fmt: skip

    def cut(self, sizes: tuple[int, ...]) -> None:
        """Removes everything added since the arrays had these sizes."""
        for x, size in zip(self._arrays, sizes, strict=True):
            del x[size:]

    def repeat(self, since: tuple[int, ...], times: int) -> None:
        """Adds ``times`` copies of everything added since the arrays had these sizes: one iteration with its memory."""
        tasks, values = len(self.seconds) - since[0], len(self.nbytes) - since[5]
        shifts = (0, 0, 0, 0, tasks, 0, tasks, values, tasks, tasks, 0, 0)
        for x, start, shift in zip(self._arrays, since, shifts, strict=True):
            one = np.frombuffer(x, np.dtype(x.typecode))[start:].copy()
            copies = np.tile(one, times)
            if shift:
                copies += np.repeat(np.arange(1, times + 1, dtype=np.int64) * shift, len(one))
            x.frombytes(copies.tobytes())

    def fold(self, last: int, size: int, more: int) -> None:
        """Lets the iteration of ``size`` tasks that ends with task ``last`` stand for ``more`` others (`Fold`)."""
        self.fold_last.append(last)
        self.fold_size.append(size)
        self.fold_more.append(more)

    def seconds_since(self, since: tuple[int, ...]) -> float:
        """The seconds of all tasks added since the arrays had these sizes, those that an iteration stands for included."""
        folds = zip(*(x[since[-1] :] for x in (self.fold_last, self.fold_size, self.fold_more)), strict=True)
        more = (n * math.fsum(self.seconds[last - size + 1 : last + 1]) for last, size, n in folds)
        return math.fsum(self.seconds[since[0] :]) + math.fsum(more)

    def unread(self, since: tuple[int, ...]) -> tuple[int, ...]:
        """The tasks added since the arrays had these sizes for which no other task waits."""
        read = np.frombuffer(self.waits_for, np.int64)[since[4] :] if len(self.waits_for) else np.zeros(0, np.int64)
        return tuple(np.setdiff1d(np.arange(since[0], len(self.seconds)), read).tolist())

    def finished(self, streams: tuple[Stream, ...], labels: tuple[Label, ...]) -> StepTasks:
        """The tasks added so far, on these streams."""
        seconds, stream, label, counts, waits_for, nbytes, birth, value, reader, *_ = (
            np.frombuffer(x, np.dtype(x.typecode)).copy() if len(x) else np.zeros(0, np.dtype(x.typecode)) for x in self._arrays
        )
        first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        priority = first_readers(stream, first, waits_for, {i for i, s in enumerate(streams) if s.kind == "compute"})
        graph = TaskGraph(streams, seconds, stream.astype(np.int32), first, waits_for, priority)
        folds = tuple(map(Fold, self.fold_last, self.fold_size, self.fold_more))
        return StepTasks(graph, labels, label.astype(np.int32), HeldValues(nbytes, birth, value, reader), folds)


def first_readers(
    stream: NDArray[np.int64], first: NDArray[np.int64], waits_for: NDArray[np.int64], computing: set[int]
) -> NDArray[np.int64]:
    """[n]: the priority of each task, lower first.

    A compute task has its place in the program. Any other task has the place of the first compute task that needs its result.
    """
    n = len(stream)
    computes = np.isin(stream, sorted(computing))
    place = np.where(computes, np.arange(n), n)
    reader = np.repeat(np.arange(n), np.diff(first))
    passes_on = ~computes[waits_for]
    source, reader = waits_for[passes_on], reader[passes_on]
    while True:
        earlier = place.copy()
        np.minimum.at(earlier, source, place[reader])
        if np.array_equal(earlier, place):
            return place
        place = earlier
