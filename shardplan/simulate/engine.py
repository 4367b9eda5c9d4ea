"""Simulates a graph of tasks on streams: when each task runs, and which task delayed it (FlexFlow, section 5 and Algorithm 1).

A stream runs one task at a time. A task is ready when all tasks that it waits for have ended. An idle stream takes the ready task
with the lowest priority number, or the one that was ready first (Algorithm 1's FIFO). Beyond FlexFlow, a device that computes and
communicates at once does both more slowly (`Contention`). The rates are constant between two events, and the loop goes from event
to event, so the simulation is exact, not sampled.

Times are whole ticks of a femtosecond; of a thousand, a million ... femtoseconds for very long steps. A change of rates rounds
the remaining work to a tick. So the compiled and the plain loop agree to the bit, and equal parts of a step run exactly alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardplan.errors import ShardplanError
from shardplan.mesh.machine import DEFAULT_CONTENTION, MOST_CONTENTION
from shardplan.simulate import event_loop
from shardplan.simulate.compile_loops import compiled
from shardplan.simulate.event_loop import COMPUTE, HOST, LINK, NONE, State, Streams, Tasks

StreamKind = Literal["compute", "link", "host"]
"""The resource that a stream keeps busy: the arithmetic of a device, links to other devices, or copies to and from the host."""

Engine = Literal["auto", "numba", "python"]
"""The loop: compiled by Numba (the extra ``fast``), plain Python, or ("auto") compiled if that is there and tasks are many."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_KINDS: dict[StreamKind, int] = {"compute": COMPUTE, "link": LINK, "host": HOST}
_FEW = 20_000
"""Graphs with fewer tasks run as plain Python: the loop takes seconds to compile, once."""
_MOST_TICKS = 2.0**61


@dataclass(frozen=True, slots=True)
class Stream:
    """Runs one task of a device at a time: the ready one with the lowest priority number, or with ``fifo`` the first ready."""

    name: str
    kind: StreamKind
    device: int = 0
    fifo: bool = False


@dataclass(frozen=True, slots=True)
class Contention:
    """The factors, at least 1, by which communication slows compute and compute slows communication on one device.

    Raises:
        ShardplanError: for a factor below 1 or above `MOST_CONTENTION`.
    """

    compute: float = DEFAULT_CONTENTION
    communication: float = DEFAULT_CONTENTION

    def __post_init__(self) -> None:
        for name, factor in (("compute", self.compute), ("communication", self.communication)):
            if not 1.0 <= factor <= MOST_CONTENTION:
                raise ShardplanError(f"contention of {name} is {factor!r}: give a factor from 1 (none) to {MOST_CONTENTION:g}")


NO_CONTENTION = Contention(1.0, 1.0)


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """Tasks [n] on streams.

    ``seconds`` [n] is the time that a task takes alone, ``stream`` [n] its stream (-1: none; the task ends when it is ready).
    Task i waits for the tasks ``waits_for[first[i]:first[i + 1]]``; ``first`` is [n + 1]. A lower ``priority`` [n] goes first.
    """

    streams: tuple[Stream, ...]
    seconds: Floats
    stream: NDArray[np.int32]
    first: Ints
    waits_for: Ints
    priority: Ints

    def __post_init__(self) -> None:
        n = len(self.seconds)
        assert len(self.stream) == len(self.priority) == n, "an entry for each task"
        assert len(self.first) == n + 1, "a slice for each task"
        assert self.first[-1] == len(self.waits_for), "slices of all that is waited for"
        assert not n or (self.stream.min() >= NONE and self.stream.max() < len(self.streams)), "streams exist"
        assert not n or (self.seconds.min() >= 0 and np.isfinite(self.seconds).all()), "tasks take finite time"

    def __len__(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """A simulated graph: ``start`` and ``end`` [n] of each task in ticks of ``tick_s`` seconds.

    ``cause`` [n] is the task at whose end each task started: the last one that it waited for, or the one before it on its
    stream; -1 if it started at once.
    """

    graph: TaskGraph
    start: Ints
    end: Ints
    cause: Ints
    tick_s: float

    @property
    def seconds(self) -> float:
        """The seconds until the last task ends."""
        return float(self.end.max(initial=0)) * self.tick_s

    @property
    def start_s(self) -> Floats:
        """[n]: the seconds at which each task starts."""
        return np.asarray(self.start * self.tick_s, np.float64)

    @property
    def end_s(self) -> Floats:
        """[n]: the seconds at which each task ends."""
        return np.asarray(self.end * self.tick_s, np.float64)

    @property
    def critical_path(self) -> Ints:
        """The chain of tasks that determines when the last task ends, in order of time, without tasks that have no stream."""
        path: list[int] = []
        at = int(self.end.argmax()) if len(self.end) else NONE
        while at != NONE:
            path.append(at)
            at = int(self.cause[at])
        found = np.array(path[::-1], np.int64)
        return found[self.graph.stream[found] != NONE]


def simulate(graph: TaskGraph, contention: Contention = NO_CONTENTION, engine: Engine = "auto") -> SimulatedRun:
    """Runs all tasks of a graph. Both engines give the same bits.

    Raises:
        ShardplanError: if ``engine`` is "numba" and Numba is not installed.
    """
    loop, tick_s = _loop(engine, len(graph)), _tick_of(graph, contention)
    tasks, streams, state = _tasks(graph, tick_s), _streams(graph), _initial_state(graph)
    roots = np.flatnonzero(np.diff(graph.first) == 0)
    first: Any = roots if loop is not None else roots.tolist()
    if loop is None:
        tasks, streams, state = Tasks(*_lists(tasks)), Streams(*_lists(streams)), State(*_lists(state))
    begin, run = (event_loop.begin, event_loop.run) if loop is None else (loop["begin"], loop["run"])
    begin(tasks, streams, state, first)
    run(tasks, streams, state, contention.compute, contention.communication)
    start, end, cause, waits = (np.asarray(x, np.int64) for x in (state.start, state.end, state.cause, state.waits))
    assert not waits.any(), "tasks that wait for each other in a circle never run"
    return SimulatedRun(graph, start, end, cause, tick_s)


def _tick_of(graph: TaskGraph, contention: Contention) -> float:
    """The seconds of a tick, so that all tasks one after the other last fewer than `_MOST_TICKS`."""
    most = float(graph.seconds.sum()) * max(contention.compute, contention.communication)
    tick_s = 1e-15
    while most / tick_s > _MOST_TICKS:
        tick_s *= 1e3
    return tick_s


def _tasks(graph: TaskGraph, tick_s: float) -> Tasks:
    """The tasks as the loop takes them: work in ticks, and the readers of each."""
    n = len(graph)
    counts = np.bincount(graph.waits_for, minlength=n)
    by_source = np.argsort(graph.waits_for, kind="stable")
    readers = np.repeat(np.arange(n), np.diff(graph.first))[by_source]
    first_reader = np.concatenate([[0], np.cumsum(counts)])
    work = np.rint(graph.seconds / tick_s).astype(np.int64)
    arrays = (work, graph.stream, first_reader, readers, graph.priority)
    return Tasks(*(np.ascontiguousarray(x, np.int64) for x in arrays))  # type: ignore[arg-type]


def _queue_places(graph: TaskGraph) -> Ints:
    """[streams]: where the part of each stream in the queue begins."""
    counts = np.bincount(graph.stream[graph.stream != NONE], minlength=len(graph.streams))
    return np.cumsum(counts) - counts


def _streams(graph: TaskGraph) -> Streams:
    """The streams as the loop takes them."""
    columns = (
        [_KINDS[s.kind] for s in graph.streams],
        [s.device for s in graph.streams],
        [s.fifo for s in graph.streams],
        _queue_places(graph),
    )
    return Streams(*(np.asarray(x, np.int64) for x in columns))  # type: ignore[arg-type]


def _initial_state(graph: TaskGraph) -> State:
    """The state before anything runs."""
    n, s = len(graph), len(graph.streams)
    devices = 1 + max((stream.device for stream in graph.streams), default=0)

    def filled(size: int, value: int) -> Any:
        return np.full(size, value, np.int64)

    return State(
        waits=np.diff(graph.first),  # type: ignore[arg-type]
        ready=filled(n, 0),
        start=filled(n, 0),
        end=filled(n, 0),
        cause=filled(n, NONE),
        queue=filled(n, NONE),
        length=filled(s, 0),
        running=filled(s, NONE),
        remaining=filled(s, 0),
        left=filled(s, 0),
        last=filled(s, NONE),
        computing=filled(devices, 0),
        sending=filled(devices, 0),
        stack=filled(n + 1, NONE),
    )


def _lists(arrays: Tasks | Streams | State) -> list[Any]:
    return [np.asarray(x).tolist() for x in arrays]


def _loop(engine: Engine, tasks: int) -> dict[str, Any] | None:
    """The compiled functions of the loop; None for plain Python."""
    if engine not in ("auto", "numba", "python"):
        raise ShardplanError(f"no engine {engine!r}: use auto, numba or python")
    if engine == "python" or (engine == "auto" and tasks < _FEW):
        return None
    found = compiled(event_loop.FUNCTIONS)
    if found is None and engine == "numba":
        raise ShardplanError("the compiled simulator needs Numba, which is not installed: pip install 'shardplan[fast]'")
    return found
