"""The loop of both simulations, over arrays: it runs compiled by Numba, or as plain Python.

`prepare` finds what the tasks that run again wait for, `rerun` runs them in the order in which they are ready (FlexFlow,
Algorithm 1).
"""

from __future__ import annotations

import heapq
from typing import Any

NONE = -1
NEVER = 1 << 62


def prepare(
    again: Any, border: Any, runs: Any, group: Any, base: Any, first: Any, bundles: Any, pointer: Any, arcs: Any, waits: Any, ready: Any, end: Any
) -> None:
    """Counts for the tasks ``again`` how many others of them they wait for, and when the tasks at the ``border`` release them."""
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


def rerun(
    again: Any,
    work: Any,
    stream: Any,
    key: Any,
    group: Any,
    base: Any,
    first: Any,
    bundles: Any,
    pointer: Any,
    arcs: Any,
    waits: Any,
    ready: Any,
    start: Any,
    end: Any,
    last: Any,
    tails: Any,
    limit: int,
) -> int:
    """Runs the tasks ``again``; the last instant, or `NONE` once it is certain to lie beyond ``limit``.

    A connection or device takes tasks in the order in which they are ready, ties by ``key``. ``last`` is when each is free.
    """
    queue = [(ready[t], key[t], t) for t in again if waits[t] == 0]
    heapq.heapify(queue)
    latest = 0
    while len(queue) > 0:
        begin, _, task = heapq.heappop(queue)
        s = stream[task]
        if s >= 0 and last[s] > begin:
            begin = last[s]
        finish = begin + work[task]
        if s >= 0:
            last[s] = finish
        start[task] = begin
        end[task] = finish
        g = group[task]
        if finish + tails[g] > limit:
            return NONE
        if finish > latest:
            latest = finish
        for b in range(first[g], first[g + 1]):
            p = pointer[bundles[b]] + task - base[g]
            for a in range(arcs[p], arcs[p + 1]):
                reader = arcs[a]
                if ready[reader] < finish:
                    ready[reader] = finish
                waits[reader] -= 1
                if waits[reader] == 0:
                    heapq.heappush(queue, (ready[reader], key[reader], reader))
    return latest
