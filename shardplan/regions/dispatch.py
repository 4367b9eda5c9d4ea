"""The order in which the segments of a placed step and the transfers between groups are issued, and when each of them runs.

Segments wait for what they read and for the devices of their group. Of those that can start first, the one with the longest
way to the end of the step goes first (FD-DPS, section 4: the latest start times of the dynamic critical path).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardplan.placement.device_topology import Machine
from shardplan.regions.group_programs import Split, Transfer


@dataclass(frozen=True, slots=True)
class Run:
    """A segment runs on its group. ``last``: the (group, tensor) pairs that nothing reads after it."""

    segment: int
    start_s: float
    end_s: float
    last: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Send:
    """A transfer. ``last`` as for `Run`."""

    transfer: Transfer
    start_s: float
    end_s: float
    last: tuple[tuple[int, int], ...] = ()


Issue = Run | Send


@dataclass(frozen=True, slots=True)
class Dispatch:
    """What is issued, in order, with predicted seconds from the start of the step."""

    issues: tuple[Issue, ...]

    @property
    def step_time_s(self) -> float:
        """When the last segment or transfer ends."""
        return max((i.end_s for i in self.issues), default=0.0)

    def busy_s(self, split: Split, group: int) -> float:
        """How long the devices of a group compute."""
        own = (i for i in self.issues if isinstance(i, Run) and split.segments[i.segment].group == group)
        return sum(i.end_s - i.start_s for i in own)


class _Task(NamedTuple):
    """A segment or transfer by its number, with what it waits for."""

    what: int | Transfer
    seconds: float
    before: tuple[int, ...]
    devices: tuple[int, ...]


def dispatched(split: Split, seconds: Sequence[float], machine: Machine) -> Dispatch:
    """The issues of a step; ``seconds`` [segments] are those of each segment."""
    tasks = _tasks(split, seconds, machine)
    issues = [
        Run(t.what, start, start + t.seconds) if isinstance(t.what, int) else Send(t.what, start, start + t.seconds)
        for t, start in _started(tasks)
    ]
    return Dispatch(_with_last(split, issues))


def transfer_s(split: Split, transfer: Transfer, machine: Machine) -> float:
    """Seconds of a transfer: the devices of the smaller group move their shares at once, over the first pair's connection."""
    groups = split.assignment.groups
    source, target = groups[transfer.source], groups[transfer.target]
    a, b = next(((a, b) for a in source for b in target if a != b), (source[0], target[0]))
    if a == b:
        return 0.0
    nbytes = split.assignment.program.tensors[transfer.tensor].nbytes
    return float(machine.latency_s[a, b] + nbytes / min(len(source), len(target)) / machine.bytes_per_s[a, b])


def _tasks(split: Split, seconds: Sequence[float], machine: Machine) -> list[_Task]:
    groups, at = split.assignment.groups, split.assignment.at
    maker = {t: n for n, boundary in enumerate(split.boundaries) for t in boundary.makes}
    transfers = split.transfers
    arrival = {(t.target, t.tensor): len(split.segments) + n for n, t in enumerate(transfers)}
    tasks: list[_Task] = []
    for n, (segment, boundary) in enumerate(zip(split.segments, split.boundaries, strict=True)):
        before = {arrival[segment.group, t] for t in boundary.reads if at[t] != segment.group}
        before |= {maker[t] for t in boundary.reads if at[t] == segment.group and t in maker}
        tasks.append(_Task(n, seconds[n], tuple(sorted(before)), groups[segment.group]))
    for transfer in transfers:
        before = (maker[transfer.tensor],) if transfer.tensor in maker else ()
        tasks.append(_Task(transfer, transfer_s(split, transfer, machine), before, ()))
    return tasks


def _started(tasks: Sequence[_Task]) -> list[tuple[_Task, float]]:
    """The tasks in the order in which they are issued, with their starts."""
    after: list[list[int]] = [[] for _ in tasks]
    for n, task in enumerate(tasks):
        for m in task.before:
            after[m].append(n)
    tails = _tails(tasks, after)
    waiting = [len(t.before) for t in tasks]
    ready_s = [0.0] * len(tasks)  # when the last of what it waits for has ended
    ready = {n for n, count in enumerate(waiting) if not count}
    free_s: dict[int, float] = {}
    found: list[tuple[_Task, float]] = []
    while ready:
        starts = {n: max([ready_s[n], *(free_s.get(d, 0.0) for d in tasks[n].devices)]) for n in ready}
        n = min(starts, key=lambda n: (starts[n], -tails[n], n))
        end = starts[n] + tasks[n].seconds
        found.append((tasks[n], starts[n]))
        ready.remove(n)
        free_s.update(dict.fromkeys(tasks[n].devices, end))
        for m in after[n]:
            waiting[m] -= 1
            ready_s[m] = max(ready_s[m], end)
            if not waiting[m]:
                ready.add(m)
    return found


def _tails(tasks: Sequence[_Task], after: Sequence[Sequence[int]]) -> list[float]:
    """[tasks]: the seconds from the start of a task to the end of the step, on the longest way."""
    waiting = [len(own) for own in after]
    tails = [t.seconds for t in tasks]
    ends = [n for n, count in enumerate(waiting) if not count]
    while ends:
        n = ends.pop()
        for m in tasks[n].before:
            tails[m] = max(tails[m], tasks[m].seconds + tails[n])
            waiting[m] -= 1
            if not waiting[m]:
                ends.append(m)
    return tails


def _with_last(split: Split, issues: Sequence[Issue]) -> tuple[Issue, ...]:
    """The issues, each with the values that nothing reads after it."""
    seen = {r for r in split.results if r is not None}
    found: list[Issue] = []
    for issue in reversed(issues):
        if isinstance(issue, Run):
            group = split.segments[issue.segment].group
            boundary = split.boundaries[issue.segment]
            used = [(group, t) for t in (*boundary.reads, *boundary.makes)]
        else:
            used = [(issue.transfer.source, issue.transfer.tensor)]
        last = tuple(dict.fromkeys(u for u in used if u not in seen))
        seen.update(last)
        found.append(replace(issue, last=last))
    return tuple(found[::-1])
