"""Pipelined programs: the data in chunks that go through the steps one behind another.

While one chunk crosses the slow level, the next is being scattered on the fast one. A step keeps a level for its latency and for
as long as its busiest link there is busy; steps of different chunks run at once where they do not want the same level. More
chunks hide more and pay every latency more often.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..cost.network import Algorithm, Network
from .dsl import Master, Reduction
from .ranking import KINDS, entries, payloads, shape_of, step_lines

CHUNKS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class _Stage:
    """One step on one chunk: how long it takes, and how long it keeps each level that it uses."""

    seconds: float
    keeps: tuple[tuple[int, float], ...]


def pipelined_seconds(
    network: Network, over: Sequence[int], program: Reduction, nbytes: float, chunks: int, *, algorithm: Algorithm = "auto"
) -> float:
    """The time of a program whose data go through it in so many equal chunks; with one chunk, that of `program_seconds`."""
    stages = _stages(network, over, program, nbytes / chunks, algorithm)
    free = [0.0] * len(network.cluster.levels)
    ready = [(0.0, chunk, 0) for chunk in range(chunks)]
    end = 0.0
    while ready and stages:
        when, chunk, number = heapq.heappop(ready)
        stage = stages[number]
        start = max([when, *(free[level] for level, _ in stage.keeps)])
        if ready and start > when and ready[0][0] < start:
            heapq.heappush(ready, (start, chunk, number))  # someone else may go first meanwhile
            continue
        for level, seconds in stage.keeps:
            free[level] = start + seconds
        done = start + stage.seconds
        end = max(end, done)
        if number + 1 < len(stages):
            heapq.heappush(ready, (done, chunk, number + 1))
    return end


def best_chunks(
    network: Network, over: Sequence[int], program: Reduction, nbytes: float, *, algorithm: Algorithm = "auto"
) -> tuple[float, int]:
    """The least time of a program over numbers of chunks (powers of two up to 32), and that number; the fewest of equals."""
    return min((pipelined_seconds(network, over, program, nbytes, n, algorithm=algorithm), n) for n in CHUNKS)


def _stages(network: Network, over: Sequence[int], program: Reduction, nbytes: float, algorithm: Algorithm) -> list[_Stage]:
    levels = entries(network, over)
    result: list[_Stage] = []
    for step, part in zip(program.steps, payloads(program, shape_of(network, levels)), strict=True):
        low, high = step.span(len(levels))
        mine = tuple(i for entry in levels[low:high] for i in entry)
        below = tuple(i for entry in levels[high:] for i in entry) if isinstance(step.form, Master) else ()
        lines = step_lines(network, levels, step, algorithm)
        times = lines[:, 0] + lines[:, 1] * part * nbytes
        pick = int(np.argmin(times))
        busy = network.busy(KINDS[step.collective], mine, first=below, algorithm=algorithm)[pick] * part * nbytes
        keeps = tuple((level, float(lines[pick, 0] + seconds)) for level, seconds in enumerate(busy) if seconds > 0)
        result.append(_Stage(float(times[pick]), keeps))
    return result
