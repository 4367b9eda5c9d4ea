"""The order in which the tasks of a placed step and the transfers between groups are issued, and when each of them runs.

Tasks wait for what they read and for the devices of their group. Of those that can start first, the one with the longest way to
the end of the step goes first (FD-DPS, section 4: the latest start times of the dynamic critical path).

A stage holds the saved values of a microbatch from its forward pass to the last of its backward pass. So a pipeline is scheduled
many times: with limits on the microbatches that a stage has in flight, and in the orders of the literature. The fastest schedule
that fits in memory is taken; of several that are as fast, the one that holds least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardplan.constants import CONSTANTS
from shardplan.placement.device_topology import DeviceTopology
from shardplan.regions.schedules import restricted, started, waiting_tasks
from shardplan.regions.tasks import Key, PlacedTaskGraph, Task, Transfer


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

    def busy_s(self, graph: PlacedTaskGraph, group: int) -> float:
        """How long the devices of a group compute."""
        own = (i for i in self.issues if isinstance(i.what, Task) and graph.pieces[i.what.piece].group == group)
        return sum(i.end_s - i.start_s for i in own)


def dispatched(graph: PlacedTaskGraph, machine: DeviceTopology, limit: float = math.inf) -> Dispatch:
    """The issues of a step on a machine whose devices hold ``limit`` bytes: the fastest that fit; else those that hold least."""
    waiting = waiting_tasks(graph, machine)
    best: tuple[tuple[bool, float, int], Dispatch] | None = None
    for start in (waiting, *restricted(graph, waiting)):
        found = Dispatch(with_last(graph, [Issue(w.what, at, at + w.seconds) for w, at in started(start)]))
        peak = peak_bytes(graph, found)
        over = peak > limit
        key = over, 0.0 if over else found.step_time_s, peak
        if best is None or _better(key, best[0]):
            best = key, found
    assert best is not None
    return best[1]


def _better(one: tuple[bool, float, int], other: tuple[bool, float, int]) -> bool:
    """Whether one schedule is to be preferred: (does not fit, seconds, bytes) of both."""
    if one[0] == other[0] and math.isclose(one[1], other[1], rel_tol=CONSTANTS.rounding):
        return one[2] < other[2]
    return one < other


# -- memory ------------------------------------------------------------------------------------------------------------


def peak_bytes(graph: PlacedTaskGraph, dispatch: Dispatch) -> int:
    """The most bytes that a device holds: the sum over the groups that it belongs to."""
    held: dict[int, int] = {}
    for g, group in enumerate(graph.groups):
        own = most_held(graph, dispatch, g, inside=True)
        for d in group.devices:
            held[d] = held.get(d, 0) + own
    return max(held.values())


def most_held(graph: PlacedTaskGraph, dispatch: Dispatch, group: int, *, inside: bool = False) -> int:
    """The most bytes that a device of a group holds of values that enter or leave its programs; with ``inside``, also of what a
    program needs while it runs. A value that takes the place of one that nothing reads any more has its buffer.
    """
    held = {key: _local_bytes(graph, group, key[0]) for g, key in graph.inputs if g == group}
    most = total = sum(held.values())
    works, leaving = 0, list[Key]()  # of the task that runs
    for issue in dispatch.issues:
        made: tuple[Key, ...] = ()
        over = [key for g, key in issue.last if g == group]
        match issue.what:
            case Task() as task if graph.pieces[task.piece].group == group:
                total -= sum(held.pop(key, 0) for key in leaving)
                works, leaving, made = graph.pieces[task.piece].inside_bytes, over, task.makes
                replaced = {key[0]: key for key in over if key in held}
            case Transfer(key, _, target, _) if target == group:
                made, replaced = (key,), {}
            case _:
                replaced = {}
        for key in made:
            if key not in held:
                held[key] = _local_bytes(graph, group, key[0])
                total += held[key]
            if key[0] in replaced:
                total -= held.pop(replaced.pop(key[0]))
        most = max(most, total + (works if inside else 0))
        if isinstance(issue.what, Transfer):
            total -= sum(held.pop(key, 0) for key in over)
    return most


def _local_bytes(graph: PlacedTaskGraph, group: int, tensor: int) -> int:
    """The bytes of a tensor on one device of a group."""
    own = graph.groups[group]
    layout = own.layouts.get(tensor)
    ways = 1 if layout is None else math.prod(own.factors[f].size for f in layout.used)
    return graph.tensors[tensor].nbytes // ways


def with_last(graph: PlacedTaskGraph, issues: Sequence[Issue]) -> tuple[Issue, ...]:
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
