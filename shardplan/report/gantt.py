"""Draws a timeline: a row for each stream, and memory below (needs matplotlib, the extra ``draw``).

A step may have a million tasks. So a column of the picture shows the fraction of its time in which a stream is busy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardplan.report.draw import new_figure, rendered
from shardplan.report.tables import seconds, size
from shardplan.simulate.engine import NONE
from shardplan.simulate.figures import Simulated

_COLUMNS = 1200
_COMPUTE, _HIDDEN, _EXPOSED = "#1f5fa8", "#8fbf8f", "#c0262d"
_HEIGHT = 0.75


def gantt(shown: Simulated, *, title: str, suffix: str) -> bytes:
    """The bytes of a picture file in the format ``suffix``. Equal timelines give equal bytes."""
    figure = new_figure(dpi=120)
    rows = len(shown.streams)
    figure.set_size_inches(11.0, 1.4 + 0.5 * rows + 1.8)
    streams, held = figure.subplots(2, 1, sharex=True, height_ratios=[0.5 * rows, 1.8])
    edges = np.linspace(0.0, max(shown.step_time_s, 1e-12), _COLUMNS + 1)
    for row in range(rows):
        _stream(streams, shown, row, edges)
    streams.set_yticks(range(rows), shown.streams)
    streams.set_ylim(rows - 0.5, -0.5)
    streams.set_title(_title(shown, title), fontsize=9, loc="left")
    for colour, name in ((_COMPUTE, "computes"), (_HIDDEN, "sends beside compute"), (_EXPOSED, "sends alone")):
        streams.fill_between([], [], color=colour, label=name)
    streams.legend(fontsize=7, ncols=3, loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False)
    _memory(held, shown)
    figure.tight_layout()
    return rendered(figure, suffix)


def _title(shown: Simulated, title: str) -> str:
    overlap = f"exposed {seconds(shown.exposed_s)}" if shown.overlap else "one after the other"
    return f"{title}\n" * bool(title) + f"step {seconds(shown.step_time_s)}, {overlap}"


def _stream(axes: Any, shown: Simulated, row: int, edges: NDArray[np.float64]) -> None:
    """Draws one stream: the busy fraction of each column, in red for collectives without compute beside them."""
    own = shown.stream == row
    computing, sending = own & ~shown.communicates, own & shown.communicates
    beside = (shown.stream != row) & (shown.stream != NONE) & ~shown.communicates
    bottom = np.full(len(edges) - 1, row + _HEIGHT / 2)
    hidden = busy_fraction(shown, sending, edges, beside=beside)
    heights = (busy_fraction(shown, computing, edges), hidden, busy_fraction(shown, sending, edges) - hidden)
    for part, colour in zip(heights, (_COMPUTE, _HIDDEN, _EXPOSED), strict=True):
        top = bottom - _HEIGHT * part
        axes.fill_between(np.repeat(edges, 2)[1:-1] * 1e3, np.repeat(bottom, 2), np.repeat(top, 2), color=colour, lw=0)
        bottom = top


def busy_fraction(
    shown: Simulated, tasks: NDArray[np.bool_], edges: NDArray[np.float64], *, beside: NDArray[np.bool_] | None = None
) -> NDArray[np.float64]:
    """[columns]: the fraction of each column in which one of ``tasks`` runs (if given, at once with one of ``beside``)."""
    both = tasks if beside is None else tasks | beside
    instants = np.unique(np.concatenate([edges, shown.start_s[both], shown.end_s[both]]))
    middle = (instants[1:] + instants[:-1]) / 2  # nothing begins or ends between two instants
    runs = _runs_at(shown, tasks, middle)
    if beside is not None:
        runs &= _runs_at(shown, beside, middle)
    column = np.clip(np.searchsorted(edges, middle, side="right") - 1, 0, len(edges) - 2)
    return np.bincount(column, np.diff(instants) * runs, len(edges) - 1) / np.diff(edges)


def _runs_at(shown: Simulated, tasks: NDArray[np.bool_], instants: NDArray[np.float64]) -> NDArray[np.bool_]:
    """[instants]: whether one of these tasks runs at each instant; no two of them may run at once."""
    own = np.flatnonzero(tasks & (shown.end_s > shown.start_s))
    if not len(own):
        return np.zeros(len(instants), bool)
    own = own[np.argsort(shown.start_s[own], kind="stable")]
    at = np.searchsorted(shown.start_s[own], instants, side="right") - 1
    return (at >= 0) & (shown.end_s[own][np.maximum(at, 0)] > instants)


def _memory(axes: Any, shown: Simulated) -> None:
    """The bytes in memory, and the peak that the plan predicts."""
    gib = 2.0**30
    ends = np.append(shown.memory_at_s, shown.step_time_s)
    axes.fill_between(
        ends * 1e3, np.append(shown.memory_bytes, shown.memory_bytes[-1:]) / gib, step="post", color="#cccccc", lw=0
    )
    axes.axhline(shown.priced.peak_bytes / gib, color="#555555", lw=0.8, ls="--")
    text = f"the plan's peak, {size(shown.priced.peak_bytes)}"
    axes.annotate(text, (0.0, shown.priced.peak_bytes / gib), xytext=(3, 3), textcoords="offset points", fontsize=7)
    axes.set_ylim(0, 1.2 * max(shown.priced.peak_bytes, shown.peak_bytes, 1) / gib)
    axes.set_xlim(0, max(shown.step_time_s, 1e-12) * 1e3)
    axes.set_ylabel("memory [GiB]", fontsize=8)
    axes.set_xlabel("time [ms]", fontsize=8)
