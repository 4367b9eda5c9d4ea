"""The loop of the simulator: from one event to the next, streams take tasks and tasks finish.

All of it is written in the subset of Python that Numba compiles. The same functions run compiled, on arrays, and as plain Python,
on lists: `engine` chooses. Times and work are whole ticks, so both give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import MutableSequence, Sequence
from typing import NamedTuple

COMPUTE, LINK, HOST = 0, 1, 2
"""The kinds of streams."""

NONE = -1
"""No task, or no stream."""


class Tasks(NamedTuple):
    """Tasks [n]: ``work`` in ticks, the ``stream`` (`NONE`: it ends as soon as it is ready), the ``readers`` that wait for it."""

    work: Sequence[int]
    stream: Sequence[int]
    first_reader: Sequence[int]
    readers: Sequence[int]
    priority: Sequence[int]


class Streams(NamedTuple):
    """Streams [s]: kind, device, whether tasks are taken in order of ready time, and where its part of the queue begins."""

    kind: Sequence[int]
    device: Sequence[int]
    fifo: Sequence[int]
    base: Sequence[int]


class State(NamedTuple):
    """The state that changes.

    - By task: how many others it ``waits`` for, when it was ``ready``, its ``start`` and ``end``, and its ``cause``: the task
      whose end let it start.
    - By stream: the ``length`` of its queue (a binary heap), the task that is ``running``, the work ``remaining`` of that, the
      ticks ``left`` until it ends at the present rates, and the ``last`` task that ended on it.
    - By device: how many streams are ``computing``, and how many links are ``sending``.
    """

    waits: MutableSequence[int]
    ready: MutableSequence[int]
    start: MutableSequence[int]
    end: MutableSequence[int]
    cause: MutableSequence[int]
    queue: MutableSequence[int]
    length: MutableSequence[int]
    running: MutableSequence[int]
    remaining: MutableSequence[int]
    left: MutableSequence[int]
    last: MutableSequence[int]
    computing: MutableSequence[int]
    sending: MutableSequence[int]
    stack: MutableSequence[int]


def run(tasks: Tasks, streams: Streams, state: State, compute_factor: float, link_factor: float) -> int:
    """Runs until nothing is left to run; the last instant."""
    now = 0
    while True:
        dispatch(tasks, streams, state, now)
        step = next_event(streams, state, compute_factor, link_factor)
        if step < 0:
            return now
        now += step
        advance(tasks, streams, state, now, step, compute_factor, link_factor)


def begin(tasks: Tasks, streams: Streams, state: State, roots: Sequence[int]) -> None:
    """Queues the tasks that wait for nothing, at time 0; those without a stream end at once."""
    for i in range(len(roots)):
        if tasks.stream[roots[i]] == NONE:
            release(tasks, streams, state, roots[i], 0)
        else:
            push(tasks, streams, state, roots[i])


def dispatch(tasks: Tasks, streams: Streams, state: State, now: int) -> None:
    """Every idle stream with a queue takes its first task."""
    for s in range(len(streams.kind)):
        if state.running[s] != NONE or state.length[s] == 0:
            continue
        task = pop(tasks, streams, state, s)
        state.start[task] = now
        if state.ready[task] < now:
            state.cause[task] = state.last[s]
        state.running[s] = task
        state.remaining[s] = tasks.work[task]
        count(streams, state, s, 1)


def count(streams: Streams, state: State, s: int, change: int) -> None:
    """Counts a stream of a device that begins or ends to be busy."""
    if streams.kind[s] == COMPUTE:
        state.computing[streams.device[s]] += change
    elif streams.kind[s] == LINK:
        state.sending[streams.device[s]] += change


def slowdown(streams: Streams, state: State, s: int, compute_factor: float, link_factor: float) -> float:
    """The ticks that a running task takes for one tick of its work: more than one while its device computes and sends."""
    if streams.kind[s] == COMPUTE and state.sending[streams.device[s]] > 0:
        return compute_factor
    if streams.kind[s] == LINK and state.computing[streams.device[s]] > 0:
        return link_factor
    return 1.0


def next_event(streams: Streams, state: State, compute_factor: float, link_factor: float) -> int:
    """The ticks until the next task ends, rounded up; -1 if none is running."""
    step = -1
    for s in range(len(streams.kind)):
        if state.running[s] != NONE:
            factor = slowdown(streams, state, s, compute_factor, link_factor)
            left = state.remaining[s] if factor == 1.0 else math.ceil(state.remaining[s] * factor)
            state.left[s] = left
            if step < 0 or left < step:
                step = left
    return step


def advance(tasks: Tasks, streams: Streams, state: State, now: int, step: int, compute_factor: float, link_factor: float) -> None:
    """Lets ``step`` ticks pass, until ``now``: all work goes on at the rates so far, then tasks end and change the rates."""
    for s in range(len(streams.kind)):
        if state.running[s] != NONE and state.left[s] != step:
            factor = slowdown(streams, state, s, compute_factor, link_factor)
            state.remaining[s] -= step if factor == 1.0 else math.floor(step / factor)
    for s in range(len(streams.kind)):
        task = state.running[s]
        if task != NONE and state.left[s] == step:
            state.end[task] = now
            state.running[s] = NONE
            state.last[s] = task
            count(streams, state, s, -1)
            release(tasks, streams, state, task, now)


def release(tasks: Tasks, streams: Streams, state: State, ended: int, now: int) -> None:
    """Lets the readers of a task that ended go on; one without a stream ends at once."""
    state.stack[0] = ended
    height = 1
    while height > 0:
        height -= 1
        task = state.stack[height]
        for i in range(tasks.first_reader[task], tasks.first_reader[task + 1]):
            reader = tasks.readers[i]
            state.waits[reader] -= 1
            if state.waits[reader] == 0:
                state.cause[reader] = task
                state.ready[reader] = now
                if tasks.stream[reader] == NONE:
                    state.start[reader] = now
                    state.end[reader] = now
                    state.stack[height] = reader
                    height += 1
                else:
                    push(tasks, streams, state, reader)


def goes_first(tasks: Tasks, streams: Streams, state: State, a: int, b: int) -> bool:
    """Whether a stream takes task ``a`` before task ``b``."""
    if streams.fifo[tasks.stream[a]] != 0:
        if state.ready[a] != state.ready[b]:
            return state.ready[a] < state.ready[b]
        if tasks.priority[a] != tasks.priority[b]:
            return tasks.priority[a] < tasks.priority[b]
    else:
        if tasks.priority[a] != tasks.priority[b]:
            return tasks.priority[a] < tasks.priority[b]
        if state.ready[a] != state.ready[b]:
            return state.ready[a] < state.ready[b]
    return a < b


def push(tasks: Tasks, streams: Streams, state: State, task: int) -> None:
    """Puts a ready task into the queue of its stream."""
    s = tasks.stream[task]
    base = streams.base[s]
    at = state.length[s]
    state.length[s] = at + 1
    while at > 0:
        parent = (at - 1) // 2
        above = state.queue[base + parent]
        if not goes_first(tasks, streams, state, task, above):
            break
        state.queue[base + at] = above
        at = parent
    state.queue[base + at] = task


def pop(tasks: Tasks, streams: Streams, state: State, s: int) -> int:
    """Takes the first task out of the queue of a stream."""
    base = streams.base[s]
    first = state.queue[base]
    length = state.length[s] - 1
    state.length[s] = length
    task = state.queue[base + length]
    at = 0
    while 2 * at + 1 < length:
        child = 2 * at + 1
        if child + 1 < length and goes_first(tasks, streams, state, state.queue[base + child + 1], state.queue[base + child]):
            child += 1
        if not goes_first(tasks, streams, state, state.queue[base + child], task):
            break
        state.queue[base + at] = state.queue[base + child]
        at = child
    if length > 0:
        state.queue[base + at] = task
    return first


FUNCTIONS = (count, slowdown, goes_first, push, pop, release, next_event, begin, dispatch, advance, run)
"""The functions that are compiled, each after those that it calls."""
