"""Whole operators on single devices, as a scheduler of a graph of tasks places them (FD-DPS, HEFT)."""

from __future__ import annotations

from typing import Literal

import numpy as np

from shardplan.dag import schedule_dag
from shardplan.errors import PlacementError, ScheduleError, size_text
from shardplan.placement.configurations import Strategy, single
from shardplan.placement.device_topology import TICK_S
from shardplan.placement.held_bytes import may_exceed, whole_bytes
from shardplan.placement.placement_problem import PlacementProblem

Scheduler = Literal["fd-dps", "heft"]
SCHEDULERS: tuple[Scheduler, ...] = ("fd-dps", "heft")


def scheduled(problem: PlacementProblem, method: Scheduler) -> Strategy:
    """Each operator whole on the device that ``method`` gives it.

    A task is an operator with all its phases; an edge takes the mean seconds of its tensor, there and back, between two devices.
    Where a device may have too little memory, an operator counts as `whole_bytes` on it.

    Raises:
        PlacementError: if the operators are not packed into the memory of the devices.
    """
    machine, graph = problem.machine, problem.graph
    whole = [sum(table[(1,) * len(o.loops)]) * TICK_S for o, table in zip(graph.operators, problem.tables, strict=True)]
    present = np.array(machine.present)
    times = np.array(whole)[:, None] / machine.speed[None, present]
    apart = np.ix_(present, present)
    off = ~np.eye(len(present), dtype=bool)
    latency = float(machine.latency_s[apart][off].mean()) if len(present) > 1 else 0.0
    per_byte = float((1 / machine.bytes_per_s[apart][off]).mean()) if len(present) > 1 else 0.0
    edges: dict[tuple[int, int], float] = {}
    for e in graph.edges:
        ways = 2 if e.gradient else 1
        seconds = ways * (latency + per_byte * e.itemsize * float(np.prod(e.shape)))
        edges[e.producer, e.consumer] = edges.get((e.producer, e.consumer), 0.0) + seconds
    memory, sizes = (machine.memory_bytes[present], whole_bytes(problem)) if may_exceed(problem) else (None, None)
    try:
        found = schedule_dag(times, edges, method, memory, sizes)
    except ScheduleError as error:
        if not error.tasks:
            raise PlacementError(f"method {method!r}, with whole operators and sizes in bytes: {error}") from error
        operator, largest = graph.operators[error.tasks[0]], int(max(machine.memory_bytes[present]))
        held = size_text(whole_bytes(problem)[error.tasks[0]])
        raise PlacementError(
            f"method {method!r} places operators whole: {operator.name} ({operator.source}) holds {held}, the largest device has "
            f"{size_text(largest)}: use --method mcmc, which cuts operators, or a smaller batch"
        ) from error
    return tuple(single(o, int(present[d])) for o, d in zip(graph.operators, found.device, strict=True))
