"""A schedule as a value, and the earliest starts of tasks in given orders on their devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .graph import Dag, between


@dataclass(frozen=True, slots=True)
class TaskSchedule:
    """Where and when each task runs, without interruption. ``makespan_s`` is when the last one ends, counted from 0."""

    device: tuple[int, ...]  # [tasks]
    start_s: tuple[float, ...]  # [tasks]
    finish_s: tuple[float, ...]  # [tasks]

    @property
    def makespan_s(self) -> float:
        """When the last task ends; 0 without tasks."""
        return max(self.finish_s, default=0.0)

    def on(self, device: int) -> tuple[int, ...]:
        """The tasks of a device in the order in which they run."""
        own = [i for i, d in enumerate(self.device) if d == device]
        return tuple(sorted(own, key=lambda i: (self.start_s[i], self.finish_s[i], i)))


class Orders:
    """The order of tasks on each device while a schedule is made. Tasks without a device have device -1."""

    __slots__ = ("dag", "device", "sequences")

    def __init__(self, dag: Dag) -> None:
        self.dag = dag
        self.device = [-1] * dag.tasks
        self.sequences: list[list[int]] = [[] for _ in range(dag.devices)]

    def insert(self, task: int, device: int, position: int) -> None:
        """Gives a task its device and its place among the device's tasks."""
        self.device[task] = device
        self.sequences[device].insert(position, task)

    def remove(self, task: int) -> tuple[int, int]:
        """Takes a task away; returns its device and position."""
        device = self.device[task]
        position = self.sequences[device].index(task)
        del self.sequences[device][position]
        self.device[task] = -1
        return device, position

    def neighbours(self) -> tuple[list[int], list[int]]:
        """[tasks] each: the task before a task on its device, and the one after it; -1 for none."""
        before, after = [-1] * self.dag.tasks, [-1] * self.dag.tasks
        for row in self.sequences:
            for i, j in pairwise(row):
                before[j], after[i] = i, j
        return before, after

    def walk(self) -> list[int]:
        """The placed tasks in an order that follows edges and devices. A circle of both is a bug of the caller."""
        before, after = self.neighbours()
        device, dag = self.device, self.dag
        left = [sum(device[p] >= 0 for p, _ in dag.parents[i]) + (before[i] >= 0) for i in range(dag.tasks)]
        found = [i for i in dag.order if device[i] >= 0 and not left[i]]
        for i in found:  # grows meanwhile
            following = [j for j, _ in dag.children[i] if device[j] >= 0]
            if after[i] >= 0:
                following.append(after[i])
            for j in following:
                left[j] -= 1
                if not left[j]:
                    found.append(j)
        assert len(found) == sum(map(len, self.sequences)), "the orders on the devices contradict the edges"
        return found

    def starts(self, walk: Sequence[int]) -> list[float]:
        """[tasks]: the earliest start of each placed task, formula 6; ``walk`` as from `walk`."""
        start = [0.0] * self.dag.tasks
        self.restart(walk, self.neighbours()[0], start)
        return start

    def restart(self, walk: Sequence[int], before: Sequence[int], start_s: list[float]) -> None:
        """Writes the starts of the tasks of ``walk`` alone; ``start_s`` holds those of the others."""
        times, device, parents, ready = self.dag.times_s, self.device, self.dag.parents, self.dag.ready_s
        for i in walk:
            d, m = device[i], before[i]
            at = ready[i][d]
            if m >= 0:
                at = max(at, start_s[m] + times[m][d])
            for p, transfer in parents[i]:
                a = device[p]
                if a >= 0:
                    arrival = start_s[p] + times[p][a]
                    if a != d:
                        arrival += transfer[a][d] if isinstance(transfer, tuple) else transfer
                    if arrival > at:
                        at = arrival
            start_s[i] = at

    def tails(self, walk: Sequence[int]) -> list[float]:
        """[tasks]: seconds from the end of each placed task to the end of what follows it among placed tasks, formula 7."""
        tails = [0.0] * self.dag.tasks
        self.retail(walk, self.neighbours()[1], tails)
        return tails

    def retail(self, walk: Sequence[int], after: Sequence[int], tails_s: list[float]) -> None:
        """Writes the tails of the tasks of ``walk`` alone; ``tails_s`` holds those of the others."""
        times, device, children = self.dag.times_s, self.device, self.dag.children
        for i in reversed(walk):
            d, s = device[i], after[i]
            tail = times[s][d] + tails_s[s] if s >= 0 else 0.0
            for j, transfer in children[i]:
                a = device[j]
                if a >= 0:
                    path = times[j][a] + tails_s[j]
                    if a != d:
                        path += transfer[d][a] if isinstance(transfer, tuple) else transfer
                    if path > tail:
                        tail = path
            tails_s[i] = tail

    def ancestors(self, walk: Sequence[int]) -> list[int]:
        """[tasks]: the placed tasks that must end before each placed task may start, as the bits of an integer."""
        before, _ = self.neighbours()
        found = [0] * self.dag.tasks
        for i in walk:
            bits = found[before[i]] | 1 << before[i] if before[i] >= 0 else 0
            for p, _ in self.dag.parents[i]:
                if self.device[p] >= 0:
                    bits |= found[p] | 1 << p
            found[i] = bits
        return found

    def schedule(self) -> TaskSchedule:
        """The schedule with every task as early as these orders allow; all tasks have devices."""
        start = self.starts(self.walk())
        times = self.dag.times_s
        return TaskSchedule(tuple(self.device), tuple(start), tuple(s + times[i][self.device[i]] for i, s in enumerate(start)))


def arrival_s(dag: Dag, device: Sequence[int], finish_s: Sequence[float] | Mapping[int, float], task: int) -> list[float]:
    """[devices]: when a task may start on each device, as far as ``ready_s`` and its placed parents are concerned."""
    ready = list(dag.ready_s[task])
    for p, transfer in dag.parents[task]:
        a, sent = device[p], finish_s[p]
        if a < 0:
            continue
        for d, at in enumerate(ready):
            arrival = sent + between(transfer, a, d)
            if arrival > at:
                ready[d] = arrival
    return ready
