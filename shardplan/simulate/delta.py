"""Simulates again after the durations of a few tasks have changed (FlexFlow, section 5.3).

A stream chooses among ready tasks, never by how long they will take. So nothing changes before the first changed task starts. The
state at that instant follows from the earlier run, and only later events are simulated.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from shardplan.simulate.engine import (
    Contention,
    Engine,
    Floats,
    Ints,
    Run,
    initial_state,
    queue_places,
    run_on,
    simulate,
    tick_of,
)
from shardplan.simulate.event_loop import NONE, State


def simulate_again(run: Run, seconds: Floats, contention: Contention, engine: Engine = "auto") -> Run:
    """The run of the same graph with other ``seconds`` [n]: exactly that of `simulate`.

    ``contention`` must be that of the earlier run.
    """
    graph = replace(run.graph, seconds=seconds)
    changed = np.flatnonzero(seconds != run.graph.seconds)
    if not len(changed):
        return run
    if tick_of(graph, contention) != run.tick_s:
        return simulate(graph, contention, engine)
    now = int(run.start[changed].min())
    if now == 0:
        roots = np.flatnonzero(np.diff(graph.first) == 0)
        return run_on(graph, initial_state(graph), roots, 0, run.tick_s, contention, engine)
    return run_on(graph, _state_at(run, now, contention), np.zeros(0, np.int64), now, run.tick_s, contention, engine)


def _state_at(run: Run, now: int, contention: Contention) -> State:
    """The state of a run before the events of instant ``now``; a task that ends then has no work left.

    No stream is idle while it has ready tasks. So the ``last`` task of a stream is read only after one has ended from now on.
    """
    graph, state = run.graph, initial_state(run.graph)
    arrays = {name: cast(Ints, x) for name, x in state._asdict().items()}
    done, begun = run.end < now, run.start < now
    joins = graph.stream == NONE
    reader = np.repeat(np.arange(len(graph)), np.diff(graph.first))
    open_ = ~done[graph.waits_for]
    arrays["waits"][:] = np.bincount(reader[open_], minlength=len(graph))
    np.maximum.at(arrays["ready"], reader, run.end[graph.waits_for])
    for name in ("start", "end", "cause"):
        arrays[name][:] = getattr(run, name)
    for task in np.flatnonzero(begun & ~done & ~joins).tolist():
        s = int(graph.stream[task])
        arrays["running"][s] = task
        arrays["remaining"][s] = _left(run, task, now, contention)
        counted = {"compute": "computing", "link": "sending"}.get(graph.streams[s].kind)
        if counted is not None:
            arrays[counted][graph.streams[s].device] += 1
    waiting = ~begun & ~joins & (arrays["waits"] == 0)
    for s, base in enumerate(queue_places(graph).tolist()):
        own = np.flatnonzero(waiting & (graph.stream == s))
        keys = (arrays["ready"][own], graph.priority[own])
        own = own[np.lexsort((own, *(keys[::-1] if graph.streams[s].fifo else keys)))]
        arrays["queue"][base : base + len(own)] = own  # what is sorted is a heap
        arrays["length"][s] = len(own)
    return state


def _left(run: Run, task: int, now: int, contention: Contention) -> int:
    """The work in ticks that a running task has left, step by step as the loop takes it off."""
    if run.end[task] == now:
        return 0
    graph, begin = run.graph, int(run.start[task])
    left = round(float(graph.seconds[task]) / run.tick_s)
    at = (graph.stream != NONE) & (run.end > begin) & (run.end <= now)
    instants = np.unique(np.append(run.end[at], [begin, now]))
    steps, beside = np.diff(instants), _beside(run, task, instants)
    own = graph.streams[int(graph.stream[task])].kind
    factor = {"compute": contention.compute, "link": contention.communication}.get(own, 1.0)
    for step, slowed in zip(steps.tolist(), beside.tolist(), strict=True):
        left -= math.floor(step / factor) if slowed and factor != 1.0 else step
    return left


def _beside(run: Run, task: int, instants: Ints) -> NDArray[np.bool_]:
    """[steps]: whether, between two instants, a stream of the task's device runs that slows the task."""
    graph = run.graph
    own = graph.streams[int(graph.stream[task])]
    others = {"compute": "link", "link": "compute"}.get(own.kind)
    slowing = [s for s, x in enumerate(graph.streams) if x.device == own.device and x.kind == others]
    near = np.isin(graph.stream, slowing) & (run.start < instants[-1]) & (run.end > instants[0]) & (run.end > run.start)
    change = np.zeros(len(instants) + 1, np.int64)
    np.add.at(change, np.searchsorted(instants, np.maximum(run.start[near], instants[0])), 1)
    np.add.at(change, np.searchsorted(instants, np.minimum(run.end[near], instants[-1])), -1)
    return np.cumsum(change)[: len(instants) - 1] > 0
