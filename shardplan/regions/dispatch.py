"""The order in which the tasks of a placed step and the transfers between groups are issued, and when each of them runs.

Tasks wait for their operands and for the devices of their group. Among the tasks that can start first, the one with the longest
path to the end of the step goes first (FD-DPS, section 4: the latest start times of the dynamic critical path).

A stage holds the saved values of a microbatch from its forward pass to the last of its backward pass. So a pipeline is
scheduled many times: with limits on the microbatches that a stage has in flight, and in the orders of the literature. The
fastest schedule that fits in memory is taken; among equally fast ones, the one that holds the fewest bytes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from shardplan.constants import CONSTANTS
from shardplan.placement.device_topology import DeviceTopology
from shardplan.regions.buffers import peak_bytes
from shardplan.regions.issues import Dispatch, Issue, with_last
from shardplan.regions.schedules import restricted, started, waiting_tasks
from shardplan.regions.tasks import PlacedTaskGraph


def dispatched(graph: PlacedTaskGraph, machine: DeviceTopology, limit: float = math.inf) -> Dispatch:
    """The issues of a step on a machine whose devices hold ``limit`` bytes: the fastest that fit; if none fit, those that hold
    the fewest.
    """
    return dispatched_beside(graph, machine, limit).dispatch


class DispatchBeside(NamedTuple):
    """A dispatch within a memory limit, and the bytes per device that the fastest one without a limit holds."""

    dispatch: Dispatch
    free_peak_bytes: int


def dispatched_beside(graph: PlacedTaskGraph, machine: DeviceTopology, limit: float) -> DispatchBeside:
    """As `dispatched`, with the peak of the fastest dispatch without a limit."""
    free: tuple[bool, float, int] | None = None
    waiting = waiting_tasks(graph, machine)
    best: tuple[tuple[bool, float, int], Dispatch] | None = None
    for start in (waiting, *restricted(graph, waiting)):
        found = Dispatch(with_last(graph, [Issue(w.what, at, at + w.seconds) for w, at in started(start)]))
        peak = peak_bytes(graph, found)
        over = peak > limit
        if free is None or _better((False, found.step_time_s, peak), free):
            free = False, found.step_time_s, peak
        key = over, 0.0 if over else found.step_time_s, peak
        if best is None or _better(key, best[0]):
            best = key, found
    assert best is not None
    assert free is not None
    return DispatchBeside(best[1], free[2])


def _better(one: tuple[bool, float, int], other: tuple[bool, float, int]) -> bool:
    """Whether ``one`` schedule is better than the ``other``; each is (does not fit, seconds, bytes)."""
    if one[0] == other[0] and math.isclose(one[1], other[1], rel_tol=CONSTANTS.rounding):
        return one[2] < other[2]
    return one < other
