"""A schedule that is under way, made anew from a moment on: devices slow down, leave or join.

Tasks that have run stay where and when they ran. A task that runs at that moment on a device that stays goes on there; its
remaining part takes as long as the device's new speed says. A task that runs on a device that leaves is lost, and starts anew
elsewhere. Everything else is scheduled as if new, not before that moment.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from numbers import Real

import numpy as np
from numpy.typing import ArrayLike

from shardplan.errors import ScheduleError

from .graph import Dag, Transfer, between
from .memory import SLACK
from .methods import Method, planned
from .schedules import TaskSchedule
from .validation import checked


def reschedule(
    schedule: TaskSchedule,
    dag: Dag,
    at_s: float,
    *,
    times: ArrayLike | None = None,
    edges: Mapping[tuple[int, int], ArrayLike] | None = None,
    memory: ArrayLike | None = None,
    leaves: Collection[int] = (),
    method: Method = "fd-dps",
) -> TaskSchedule:
    """The schedule from ``at_s`` on.

    ``times`` [tasks][devices] are the seconds of whole tasks from then on, if they change: further columns are devices that
    join. A device that leaves keeps its column and is named in ``leaves``. ``edges`` and ``memory`` replace those of ``dag``;
    matrices of seconds, and a memory for each device, must be given where devices join. Results on a device that leaves can
    still be read from it. A result that travels at ``at_s`` to the device where its reader was, and stays, has left when it was
    ready; to any other device it leaves at ``at_s`` at the earliest. Raises `ScheduleError`.
    """
    if not (isinstance(at_s, Real) and math.isfinite(at_s) and at_s >= 0):
        raise ScheduleError(f"at_s is {at_s!r}: give the seconds since the schedule began")
    _refuse_foreign(schedule, dag)
    now = _changed(dag, times, edges, memory)
    gone = _leaving(leaves, dag.devices)
    stays = tuple(d for d in range(now.devices) if d not in gone)
    if not stays:
        raise ScheduleError(f"all {now.devices} devices leave: keep one, or add the columns of devices that join to times")
    past = _past(schedule, dag, now, float(at_s), gone)
    rest, tasks = _rest(now, schedule, past, float(at_s), stays)
    made = planned(rest, method)
    before = _as_before(rest, schedule, tasks, stays)
    shortest = made if before is None or made.makespan_s <= before.makespan_s else before
    return _joined(schedule, past, shortest, tasks, stays)


def _as_before(rest: Dag, schedule: TaskSchedule, tasks: Sequence[int], stays: Sequence[int]) -> TaskSchedule | None:
    """The tasks that are left, on their devices and in their order; None where a device leaves or has too little memory."""
    if not {schedule.device[i] for i in tasks} <= set(stays):
        return None
    device = [stays.index(schedule.device[i]) for i in tasks]
    held = [0.0] * len(stays)
    for k, d in enumerate(device):
        held[d] += rest.sizes[k]
    if any(h > has for h, has in zip(held, rest.memory, strict=True)):
        return None
    place = {k: n for n, k in enumerate(rest.order)}
    start, finish, free = [0.0] * rest.tasks, [0.0] * rest.tasks, [0.0] * len(stays)
    for k in sorted(range(rest.tasks), key=lambda k: (schedule.start_s[tasks[k]], place[k])):
        d = device[k]
        arrive = (finish[p] + between(transfer, device[p], d) for p, transfer in rest.parents[k])
        start[k] = max(free[d], rest.ready_s[k][d], *arrive)
        finish[k] = free[d] = start[k] + rest.times_s[k][d]
    return TaskSchedule(tuple(device), tuple(start), tuple(finish))


def _refuse_foreign(schedule: TaskSchedule, dag: Dag) -> None:
    """A schedule of other tasks, on other devices, or in another order, than ``dag`` has."""
    if not isinstance(schedule, TaskSchedule) or not isinstance(dag, Dag):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ScheduleError(
            f"reschedule takes a schedule and its DAG, not {type(schedule).__name__} and {type(dag).__name__}: make the DAG with "
            "shardplan.dag.checked and the schedule with planned"
        )
    if len(schedule.device) != dag.tasks or not set(schedule.device) <= set(range(dag.devices)):
        raise ScheduleError(
            f"schedule has {len(schedule.device)} tasks, on devices up to {max(schedule.device, default=-1)}, and dag has "
            f"{dag.tasks} tasks and {dag.devices} devices: give the DAG that was scheduled"
        )
    for i, parents in enumerate(dag.parents):
        for p, _ in parents:
            if schedule.start_s[i] < schedule.finish_s[p] * (1 - SLACK):
                raise ScheduleError(
                    f"in schedule, task {i} begins before task {p} ends, which it follows in dag: give the DAG of the schedule",
                    tasks=(p, i),
                )


def _leaving(leaves: Collection[int], devices: int) -> set[int]:
    """The devices that leave."""
    if not isinstance(leaves, Collection):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may have no types
        raise ScheduleError(f"leaves is {leaves!r}: give a list of devices")
    for d in leaves:
        if d not in range(devices):
            raise ScheduleError(f"device {d!r} cannot leave: the devices are 0 to {devices - 1}")
    return set(leaves)


def _changed(
    dag: Dag, times: ArrayLike | None, edges: Mapping[tuple[int, int], ArrayLike] | None, memory: ArrayLike | None
) -> Dag:
    """The DAG with the tables that change."""
    old = {(i, j): t for i, row in enumerate(dag.children) for j, t in row}
    if edges is not None and set(edges) != set(old):
        raise ScheduleError("edges must name the edges of the schedule: only their seconds may change")
    limited = any(map(math.isfinite, dag.memory))
    if memory is None and limited and times is not None and len(set(dag.memory)) == 1:
        memory = dag.memory[0]  # one number for all devices, those that join among them
    if times is not None:
        _refuse_other(dag, times)
    return checked(
        np.reshape(dag.times_s, (dag.tasks, dag.devices)) if times is None else times,
        old if edges is None else edges,
        memory=memory if memory is not None else dag.memory if limited else None,
        sizes=dag.sizes,
    )


def _refuse_other(dag: Dag, times: ArrayLike) -> None:
    """Times of other tasks, or of fewer devices, than the schedule has; other mistakes are for `checked`."""
    now = checked(times, {})
    if now.tasks != dag.tasks or now.devices < dag.devices:
        raise ScheduleError(
            f"times has {now.tasks} tasks and {now.devices} devices, and the schedule has {dag.tasks} and {dag.devices}: keep "
            "a row for each task and a column for each device, and name those that leave in leaves="
        )


def _past(schedule: TaskSchedule, dag: Dag, now: Dag, at_s: float, gone: set[int]) -> dict[int, float]:
    """The tasks that stay, each with its end."""
    past: dict[int, float] = {}
    for i in dag.order:
        d, start, end = schedule.device[i], schedule.start_s[i], schedule.finish_s[i]
        if end <= at_s and all(p in past for p, _ in dag.parents[i]):
            past[i] = end
        elif start < at_s < end and d not in gone:
            share = now.times_s[i][d] / dag.times_s[i][d] if dag.times_s[i][d] else 1.0
            past[i] = at_s + (end - at_s) * share
    return past


def _rest(
    now: Dag, schedule: TaskSchedule, past: Mapping[int, float], at_s: float, stays: Sequence[int]
) -> tuple[Dag, list[int]]:
    """The DAG of the tasks that do not stay, on the devices that do; and these tasks."""
    tasks = [i for i in range(now.tasks) if i not in past]
    number = {i: k for k, i in enumerate(tasks)}
    free = [max([at_s, *(end for i, end in past.items() if schedule.device[i] == d)]) for d in stays]
    held = [sum(now.sizes[i] for i in past if schedule.device[i] == d) for d in stays]
    left = tuple(now.memory[d] * (1 + SLACK) - h for d, h in zip(stays, held, strict=True))
    _refuse_full(now, tasks, stays, left)
    rest = Dag(
        times_s=tuple(tuple(now.times_s[i][d] for d in stays) for i in tasks),
        parents=tuple(tuple((number[p], _among(t, stays)) for p, t in now.parents[i] if p in number) for i in tasks),
        children=tuple(tuple((number[c], _among(t, stays)) for c, t in now.children[i]) for i in tasks),
        order=tuple(number[i] for i in now.order if i in number),
        sizes=tuple(now.sizes[i] for i in tasks),
        memory=left,
        ready_s=tuple(tuple(map(max, free, _inputs_s(now, schedule, past, at_s, i, stays))) for i in tasks),
    )
    return rest, tasks


def _inputs_s(
    now: Dag, schedule: TaskSchedule, past: Mapping[int, float], at_s: float, task: int, stays: Sequence[int]
) -> list[float]:
    """[stays]: when what has run has sent its results to a task on each device."""
    ready = [0.0] * len(stays)
    for p, transfer in now.parents[task]:
        if p in past:
            for k, d in enumerate(stays):
                leaves_s = past[p] if d in (schedule.device[p], schedule.device[task]) else max(past[p], at_s)
                ready[k] = max(ready[k], leaves_s + between(transfer, schedule.device[p], d))
    return ready


def _among(transfer: Transfer, devices: Sequence[int]) -> Transfer:
    """A transfer between some of the devices."""
    return tuple(tuple(transfer[d][e] for e in devices) for d in devices) if isinstance(transfer, tuple) else transfer


def _refuse_full(now: Dag, tasks: Sequence[int], stays: Sequence[int], left: Sequence[float]) -> None:
    large = max(tasks, key=lambda i: (now.sizes[i], -i), default=None)
    if large is not None and now.sizes[large] > max(left):
        k = int(np.argmax(left))
        raise ScheduleError(
            f"task {large} holds {now.sizes[large]:g} and fits on no device that stays: beside what has run, device "
            f"{stays[k]} has {max(left[k], 0.0):g}: give a device more memory or add one",
            tasks=(large,),
        )


def _joined(
    schedule: TaskSchedule, past: Mapping[int, float], rest: TaskSchedule, tasks: Sequence[int], stays: Sequence[int]
) -> TaskSchedule:
    device, start, finish = list(schedule.device), list(schedule.start_s), list(schedule.finish_s)
    for i, end in past.items():
        finish[i] = end
    for k, i in enumerate(tasks):
        device[i], start[i], finish[i] = stays[rest.device[k]], rest.start_s[k], rest.finish_s[k]
    return replace(schedule, device=tuple(device), start_s=tuple(start), finish_s=tuple(finish))
