"""A timeline as Chrome's trace events, which Perfetto opens.

A process is a class of devices that run alike, a thread is a stream. Tasks are complete events ("X"), memory is a counter ("C"),
and the critical path is one flow through its tasks ("s", "t", "f"). Times are microseconds with three decimals: each instant is
rounded down to a nanosecond, so tasks of a stream do not overlap.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardplan.simulate.figures import Simulated, timeline_json

_PID = 1
_CHUNK = 10_000


def trace(shown: Simulated) -> Iterator[bytes]:
    """The file in parts, so that no string holds all events."""
    yield b'{"displayTimeUnit": "ms", "otherData": ' + json.dumps(timeline_json(shown)).encode() + b', "traceEvents": [\n'
    yield ",\n".join(json.dumps(event) for event in _names(shown)).encode()
    for stream in range(len(shown.streams)):
        yield from _tasks(shown, stream)
    yield from _memory(shown)
    yield b"\n]}\n"


def _names(shown: Simulated) -> Iterator[dict[str, Any]]:
    """The metadata: names of processes and threads, in their order."""
    devices = shown.priced.devices
    name = "device" if devices == 1 else f"each of {devices} devices"
    yield {"ph": "M", "pid": _PID, "name": "process_name", "args": {"name": name}}
    for stream, stream_name in enumerate(shown.streams):
        yield {"ph": "M", "pid": _PID, "tid": 1 + stream, "name": "thread_name", "args": {"name": stream_name}}
        yield {"ph": "M", "pid": _PID, "tid": 1 + stream, "name": "thread_sort_index", "args": {"sort_index": stream}}


def _ns(seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.floor(seconds * 1e9 + 1e-7).astype(np.int64)


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


def _tasks(shown: Simulated, stream: int) -> Iterator[bytes]:
    """The tasks of a stream in their order, each followed by its step of the flow if it has one."""
    own = np.flatnonzero(shown.stream == stream)
    own = own[np.lexsort((shown.end_s[own], shown.start_s[own]))]
    heads = [_head(shown, n) for n in range(len(shown.labels))]
    flow = _flow(shown)
    for at in range(0, len(own), _CHUNK):
        some = own[at : at + _CHUNK]
        rows = zip(
            _ns(shown.start_s[some]).tolist(), _ns(shown.end_s[some]).tolist(), shown.label[some].tolist(), flow[some].tolist(),
            shown.times[some].tolist(), strict=True,
        )  # fmt: skip
        yield "".join(_events(heads, stream, *row) for row in rows).encode()


def _head(shown: Simulated, label: int) -> str:
    """The part of an event that all tasks of a label share, up to the end of its arguments."""
    one = shown.labels[label]
    args: dict[str, Any] = {"source": one.source}
    if one.axes:
        args |= {"bytes": one.nbytes, "axes": list(one.axes)}
    category = "communication" if one.axes else "compute"
    return f'"name": {json.dumps(one.name)}, "cat": "{category}", "args": {json.dumps(args)[:-1]}'


def _flow(shown: Simulated) -> NDArray[np.int64]:
    """[n]: 0 for tasks that are not on the critical path, 1 for its first task, 3 for its last, 2 for all others."""
    flow = np.zeros(len(shown), np.int64)
    path = shown.critical_path
    if len(path) > 1:
        flow[path], flow[path[0]], flow[path[-1]] = 2, 1, 3
    return flow


def _events(heads: Sequence[str], stream: int, start: int, end: int, label: int, flow: int, times: int) -> str:
    where = f'"pid": {_PID}, "tid": {1 + stream}'
    event = f',\n{{"ph": "X", {where}, "ts": {_us(start)}, "dur": {_us(end - start)}, {heads[label]}'
    event += "}}" if times == 1 else f', "times": {times}}}}}'
    if flow:
        ends = ', "bp": "e"' if flow == 3 else ""
        ts = _us((start + end) // 2)
        name = '"id": 1, "name": "critical path", "cat": "critical path"'
        event += f',\n{{"ph": "{"stf"[flow - 1]}", {where}, "ts": {ts}, {name}{ends}}}'
    return event


def _memory(shown: Simulated) -> Iterator[bytes]:
    """A counter event wherever the bytes in memory change."""
    at, nbytes = _ns(shown.memory_at_s), np.rint(shown.memory_bytes).astype(np.int64)
    last = np.append(at[1:] != at[:-1], True) if len(at) else np.zeros(0, bool)  # the last value of each instant
    at, nbytes = at[last], nbytes[last]
    for n in range(0, len(at), _CHUNK):
        rows = zip(at[n : n + _CHUNK].tolist(), nbytes[n : n + _CHUNK].tolist(), strict=True)
        yield "".join(
            f',\n{{"ph": "C", "pid": {_PID}, "ts": {_us(ts)}, "name": "memory", "args": {{"bytes": {held}}}}}'
            for ts, held in rows
        ).encode()
