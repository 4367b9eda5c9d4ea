"""FD-DPS as its paper has it: schedule the most urgent task, find its slot, generate the critical path anew.

Source: the paper's section 4, formulas 6 to 12, Algorithm 1 (Sort_Node) and Algorithm 2 (Find_Slot). Where the paper leaves
things open, this file reads it so:

- Formulas 6 and 7 ask for devices that unscheduled tasks do not have. Their seconds are means over devices, and the seconds of
  their transfers are too. A scheduled task has its device's seconds, and the task before it on its device is one of its parents.
- A slot at the end of a device has no later neighbour; it fits iff the task starts no later than its LST there, which is the
  limit that formula 10 sets. So a slot fits iff the critical path grows no longer.
- Among several devices that one rule allows, the one with the earliest start wins, then the smaller id.
- The memory filter admits devices with room for the task. The communication filter drops devices that the inputs reach only when
  another device could have finished the task.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardplan.constants import CONSTANTS

from .graph import Dag, between, mean_ranks, mean_s, mean_time_s
from .memory import Room
from .schedules import Orders, arrival_s


def fd_dps(dag: Dag, room: Room) -> Orders:
    """The orders of FD-DPS. Raises `memory.StuckError` where no device has room for a task."""
    orders, means = Orders(dag), means_of(dag)
    left = [len(parents) for parents in dag.parents]
    ready = [i for i in dag.order if not left[i]]
    while ready:
        path = dynamic_path(orders, means)
        task = sort_node(ready, path)
        device, position = find_slot(task, orders, path, room)
        orders.insert(task, device, position)
        room.take(task, device)
        ready.remove(task)
        for j, _ in dag.children[task]:
            left[j] -= 1
            if not left[j]:
                ready.append(j)
    return orders


@dataclass(frozen=True, slots=True)
class Means:
    """The values that formulas 6 and 7 take for a task without a device."""

    seconds: list[float]  # [tasks]
    ranks: list[float]  # [tasks], seconds from a task's start to the end of the graph
    parents: list[list[tuple[int, float]]]  # [tasks], parents with seconds of transfers
    children: list[list[tuple[int, float]]]  # [tasks], likewise


def means_of(dag: Dag) -> Means:
    """The means over all devices, and over all pairs of different devices."""
    several = dag.devices > 1  # nothing travels on one device
    parents = [[(i, mean_s(t) if several else 0.0) for i, t in row] for row in dag.parents]
    children = [[(j, mean_s(t) if several else 0.0) for j, t in row] for row in dag.children]
    return Means([mean_time_s(dag, i) for i in range(dag.tasks)], mean_ranks(dag), parents, children)


@dataclass(frozen=True, slots=True)
class DynamicPath:
    """EST and LST of all tasks, with the devices that tasks have so far; ``length_s`` is the DCPL of formula 10."""

    est_s: list[float]  # [tasks]
    lst_s: list[float]  # [tasks]
    length_s: float
    ancestors: list[int]  # [tasks], bits of scheduled tasks

    def slack_s(self, task: int) -> float:
        """LST - EST; zero for critical tasks. Formula 9's priority falls with it, so that its lambda is not needed."""
        return self.lst_s[task] - self.est_s[task]

    def is_critical(self, task: int) -> bool:
        """Formula 8."""
        return self.slack_s(task) <= CONSTANTS.rounding * self.length_s


def dynamic_path(orders: Orders, means: Means) -> DynamicPath:
    """Formulas 6, 7 and 10 for the devices that tasks have so far."""
    walk = orders.walk()
    est = orders.starts(walk)
    length = _unscheduled_est_s(orders, means, est)
    length = max(length, max((est[i] + orders.dag.times_s[i][orders.device[i]] for i in walk), default=0.0))
    lst = [length - rank for rank in means.ranks]
    _scheduled_lst_s(orders, means, walk, length, lst)
    return DynamicPath(est, lst, length, orders.ancestors(walk))


def _unscheduled_est_s(orders: Orders, means: Means, est_s: list[float]) -> float:
    """Formula 6: writes the EST of tasks without devices; returns the latest of their ends."""
    dag, device, last = orders.dag, orders.device, 0.0
    for j in dag.order:
        if device[j] >= 0:
            continue
        at = min(dag.ready_s[j])
        for i, travel in means.parents[j]:
            arrival = est_s[i] + travel + (dag.times_s[i][device[i]] if device[i] >= 0 else means.seconds[i])
            if arrival > at:
                at = arrival
        est_s[j] = at
        last = max(last, at + means.seconds[j])
    return last


def _scheduled_lst_s(orders: Orders, means: Means, walk: list[int], length_s: float, lst_s: list[float]) -> None:
    """Formula 7: writes the LST of tasks with devices; ``lst_s`` holds the LST of the others."""
    dag, device = orders.dag, orders.device
    _, after = orders.neighbours()
    for i in reversed(walk):
        d = device[i]
        limit = lst_s[after[i]] if after[i] >= 0 else length_s
        for (j, transfer), (_, mean) in zip(dag.children[i], means.children[i], strict=True):
            a = device[j]
            latest = lst_s[j] - (mean if a < 0 else between(transfer, d, a))
            if latest < limit:
                limit = latest
        lst_s[i] = limit - dag.times_s[i][d]


def sort_node(ready: list[int], path: DynamicPath) -> int:
    """Algorithm 1: critical tasks first, then the highest priority; among equals the smaller EST, then the smaller id."""
    return min(ready, key=lambda i: (max(path.slack_s(i), CONSTANTS.rounding * path.length_s), path.est_s[i], i))


@dataclass(frozen=True, slots=True, order=True)
class _Slot:
    start_s: float
    device: int
    position: int


def find_slot(task: int, orders: Orders, path: DynamicPath, room: Room) -> tuple[int, int]:
    """Algorithm 2: a device and a position on it, by the first of the paper's four rules that finds one."""
    dag = orders.dag
    finish = [s + dag.times_s[i][orders.device[i]] for i, s in enumerate(path.est_s)]
    arrival = arrival_s(dag, orders.device, finish, task)
    allowed = _reachable(dag, task, room.devices(task), arrival)
    found = [slot for d in allowed if (slot := _fitting(task, d, arrival[d], orders, path, finish))]
    slot = (
        _beside_parent(task, found, orders)
        or _for_child(task, found, dag, path, room)
        or min(found, default=None)
        or _lowest_priority(task, allowed, arrival, orders, path, finish)
    )
    return slot.device, slot.position


def _reachable(dag: Dag, task: int, devices: list[int], arrival_s: list[float]) -> list[int]:
    """The communication filter: devices that the inputs reach before another device could have finished the task."""
    soonest = min(arrival_s[d] + dag.times_s[task][d] for d in devices)
    return [d for d in devices if arrival_s[d] <= soonest]


def _fitting(task: int, device: int, arrival_s: float, orders: Orders, path: DynamicPath, finish_s: list[float]) -> _Slot | None:
    """Formula 11: the first slot of a device that holds the task, where later tasks move back to their LST at most."""
    row, seconds = orders.sequences[device], orders.dag.times_s[task][device]
    spare = CONSTANTS.rounding * path.length_s
    first = _after_ancestors(task, row, orders, path)
    for k in range(first, len(row) + 1):
        start = max(arrival_s, finish_s[row[k - 1]]) if k else arrival_s
        # without a later neighbour, the task's own latest end
        limit = path.lst_s[row[k]] if k < len(row) else path.lst_s[task] + mean_time_s(orders.dag, task)
        if start + seconds <= limit + spare:
            return _Slot(start, device, k)
    return None


def _after_ancestors(task: int, row: list[int], orders: Orders, path: DynamicPath) -> int:
    """The first position in ``row`` behind every task that must end before ``task`` starts."""
    bits = 0
    for p, _ in orders.dag.parents[task]:
        bits |= path.ancestors[p] | 1 << p
    return next((k + 1 for k in reversed(range(len(row))) if bits >> row[k] & 1), 0)


def _beside_parent(task: int, found: list[_Slot], orders: Orders) -> _Slot | None:
    """Rule 1: a parent's device; its edge costs nothing then."""
    homes = {orders.device[p] for p, _ in orders.dag.parents[task]}
    return min((slot for slot in found if slot.device in homes), default=None)


def _for_child(task: int, found: list[_Slot], dag: Dag, path: DynamicPath, room: Room) -> _Slot | None:
    """Rule 2, formula 12: the device that is fastest for the task and its most urgent child together."""
    child = min((j for j, _ in dag.children[task]), key=lambda j: (path.slack_s(j), j), default=None)
    if child is None:
        return None
    both = [slot for slot in found if room.has(slot.device, task, child)]
    return min(both, key=lambda s: (dag.times_s[task][s.device] + dag.times_s[child][s.device], s), default=None)


def _lowest_priority(
    task: int, allowed: list[int], arrival_s: list[float], orders: Orders, path: DynamicPath, finish_s: list[float]
) -> _Slot:
    """Rule 4: the device whose least urgent task is least urgent (an idle one before all), behind its last task."""
    most = {d: max((path.slack_s(i) for i in orders.sequences[d]), default=float("inf")) for d in allowed}
    device = min(allowed, key=lambda d: (-most[d], arrival_s[d], d))
    row = orders.sequences[device]
    return _Slot(max(arrival_s[device], finish_s[row[-1]] if row else 0.0), device, len(row))
