"""Shortens the dynamic critical path of a whole schedule: critical tasks are taken out and placed anew, one at a time."""

from __future__ import annotations

from dataclasses import dataclass

from shardplan.constants import CONSTANTS

from .graph import Dag, between
from .memory import Room
from .schedules import Orders, arrival_s


def shorten(orders: Orders, room: Room, *, trials_per_task: float = CONSTANTS.trials_per_task) -> float:
    """Improves ``orders`` in place until no critical task has a better slot; returns the makespan in seconds.

    With EST and LST of the schedule without a task, formula 11 gives the exact length of the longest path through the task in
    each slot of each device. The task takes the slot with the shortest; a slot that leaves the makespan as it is counts as
    better if the task is no longer critical.
    """
    trials = trials_per_task * orders.dag.tasks
    path = _path(orders)
    while trials > 0:
        for task in path.critical:
            slot_s = _bound_s(task, orders, path, room)
            if slot_s < path.limit_s:
                trials -= 1
                if _replaced(task, orders, path, room) or trials <= 0:
                    break
        else:
            break
        path = _path(orders)
    return path.makespan_s


@dataclass(frozen=True, slots=True)
class _Path:
    """A whole schedule: when tasks run, the time that follows them, and the tasks on longest paths."""

    walk: list[int]
    position: dict[int, int]  # of a task in walk
    before: list[int]  # [tasks]
    after: list[int]  # [tasks]
    start_s: list[float]  # [tasks]
    tails_s: list[float]  # [tasks]
    ancestors: list[int]  # [tasks]
    critical: list[int]
    makespan_s: float

    @property
    def limit_s(self) -> float:
        """The length below which a path is no longer critical."""
        return self.makespan_s * (1 - CONSTANTS.rounding)


def _path(orders: Orders) -> _Path:
    walk = orders.walk()
    before, after = orders.neighbours()
    start, tails = orders.starts(walk), orders.tails(walk)
    times, device = orders.dag.times_s, orders.device
    through = [start[i] + times[i][device[i]] + tails[i] for i in walk]
    makespan = max(through, default=0.0)
    critical = [i for i, t in zip(walk, through, strict=True) if t >= makespan * (1 - CONSTANTS.rounding)]
    return _Path(
        walk, {i: k for k, i in enumerate(walk)}, before, after, start, tails, orders.ancestors(walk), critical, makespan
    )


def _bound_s(task: int, orders: Orders, path: _Path, room: Room) -> float:
    """The least length of a path through the task on any device, were there no other tasks than its parents and children."""
    dag, home = orders.dag, orders.device[task]
    arrival, departure = _arrival_s(task, orders, path.start_s), _departure_s(dag, orders.device, path.tails_s, task)
    seconds = dag.times_s[task]
    return min(
        (arrival[d] + seconds[d] + departure[d] for d in range(dag.devices) if d == home or room.has(d, task)),
        default=float("inf"),
    )


def _replaced(task: int, orders: Orders, path: _Path, room: Room) -> bool:
    """Whether a task found a better slot, and has it now."""
    device, position = orders.remove(task)
    room.release(task, device)
    slot = _best_slot(task, orders, path, room)
    better = slot.through_s < path.limit_s
    if better:
        device, position = slot.device, slot.position
    orders.insert(task, device, position)
    room.take(task, device)
    return better


@dataclass(frozen=True, slots=True, order=True)
class _Slot:
    through_s: float
    device: int
    position: int


def _best_slot(task: int, orders: Orders, path: _Path, room: Room) -> _Slot:
    """The slot with the shortest longest path through a task that was taken out."""
    dag, times = orders.dag, orders.dag.times_s
    start, tails = _without(task, orders, path)
    arrival, departure = _arrival_s(task, orders, start), _departure_s(dag, orders.device, tails, task)
    earlier, later = _relatives(task, dag, path)
    best_s, best = float("inf"), (-1, -1)
    for d in room.devices(task):
        row, at, rest = orders.sequences[d], arrival[d], departure[d]
        if at + times[task][d] + rest >= best_s:
            continue
        first, last = _free(row, earlier, later, path.ancestors)
        for k in room.positions(task, row, first, last):
            through = times[task][d]
            through += max(at, start[row[k - 1]] + times[row[k - 1]][d]) if k else at
            through += max(rest, times[row[k]][d] + tails[row[k]]) if k < len(row) else rest
            if through < best_s:
                best_s, best = through, (d, k)
    return _Slot(best_s, *best)


def _without(task: int, orders: Orders, path: _Path) -> tuple[list[float], list[float]]:
    """Starts and tails without a task: starts change behind it only, tails before it only."""
    k, m, s = path.position[task], path.before[task], path.after[task]
    before, after = path.before.copy(), path.after.copy()
    if m >= 0:
        after[m] = s
    if s >= 0:
        before[s] = m
    start, tails = path.start_s.copy(), path.tails_s.copy()
    orders.restart(path.walk[k + 1 :], before, start)
    orders.retail(path.walk[:k], after, tails)
    return start, tails


def _relatives(task: int, dag: Dag, path: _Path) -> tuple[int, int]:
    """The tasks that must end before it, and its children, as bits. Ancestors of others do not change when it is taken out."""
    earlier = 0
    for p, _ in dag.parents[task]:
        earlier |= path.ancestors[p] | 1 << p
    return earlier, sum(1 << j for j, _ in dag.children[task])


def _free(row: list[int], earlier: int, later: int, ancestors: list[int]) -> tuple[int, int]:
    """The first and last position in ``row`` that close no circle: behind all ancestors, before all descendants."""
    first, last = 0, len(row)
    for k, i in enumerate(row):
        if earlier >> i & 1:
            first = k + 1
        elif (ancestors[i] | 1 << i) & later:
            return first, k
    return first, last


def _arrival_s(task: int, orders: Orders, start_s: list[float]) -> list[float]:
    """[devices]: when the inputs of a task are on each device."""
    dag, device = orders.dag, orders.device
    finish = {p: start_s[p] + dag.times_s[p][device[p]] for p, _ in dag.parents[task]}
    return arrival_s(dag, device, finish, task)


def _departure_s(dag: Dag, device: list[int], tails_s: list[float], task: int) -> list[float]:
    """[devices]: seconds from the task's end on each device to the end of the graph by way of its children."""
    longest = [0.0] * dag.devices
    for j, transfer in dag.children[task]:
        b = device[j]
        rest = dag.times_s[j][b] + tails_s[j]
        for d, seconds in enumerate(longest):
            path = rest + between(transfer, d, b)
            if path > seconds:
                longest[d] = path
    return longest
