"""The loops of both simulations, over arrays: they run compiled by Numba, or as plain Python.

`split` finds the tasks that run again, and `rerun` goes from one end of a task to the next (FlexFlow, Algorithm 1). Each stream
has a queue, so the heap of coming events has an entry for each stream and not for each task.
"""

from __future__ import annotations

from typing import Any, NamedTuple

NONE = -1
NEVER = 1 << 62


class PoolTasks(NamedTuple):
    """What each task is (`shardplan.placement.task_pool`); ``alive``: it belongs to the present strategy."""

    work: Any
    stream: Any
    key: Any
    group: Any
    alive: Any


class Readers(NamedTuple):
    """Where the readers of a task are (`shardplan.placement.task_pool`)."""

    base: Any
    first: Any
    bundles: Any
    pointer: Any
    arcs: Any


class TaskTimes(NamedTuple):
    """By task: when it was ready and when it ended, both also in the new timeline, and the number of tasks that it waits for
    there.
    """

    ready: Any
    end: Any
    new_ready: Any
    new_end: Any
    waits: Any


class RerunStreams(NamedTuple):
    """By stream, for the tasks that run again.

    ``last`` is when it is free, ``load`` the ticks of its tasks that are still to run, and ``early`` those of the forward and
    backward pass. ``front`` and ``back`` are the ends of its queue, ``running`` is its task (`NONE`: it is idle).
    """

    last: Any
    load: Any
    early: Any
    front: Any
    back: Any
    running: Any


class Scratch(NamedTuple):
    """Room for the ``queue`` of each stream, and for the ``events`` of an instant: tasks that are ready, and ~tasks that end.

    ``coming`` is a binary heap of the streams that run a task, ``free`` are those that may take the next one in this instant.
    """

    queue: Any
    events: Any
    coming: Any
    free: Any


class Bounds(NamedTuple):
    """No step may take more than ``limit`` ticks. Each task of a group is followed by ``tails`` ticks at least.

    ``after`` ticks follow the forward and backward pass, which are groups below ``updates``.
    """

    limit: int
    tails: Any
    after: int
    updates: int


def split(
    now: int, top: int, tasks: PoolTasks, times: TaskTimes, streams: RerunStreams, updates: int, again: Any, border: Any
) -> tuple[int, int, int]:
    """Fills ``again`` with the tasks that are ready at ``now`` or later, and ``border`` with others that end then or later.

    Returns how many these are, and the last end of tasks that do not run again. Groups below ``updates`` have parts of operators.
    """
    work, stream, _, group, alive = tasks
    runs = ends = latest = 0
    for task in range(top):
        if not alive[task]:
            continue
        s = stream[task]
        if times.ready[task] >= now:
            again[runs] = task
            runs += 1
            times.waits[task] = 0
            if s >= 0:
                streams.load[s] += work[task]
                streams.back[s] += 1
                if is_early(group[task], updates):
                    streams.early[s] += work[task]
            continue
        end = times.end[task]
        latest = max(latest, end)
        if s >= 0:
            streams.last[s] = max(streams.last[s], end)
        if end >= now:
            border[ends] = task
            ends += 1
    place = 0
    for s in range(len(streams.back)):
        count, streams.front[s], streams.back[s] = streams.back[s], place, place
        place += count
    return runs, ends, latest


def rerun(
    again: Any,
    border: Any,
    tasks: PoolTasks,
    readers: Readers,
    times: TaskTimes,
    streams: RerunStreams,
    space: Scratch,
    bounds: Bounds,
) -> int:
    """Runs the tasks ``again``; the last instant, or `NONE` once it is certain to lie beyond the limit.

    A connection or device takes tasks in the order in which they are ready, ties by key. The tasks at the ``border``, in the
    order of their ends, end as they did.
    """
    for s in range(len(streams.last)):
        if streams.last[s] + still(s, streams, bounds) > bounds.limit:
            return NONE
    for task in again:
        count_waits(task, tasks.group[task], readers, times.waits)
    for task in border:
        count_waits(task, tasks.group[task], readers, times.waits)
    now = latest = passed = busy = count = 0
    for task in again:
        if times.waits[task] == 0:
            space.events[count] = task
            count += 1
    while True:
        running = busy
        count, busy = end_tasks(now, count, busy, streams, space)
        while passed < len(border) and times.end[border[passed]] == now:
            space.events[count] = ~border[passed]
            passed, count = passed + 1, count + 1
        free = happen(now, count, running - busy, tasks, readers, times, streams, space)
        latest = max(latest, now)
        for n in range(free):
            s = space.free[n]
            finish = take(s, now, tasks, times, streams, space, bounds)
            if finish == NONE:
                return NONE
            if finish < NEVER:
                push(space.coming, busy, streams.last, s)
                busy += 1
        if busy == 0 and passed == len(border):
            return latest
        now = streams.last[space.coming[0]] if busy > 0 else NEVER
        if passed < len(border):
            now = min(now, times.end[border[passed]])
        count = 0


def end_tasks(now: int, count: int, busy: int, streams: RerunStreams, space: Scratch) -> tuple[int, int]:
    """Ends the tasks that end now; how many events there are then, and how many streams are still busy."""
    free = 0
    while busy > 0 and streams.last[space.coming[0]] == now:
        s = pop(space.coming, busy, streams.last)
        busy -= 1
        space.events[count] = ~streams.running[s]
        space.free[free] = s
        free, count = free + 1, count + 1
    return count, busy


def is_early(group: int, updates: int) -> bool:
    """Whether a group belongs to the forward or backward pass."""
    return group < updates and group % 3 != 2


def still(s: int, streams: RerunStreams, bounds: Bounds) -> int:
    """The ticks that pass at least once a stream is free."""
    return max(streams.load[s], streams.early[s] + bounds.after if streams.early[s] > 0 else 0)


def count_waits(task: int, g: int, readers: Readers, waits: Any) -> None:
    """Counts a task, of group g, for those that wait for it."""
    base, first, bundles, pointer, arcs = readers
    for b in range(first[g], first[g + 1]):
        p = pointer[bundles[b]] + task - base[g]
        for a in range(arcs[p], arcs[p + 1]):
            waits[arcs[a]] += 1


def happen(
    now: int,
    count: int,
    free: int,
    tasks: PoolTasks,
    readers: Readers,
    times: TaskTimes,
    streams: RerunStreams,
    space: Scratch,
) -> int:
    """All events of an instant, and those that follow in it; how many streams may then take a task."""
    base, first, bundles, pointer, arcs = readers
    events, waits, at = space.events, times.waits, 0
    while at < count:
        task = events[at]
        at += 1
        if task >= 0:
            times.new_ready[task] = now
            s = tasks.stream[task]
            if s >= 0:
                enqueue(task, now, tasks.key, times.new_ready, space.queue, streams.front[s], streams.back[s])
                streams.back[s] += 1
                if streams.running[s] == NONE:
                    streams.running[s] = task  # whichever it takes: it is idle no more
                    space.free[free] = s
                    free += 1
                continue
            times.new_end[task] = now
        else:
            task = ~task
        g = tasks.group[task]
        for b in range(first[g], first[g + 1]):
            p = pointer[bundles[b]] + task - base[g]
            for a in range(arcs[p], arcs[p + 1]):
                reader = arcs[a]
                waits[reader] -= 1
                if waits[reader] == 0:
                    events[count] = reader
                    count += 1
    return free


def enqueue(task: int, now: int, key: Any, ready: Any, queue: Any, front: int, back: int) -> None:
    """Puts a task that is ready now into the queue of its stream, before those of a higher key that are ready now too."""
    while back > front and ready[queue[back - 1]] == now and key[queue[back - 1]] > key[task]:
        queue[back] = queue[back - 1]
        back -= 1
    queue[back] = task


def take(s: int, now: int, tasks: PoolTasks, times: TaskTimes, streams: RerunStreams, space: Scratch, bounds: Bounds) -> int:
    """A stream takes the first task of its queue; when that ends, `NEVER` if there is none, `NONE` if that is too late."""
    if streams.front[s] == streams.back[s]:
        streams.running[s] = NONE
        return NEVER
    task = space.queue[streams.front[s]]
    streams.front[s] += 1
    streams.running[s] = task
    work, g = tasks.work[task], tasks.group[task]
    finish = max(now, streams.last[s]) + work
    streams.last[s] = times.new_end[task] = finish
    streams.load[s] -= work
    if is_early(g, bounds.updates):
        streams.early[s] -= work
    return NONE if finish + max(still(s, streams, bounds), bounds.tails[g]) > bounds.limit else finish


def push(heap: Any, size: int, last: Any, s: int) -> None:
    """Puts a stream into a heap of so many, ordered by when they are free."""
    at = size
    while at > 0 and last[heap[(at - 1) // 2]] > last[s]:
        heap[at] = heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap[at] = s


def pop(heap: Any, size: int, last: Any) -> int:
    """Takes the stream that is free first out of a heap of so many."""
    first, moved, at, child = heap[0], heap[size - 1], 0, 1
    while child < size - 1:
        if child + 1 < size - 1 and last[heap[child + 1]] < last[heap[child]]:
            child += 1
        if last[heap[child]] >= last[moved]:
            break
        heap[at] = heap[child]
        at, child = child, 2 * child + 1
    heap[at] = moved
    return first


def tails(
    ticks: Any,
    edges: Any,
    alone: Any,
    order: Any,
    backward: Any,
    update: Any,
    users: Any,
    owners: Any,
    reduced: Any,
    weights: int,
    bound: Any,
) -> None:
    """Fills ``bound`` [groups] (`shardplan.placement.tails.Tails`).

    ``ticks`` [operators, phases] are the least of a part, ``edges`` [edges, 3] (producer, consumer, whether it has a gradient),
    in the order of consumers. ``order`` lists them from the last producer on; ``alone`` [edges] are those without copies.
    ``users`` are (weight, operator) pairs, ``weights`` is the group of the first weight.
    """
    n = len(ticks)
    for w in range(len(owners)):
        bound[weights + 2 * w] = reduced[w] + ticks[owners[w], 2]
        bound[weights + 2 * w + 1] = ticks[owners[w], 2]
    for i in range(n):
        bound[3 * i + (1 if backward[i] else 0)] = ticks[i, 2] if update[i] else 0
    for k in range(len(users)):
        w, i = users[k, 0], users[k, 1]
        own = 3 * i + (1 if backward[i] else 0)
        bound[own] = max(bound[own], bound[weights + 2 * w])
    for k in range(len(edges)):
        if edges[k, 2]:
            p, c = edges[k, 0], edges[k, 1]
            bound[3 * c + 1] = max(bound[3 * c + 1], ticks[p, 1] + bound[3 * p + 1])
    for i in range(n):
        if backward[i]:
            bound[3 * i] = ticks[i, 1] + bound[3 * i + 1]
    for k in order:
        p, c = edges[k, 0], edges[k, 1]
        after = ticks[c, 0] + bound[3 * c]
        if alone[k]:
            bound[3 * p] = max(bound[3 * p], after)
        bound[3 * n + 2 * k] = after
        if edges[k, 2]:
            bound[3 * n + 2 * k + 1] = ticks[p, 1] + bound[3 * p + 1]


FUNCTIONS = (is_early, still, count_waits, enqueue, push, pop, end_tasks, happen, take, split, rerun, tails)
"""The functions that are compiled, each after those that it calls."""
