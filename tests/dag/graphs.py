"""Random DAGs for hypothesis, and what makes a schedule valid, written anew from the tables that a user gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from shardplan.dag import TaskSchedule

SECONDS = st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.5, 2.0, 3.0, 7.0])


class Tables(NamedTuple):
    """The arguments of `shardplan.schedule_dag`."""

    times: list[list[float]]
    edges: dict[tuple[int, int], Any]
    memory: list[float] | None
    sizes: list[float] | None


@st.composite
def tables(draw: st.DrawFn, *, max_tasks: int = 14, max_devices: int = 4, limited: bool | None = None) -> Tables:
    """A DAG with equal or unequal devices and links; where it is ``limited``, its tasks can be packed, though barely."""
    n, devices = draw(st.integers(1, max_tasks)), draw(st.integers(1, max_devices))
    equal = draw(st.booleans())
    times = [
        [draw(SECONDS)] * devices if equal else draw(st.lists(SECONDS, min_size=devices, max_size=devices)) for _ in range(n)
    ]
    names = draw(st.permutations(range(n)))
    pairs = draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=2 * n))
    row = st.lists(SECONDS, min_size=devices, max_size=devices)
    transfer = SECONDS if equal else SECONDS | st.lists(row, min_size=devices, max_size=devices)
    edges = {(names[min(p)], names[max(p)]): draw(transfer) for p in pairs if p[0] != p[1]}
    if limited is None:
        limited = draw(st.booleans())
    if not limited:
        return Tables(times, edges, None, None)
    sizes = [float(draw(st.integers(0, 9))) for _ in range(n)]
    held = [0.0] * devices
    for size in sizes:
        held[draw(st.integers(0, devices - 1))] += size
    return Tables(times, edges, [max(h, min(sizes)) for h in held], sizes)


def seconds_between(transfer: Any, source: int, target: int) -> float:
    if source == target:
        return 0.0
    return float(np.asarray(transfer)[source, target]) if np.ndim(transfer) else float(transfer)


def faults(
    schedule: TaskSchedule,
    times: Sequence[Sequence[float]],
    edges: Mapping[tuple[int, int], Any],
    memory: Sequence[float] | None = None,
    sizes: Sequence[float] | None = None,
) -> list[str]:
    """What makes a schedule invalid; nothing if it is valid. ``times`` are seconds of each task on each device."""
    found: list[str] = []
    device, start, end = schedule.device, schedule.start_s, schedule.finish_s
    near = 1e-9 * max(1.0, schedule.makespan_s)
    for i, d in enumerate(device):
        if start[i] < 0 or abs(end[i] - start[i] - times[i][d]) > near:
            found.append(f"task {i} runs from {start[i]} to {end[i]} and takes {times[i][d]}")
    for (i, j), transfer in edges.items():
        if start[j] < end[i] + seconds_between(transfer, device[i], device[j]) - near:
            found.append(f"task {j} starts before the result of task {i} is there")
    found += overlaps(schedule)
    if memory is not None and sizes is not None:
        for d, limit in enumerate(memory):
            if sum(s for s, e in zip(sizes, device, strict=True) if e == d) > limit * (1 + 1e-9):
                found.append(f"device {d} holds more than {limit}")
    if schedule.makespan_s != max(end, default=0.0):
        found.append("the makespan is not the last end")
    return found


def overlaps(schedule: TaskSchedule) -> list[str]:
    """Pairs of tasks that run at once on one device."""
    start, end, near = schedule.start_s, schedule.finish_s, 1e-9 * max(1.0, schedule.makespan_s)
    return [
        f"tasks {i} and {j} run at once on device {d}"
        for i, d in enumerate(schedule.device)
        for j in range(i)
        if d == schedule.device[j] and min(end[i], end[j]) > max(start[i], start[j]) + near
    ]
