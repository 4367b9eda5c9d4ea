"""The loop of both simulations, over arrays: it runs compiled by Numba, or as plain Python.

`prepare` finds what the tasks that run again wait for, `rerun` runs them in the order in which they are ready (FlexFlow,
Algorithm 1).
"""

from __future__ import annotations

import heapq
from typing import Any

NONE = -1
NEVER = 1 << 62


def prepare(again: Any, border: Any, runs: Any, where: Any, waits: Any, ready: Any, end: Any) -> None:
    """Counts for the tasks ``again`` how many others of them they wait for, and when the tasks at the ``border`` release them.

    ``where`` (group, base, first, bundles, pointer, arcs) leads to the readers of a task (`shardplan.placement.task_pool`).
    """
    group, base, first, bundles, pointer, arcs = where
    for n in range(len(again)):
        task = again[n]
        g = group[task]
        for b in range(first[g], first[g + 1]):
            p = pointer[bundles[b]] + task - base[g]
            for a in range(arcs[p], arcs[p + 1]):
                waits[arcs[a]] += 1
    for n in range(len(border)):
        task = border[n]
        g = group[task]
        for b in range(first[g], first[g + 1]):
            p = pointer[bundles[b]] + task - base[g]
            for a in range(arcs[p], arcs[p + 1]):
                reader = arcs[a]
                if runs[reader] and ready[reader] < end[task]:
                    ready[reader] = end[task]


def rerun(again: Any, tasks: Any, where: Any, times: Any, busy: Any, tails: Any, updates: int, after: int, limit: int) -> int:
    """Runs the tasks ``again``; the last instant, or `NONE` once it is certain to lie beyond ``limit``.

    A connection or device takes tasks in the order in which they are ready, ties by key. ``tasks`` are (work, stream, key),
    ``times`` (waits, ready, start, end). Of ``busy``, ``last`` is when each stream is free, ``load`` the ticks of its tasks
    that are still to run, and ``early`` those of the forward and backward pass (in groups below ``updates``), which ``after``
    ticks follow at least. ``tails`` are such bounds by group.
    """
    work, stream, key = tasks
    group, base, first, bundles, pointer, arcs = where
    waits, ready, start, end = times
    last, load, early = busy
    for s in range(len(last)):
        if last[s] + max(load[s], early[s] + (after if early[s] > 0 else 0)) > limit:
            return NONE
    queue = [(ready[t], key[t], t) for t in again if waits[t] == 0]
    heapq.heapify(queue)
    latest = 0
    while len(queue) > 0:
        begin, _, task = heapq.heappop(queue)
        s, g = stream[task], group[task]
        finish = begin + work[task]
        if s >= 0:
            begin = max(begin, last[s])
            last[s] = finish = begin + work[task]
            load[s] -= work[task]
            if g < updates and g % 3 != 2:
                early[s] -= work[task]
            if finish + max(load[s], early[s] + (after if early[s] > 0 else 0)) > limit:
                return NONE
        start[task], end[task] = begin, finish
        if finish + tails[g] > limit:
            return NONE
        latest = max(latest, finish)
        for b in range(first[g], first[g + 1]):
            p = pointer[bundles[b]] + task - base[g]
            for a in range(arcs[p], arcs[p + 1]):
                reader = arcs[a]
                ready[reader] = max(ready[reader], finish)
                waits[reader] -= 1
                if waits[reader] == 0:
                    heapq.heappush(queue, (ready[reader], key[reader], reader))
    return latest


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
