"""Pipelined programs: chunks of the data go through the steps one after another.

While one chunk crosses the slow level, the next is scattered on the fast one. A step occupies a level for its latency plus the
time that its busiest link there is busy. Steps of different chunks overlap where they use different levels. More chunks hide
more, but pay every latency more often.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.collectives.dsl import Master, Reduction
from shardplan.collectives.ranking import entries, payloads, shape_of, step_lines
from shardplan.cost.network import Algorithm, Network

CHUNKS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class _Stage:
    """One step on one chunk: its seconds, and for each level that it uses (level, seconds occupied)."""

    seconds: float
    keeps: tuple[tuple[int, float], ...]


def pipelined_seconds(
    network: Network, over: Sequence[int], program: Reduction, nbytes: float, chunks: int, *, algorithm: Algorithm = "auto"
) -> float:
    """The time of a program whose data go through it in equal chunks; with one chunk, that of `program_seconds`."""
    stages = _stages(network, over, program, nbytes / chunks, algorithm)
    free = [0.0] * len(network.cluster.levels)
    ready = [(0.0, chunk, 0) for chunk in range(chunks)]
    end = 0.0
    while ready and stages:
        when, chunk, number = heapq.heappop(ready)
        stage = stages[number]
        start = max([when, *(free[level] for level, _ in stage.keeps)])
        if ready and start > when and ready[0][0] < start:
            heapq.heappush(ready, (start, chunk, number))  # another chunk may go first
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
    """The least time of a program over the numbers of chunks in `CHUNKS`, and that number; ties go to fewer chunks."""
    return min((pipelined_seconds(network, over, program, nbytes, n, algorithm=algorithm), n) for n in CHUNKS)


def _stages(network: Network, over: Sequence[int], program: Reduction, nbytes: float, algorithm: Algorithm) -> list[_Stage]:
    levels = entries(network, over)
    result: list[_Stage] = []
    for step, part in zip(program.steps, payloads(program, shape_of(network, levels)), strict=True):
        low, high = step.span(len(levels))
        spanned = tuple(i for entry in levels[low:high] for i in entry)
        below = tuple(i for entry in levels[high:] for i in entry) if isinstance(step.form, Master) else ()
        lines = step_lines(network, levels, step, algorithm)
        times = lines[:, 0] + lines[:, 1] * part * nbytes
        fastest = int(np.argmin(times))
        busy = network.busy(step.collective, spanned, first=below, algorithm=algorithm)[fastest] * part * nbytes
        keeps = tuple((level, float(lines[fastest, 0] + seconds)) for level, seconds in enumerate(busy) if seconds > 0)
        result.append(_Stage(float(times[fastest]), keeps))
    return result
