"""The order in which the tasks of a placed step and the transfers between groups are issued, and when each of them runs.

Tasks wait for what they read and for the devices of their group. Of those that can start first, the one with the longest way to
the end of the step goes first (FD-DPS, section 4: the latest start times of the dynamic critical path).

A stage holds the saved values of a microbatch from its forward pass to the last of its backward pass. Where it takes no time, a
stage begins no more microbatches than are needed to keep all stages busy: as many as stages follow it, itself included (1F1B:
Narayanan et al. 2021, section 2.2). Without that limit, all forward passes come first (GPipe).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardplan.placement.device_topology import Machine
from shardplan.regions.tasks import WHOLE, Key, Task, TaskGraph, Transfer


@dataclass(frozen=True, slots=True)
class Issue:
    """A task or a transfer, with predicted seconds from the start of the step. ``last``: the values, by group, that nothing reads
    after it.
    """

    what: Task | Transfer
    start_s: float
    end_s: float
    last: tuple[tuple[int, Key], ...] = ()


@dataclass(frozen=True, slots=True)
class Dispatch:
    """What is issued, in order."""

    issues: tuple[Issue, ...]

    @property
    def step_time_s(self) -> float:
        """When the last task or transfer ends."""
        return max((i.end_s for i in self.issues), default=0.0)

    def busy_s(self, graph: TaskGraph, group: int) -> float:
        """How long the devices of a group compute."""
        own = (i for i in self.issues if isinstance(i.what, Task) and graph.pieces[i.what.piece].group == group)
        return sum(i.end_s - i.start_s for i in own)


class _Waiting(NamedTuple):
    """A task or transfer with what it waits for, by number."""

    what: Task | Transfer
    seconds: float
    before: tuple[int, ...]
    devices: tuple[int, ...]


def dispatched(graph: TaskGraph, machine: Machine) -> Dispatch:
    """The issues of a step on a machine."""
    free = _dispatched(graph, machine, 0)
    for slack in range(1, 1 + max((t.microbatch for t in graph.tasks), default=0)):
        limited = _dispatched(graph, machine, slack)
        if limited.step_time_s <= free.step_time_s * (1 + ROUNDING):
            return limited
    return free


ROUNDING = 1e-9
"""Sums of the same seconds in another order differ by less."""


def _dispatched(graph: TaskGraph, machine: Machine, slack: int) -> Dispatch:
    """The issues where a stage begins ``slack`` times as many microbatches as stages follow it (0: as many as there are)."""
    waiting = _waiting(graph, machine)
    if slack:
        waiting = _limited(graph, waiting, slack)
    return Dispatch(with_last(graph, [Issue(w.what, start, start + w.seconds) for w, start in _started(waiting)]))


def _limited(graph: TaskGraph, waiting: Sequence[_Waiting], slack: int) -> list[_Waiting]:
    """The same tasks, where the first of a microbatch in a group waits for the last of an earlier one."""
    runs: dict[int, dict[int, list[int]]] = {}  # by group and microbatch, the tasks in the order of the pieces
    for n, task in enumerate(graph.tasks):
        piece = graph.pieces[task.piece]
        if task.microbatch != WHOLE and not isinstance(piece.own, str):
            runs.setdefault(piece.group, {}).setdefault(task.microbatch, []).append(n)
    found = list(waiting)
    for place, (_, own) in enumerate(sorted(runs.items())):
        most = slack * (len(runs) - place)
        for k, tasks in own.items():
            if k - most in own:
                first = tasks[0]
                found[first] = found[first]._replace(before=(*found[first].before, own[k - most][-1]))
    return found


def most_held(graph: TaskGraph, dispatch: Dispatch, group: int) -> int:
    """The most bytes that a device of a group holds of values that enter or leave its programs."""
    held = {key: _local_bytes(graph, group, key[0]) for g, key in graph.inputs if g == group}
    most = sum(held.values())
    for issue in dispatch.issues:
        match issue.what:
            case Task() as task if graph.pieces[task.piece].group == group:
                held.update((key, _local_bytes(graph, group, key[0])) for key in task.makes)
            case Transfer(key, _, target, _) if target == group:
                held[key] = _local_bytes(graph, group, key[0])
            case _:
                pass
        most = max(most, sum(held.values()))
        for g, key in issue.last:
            if g == group:
                held.pop(key, None)
    return most


def _local_bytes(graph: TaskGraph, group: int, tensor: int) -> int:
    """The bytes of a tensor on one device of a group."""
    own = graph.groups[group]
    layout = own.layouts.get(tensor)
    ways = 1 if layout is None else math.prod(own.factors[f].size for f in layout.used)
    return graph.tensors[tensor].nbytes // ways


def transfer_s(graph: TaskGraph, transfer: Transfer, machine: Machine) -> float:
    """Seconds of a transfer: the devices of the smaller group move their shares at once, over the first pair's connection."""
    source, target = graph.groups[transfer.source].devices, graph.groups[transfer.target].devices
    a, b = next(((a, b) for a in source for b in target if a != b), (source[0], target[0]))
    if a == b:
        return 0.0
    nbytes = graph.tensors[transfer.key[0]].nbytes
    return float(machine.latency_s[a, b] + nbytes / min(len(source), len(target)) / machine.bytes_per_s[a, b])


def _waiting(graph: TaskGraph, machine: Machine) -> list[_Waiting]:
    made: dict[tuple[int, Key], int] = {}
    for n, task in enumerate(graph.tasks):
        made.update(dict.fromkeys(((graph.pieces[task.piece].group, key) for key in task.makes), n))
    for n, transfer in enumerate(graph.transfers, len(graph.tasks)):
        made.setdefault((transfer.target, transfer.key), n)
    found: list[_Waiting] = []
    for task in graph.tasks:
        piece = graph.pieces[task.piece]
        before = {made[piece.group, key] for key in task.reads if (piece.group, key) in made}
        found.append(_Waiting(task, piece.seconds, tuple(sorted(before)), graph.groups[piece.group].devices))
    for transfer in graph.transfers:
        at = transfer.source, transfer.key
        found.append(_Waiting(transfer, transfer_s(graph, transfer, machine), (made[at],) if at in made else (), ()))
    return found


def _started(tasks: Sequence[_Waiting]) -> list[tuple[_Waiting, float]]:
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
    found: list[tuple[_Waiting, float]] = []
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
    assert len(found) == len(tasks), "what waits for itself never runs"
    return found


def _tails(tasks: Sequence[_Waiting], after: Sequence[Sequence[int]]) -> list[float]:
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


def with_last(graph: TaskGraph, issues: Sequence[Issue]) -> tuple[Issue, ...]:
    """The issues, each with the values that nothing reads after it."""
    seen = {r for r in graph.results if r is not None}
    found: list[Issue] = []
    for issue in reversed(issues):
        match issue.what:
            case Task() as task:
                group = graph.pieces[task.piece].group
                used = [(group, key) for key in (*task.reads, *task.makes)]
            case Transfer() as transfer:
                used = [(transfer.source, transfer.key)]
        last = tuple(dict.fromkeys(u for u in used if u not in seen))
        seen.update(last)
        found.append(replace(issue, last=last))
    return tuple(found[::-1])
