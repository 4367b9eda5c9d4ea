"""The timeline of a simulated step for the HTML page: single tasks of a small step, columns of a large one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.report.gantt import busy_fraction
from shardplan.simulate.engine import NONE
from shardplan.simulate.figures import Simulated, top_exposed

_TASKS = 1500
"""The most tasks that are shown one by one."""
_COLUMNS = 600
"""The columns of a step with more tasks."""
_EXPOSED = 10
"""The most collectives that are listed as exposed."""


@dataclass(frozen=True, slots=True)
class StreamBars:
    """The bars of one stream: each begins at ``start_s``, lasts ``seconds`` and has the name `Bars.labels[label]`.

    ``busy`` is the fraction of a bar's time in which the stream is busy, ``exposed`` the fraction in which it communicates
    while the device does not compute.
    """

    name: str
    communicates: bool
    busy_s: float
    start_s: tuple[float, ...]
    seconds: tuple[float, ...]
    label: tuple[int, ...]
    busy: tuple[float, ...]
    exposed: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ExposedCollective:
    """A collective of a source line, with the seconds of the step in which it runs and nothing is computed."""

    name: str
    axes: tuple[str, ...]
    source: str
    times: int
    exposed_s: float


@dataclass(frozen=True, slots=True)
class Bars:
    """A simulated step as bars: tasks if ``whole``, else columns of time, each named after the task that fills most of it."""

    step_time_s: float
    exposed_s: float
    tasks: int
    whole: bool
    labels: tuple[str, ...]
    streams: tuple[StreamBars, ...]
    exposed: tuple[ExposedCollective, ...]


def bars_of(shown: Simulated) -> Bars:
    """The bars of a simulated step."""
    tasks = np.flatnonzero((shown.stream != NONE) & (shown.end_s > shown.start_s))
    whole = len(tasks) <= _TASKS
    rows = tuple(_tasks(shown, row) for row in range(len(shown.streams))) if whole else columns_of(shown)
    used = sorted({n for row in rows for n in row.label})
    at = {n: i for i, n in enumerate(used)}
    return Bars(
        step_time_s=shown.step_time_s,
        exposed_s=shown.exposed_s,
        tasks=int(shown.times[tasks].sum()),
        whole=whole,
        labels=tuple(_name(shown, n) for n in used),
        streams=tuple(_renumbered(row, at) for row in rows),
        exposed=tuple(
            ExposedCollective(label.name, label.axes, label.source, times, seconds)
            for label, seconds, times in top_exposed(shown, _EXPOSED)
        ),
    )


def columns_of(shown: Simulated) -> tuple[StreamBars, ...]:
    """The streams of a simulated step as columns of time."""
    return tuple(_columns(shown, row) for row in range(len(shown.streams)))


def _name(shown: Simulated, label: int) -> str:
    if label < 0:
        return "idle"
    one = shown.labels[label]
    over = f" over {' x '.join(one.axes)}" if one.axes else ""
    return f"{one.name}{over} at {one.source}"


def _renumbered(row: StreamBars, at: dict[int, int]) -> StreamBars:
    labels = tuple(at[n] for n in row.label)
    return StreamBars(row.name, row.communicates, row.busy_s, row.start_s, row.seconds, labels, row.busy, row.exposed)


def _tasks(shown: Simulated, row: int) -> StreamBars:
    """A bar for each task of a stream."""
    own = np.flatnonzero((shown.stream == row) & (shown.end_s > shown.start_s))
    own = own[np.argsort(shown.start_s[own], kind="stable")]
    seconds = (shown.end_s - shown.start_s)[own]
    exposed = np.where(shown.communicates[own], 1.0 - shown.hidden_s[own] / seconds, 0.0)
    return _bars(shown, row, shown.start_s[own], seconds, shown.label[own], np.ones(len(own)), exposed)


def _columns(shown: Simulated, row: int) -> StreamBars:
    """A bar for each column of time."""
    edges = np.linspace(0.0, max(shown.step_time_s, 1e-12), _COLUMNS + 1)
    own, other = shown.stream == row, (shown.stream != row) & (shown.stream != NONE)
    busy = busy_fraction(shown, own, edges)
    sending = own & shown.communicates
    hidden = busy_fraction(shown, sending, edges, beside=other & ~shown.communicates)
    exposed = busy_fraction(shown, sending, edges) - hidden
    return _bars(shown, row, edges[:-1], np.diff(edges), _dearest(shown, own, edges), busy, exposed)


def _dearest(shown: Simulated, tasks: NDArray[np.bool_], edges: NDArray[np.float64]) -> NDArray[np.int64]:
    """[columns]: the label that takes most of each column; -1 where none of ``tasks`` runs."""
    own = np.flatnonzero(tasks & (shown.end_s > shown.start_s))
    start, end, label = shown.start_s[own], shown.end_s[own], shown.label[own]
    columns = len(edges) - 1
    first = np.clip(np.searchsorted(edges, start, side="right") - 1, 0, columns - 1)
    last = np.clip(np.searchsorted(edges, end, side="left") - 1, first, columns - 1)
    counts = last - first + 1
    task = np.repeat(np.arange(len(own)), counts)
    before: NDArray[np.int64] = np.repeat(np.cumsum(counts) - counts, counts)
    column: NDArray[np.int64] = np.arange(int(counts.sum()), dtype=np.int64) - before + first[task]
    inside = np.minimum(end[task], edges[column + 1]) - np.maximum(start[task], edges[column])
    spent = np.zeros((columns, len(shown.labels)))
    np.add.at(spent, (column, label[task]), inside)
    return np.where(spent.any(1), spent.argmax(1), -1) if spent.size else np.full(columns, -1)


def _bars(
    shown: Simulated,
    row: int,
    start_s: NDArray[np.float64],
    seconds: NDArray[np.float64],
    label: NDArray[np.int32] | NDArray[np.int64],
    busy: NDArray[np.float64],
    exposed: NDArray[np.float64],
) -> StreamBars:
    """The bars in which a stream is busy."""
    some = busy > 0
    name = shown.streams[row]
    return StreamBars(
        name=name,
        communicates=shown.kinds[row] == "link",
        busy_s=shown.busy_s[name],
        start_s=_rounded(start_s[some]),
        seconds=_rounded(seconds[some]),
        label=tuple(int(n) for n in label[some].tolist()),
        busy=tuple(np.round(np.clip(busy[some], 0, 1), 3).tolist()),
        exposed=tuple(np.round(np.clip(exposed[some], 0, 1), 3).tolist()),
    )


def _rounded(values: NDArray[np.float64]) -> tuple[float, ...]:
    """Six significant digits: more cannot be seen."""
    return tuple(float(f"{x:.6g}") for x in values.tolist())
