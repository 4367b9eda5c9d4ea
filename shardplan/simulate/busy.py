"""Figures of a simulated run: how long streams are busy, alone and together, and the bytes in memory over time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardplan.simulate.engine import NONE, SimulatedRun

Floats = NDArray[np.float64]


def busy_s(run: SimulatedRun) -> Floats:
    """[streams]: the seconds in which each stream runs a task."""
    graph = run.graph
    on = graph.stream != NONE
    lengths = (run.end - run.start)[on].astype(np.float64)
    return np.asarray(np.bincount(graph.stream[on], lengths, len(graph.streams)) * run.tick_s, np.float64)


def on_stream(run: SimulatedRun, stream: int) -> NDArray[np.int64]:
    """The tasks of a stream in the order in which it runs them."""
    own = np.flatnonzero(run.graph.stream == stream)
    return own[np.lexsort((run.end[own], run.start[own]))]


def covered_s(run: SimulatedRun, streams: NDArray[np.integer[Any]]) -> float:
    """The seconds in which any of these streams is busy."""
    own = np.isin(run.graph.stream, streams)
    start, end = run.start[own], run.end[own]
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    until = np.maximum.accumulate(np.concatenate([[0], end]))[:-1]
    return float(np.maximum(end - np.maximum(start, until), 0).sum()) * run.tick_s


def beside_s(run: SimulatedRun, stream: int) -> Floats:
    """[n]: the seconds of each task in which this stream is busy too."""
    own = on_stream(run, stream)
    if not len(own):
        return np.zeros(len(run.graph))
    start, end = run.start[own], run.end[own]
    done = np.concatenate([[0], np.cumsum(end - start)])

    def until(ticks: NDArray[np.int64]) -> NDArray[np.int64]:
        at = np.searchsorted(start, ticks, side="right")
        return done[at] - np.where(at > 0, np.maximum(end[at - 1] - ticks, 0), 0)

    return np.asarray((until(run.end) - until(run.start)) * run.tick_s, np.float64)


def memory(
    run: SimulatedRun, nbytes: Floats, birth: NDArray[np.int64], value: NDArray[np.int64], reader: NDArray[np.int64]
) -> tuple[Floats, Floats]:
    """(seconds, bytes in memory from then on) of values made by tasks ``birth`` (`NONE`: there at the start).

    Value ``value[k]`` is held until task ``reader[k]`` has ended; reader n is the end of the run.
    """
    ends = np.append(run.end, run.end.max(initial=0))
    made = birth != NONE
    death = np.where(made, run.end[birth], 0) if len(run.end) else np.zeros(len(birth), np.int64)
    np.maximum.at(death, value, ends[reader])
    begin = np.where(made, run.start[birth], 0) if len(run.end) else np.zeros(len(birth), np.int64)
    at, which = np.unique(np.concatenate([begin, death]), return_inverse=True)
    change = np.bincount(which, np.concatenate([nbytes, -nbytes]), len(at))
    return np.asarray(at * run.tick_s, np.float64), np.asarray(np.maximum(np.cumsum(change), 0.0), np.float64)
