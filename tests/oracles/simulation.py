"""An independent simulation of tasks on streams: exact fractions, no queues; every instant looks at every task.

It is slow on purpose. Each stream takes, of the tasks that are ready, the one of the least key; then time passes until the next
task ends, each task at its own constant rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Task:
    """``work`` alone, on a stream (None: no stream), after other tasks."""

    work: int
    stream: int | None
    after: Sequence[int]
    priority: int


@dataclass(frozen=True)
class Line:
    """A stream."""

    kind: str
    device: int = 0
    fifo: bool = False


def simulate(
    tasks: Sequence[Task], lines: Sequence[Line], compute: Fraction = Fraction(1), link: Fraction = Fraction(1)
) -> list[tuple[Fraction, Fraction]]:
    """(start, end) of each task; ``compute`` and ``link`` are the contention factors."""
    now = Fraction(0)
    start: dict[int, Fraction] = {}
    end: dict[int, Fraction] = {}
    left = {i: Fraction(t.work) for i, t in enumerate(tasks)}
    while len(end) < len(tasks):
        while joins := [i for i, t in enumerate(tasks) if t.stream is None and i not in end and all(a in end for a in t.after)]:
            start |= dict.fromkeys(joins, now)
            end |= dict.fromkeys(joins, now)
        running = {t.stream: i for i, t in enumerate(tasks) if i in start and i not in end}
        for s, line in enumerate(lines):
            waiting = [i for i, t in enumerate(tasks) if t.stream == s and i not in start and all(a in end for a in t.after)]
            if s in running or not waiting:
                continue

            ready = {i: max((end[a] for a in tasks[i].after), default=Fraction(0)) for i in waiting}
            keys = {i: (ready[i], tasks[i].priority) if line.fifo else (tasks[i].priority, ready[i]) for i in waiting}
            running[s] = min(waiting, key=lambda i, keys=keys: (*keys[i], i))
            start[running[s]] = now
        if not running:
            assert len(end) == len(tasks), "a circle"
            break
        busy = {(lines[s].device, lines[s].kind) for s in running if s is not None}

        rates = {s: _factor(lines[s], busy, compute, link) for s in running if s is not None}
        step = min(left[i] * rates[s] for s, i in running.items() if s is not None)
        now += step
        for s, i in running.items():
            assert s is not None
            left[i] -= step / rates[s]
            if left[i] == 0:
                end[i] = now
    return [(start[i], end[i]) for i in range(len(tasks))]


def _factor(line: Line, busy: set[tuple[int, str]], compute: Fraction, link: Fraction) -> Fraction:
    """How many times as long the task of a stream takes beside what is busy now."""
    if line.kind == "compute" and (line.device, "link") in busy:
        return compute
    return link if line.kind == "link" and (line.device, "compute") in busy else Fraction(1)
