"""The timeline of a placed step: a row for each device and each connection in use, as trace events and as a picture."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardplan.placement.device_topology import TICK_S
from shardplan.placement.simulation import Simulation
from shardplan.plans.files import write_whole
from shardplan.report.draw import new_figure, picture_format, rendered
from shardplan.report.tables import seconds

_COLOURS = ("#1f5fa8", "#c97b1a", "#4c4c4c", "#8fbf8f")
_KINDS = ("forward", "backward", "update", "transfer")


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class PlacementTimeline:
    """When each task of a placed step runs.

    Task n of ``names[name[n]]`` runs in ``rows[row[n]]`` from ``start_s`` to ``end_s`` [tasks]. ``kind`` [tasks] is 0 to 2 for
    the phases of operators, 3 for transfers.
    """

    step_time_s: float
    rows: tuple[str, ...]
    names: tuple[str, ...]
    name: NDArray[np.int64]
    kind: NDArray[np.int64]
    row: NDArray[np.int64]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.start_s)

    def __repr__(self) -> str:
        return f"<PlacementTimeline of {len(self)} tasks in {len(self.rows)} rows: {self.step_time_s:.3g} s a step>"

    def busy_s(self) -> NDArray[np.float64]:
        """[rows]: the seconds in which each device or connection is busy."""
        return np.bincount(self.row, self.end_s - self.start_s, len(self.rows)).astype(np.float64)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes Chrome's trace events as JSON, for Perfetto (https://ui.perfetto.dev); the file is replaced once complete.

        Raises:
            ShardplanError: if the file cannot be written.
        """
        write_whole(Path(file), _trace(self))

    def draw(self, file: str | os.PathLike[str], *, title: str = "") -> None:
        """Draws a Gantt chart. The suffix of ``file`` sets the format: .png, .svg or .pdf.

        Raises:
            ShardplanError: for another suffix, if matplotlib is not installed, or if the file cannot be written.
        """
        suffix = picture_format(os.fspath(file))
        write_whole(Path(file), _gantt(self, title, suffix))


def placement_timeline(simulation: Simulation) -> PlacementTimeline:
    """The timeline of the present strategy of a simulation; connections that carry nothing have no row."""
    times, graph, machine = simulation.times(), simulation.graph, simulation.machine
    on = times.stream >= 0
    group, stream = times.group[on], times.stream[on]
    used, row = np.unique(np.concatenate([np.arange(machine.count), stream]), return_inverse=True)
    devices = [f"device {d}{' (absent)' if d in machine.absent else ''}" for d in range(machine.count)]
    rows: list[str] = [[*devices, *machine.links][s] for s in used.tolist()]
    n, edges = 3 * len(graph.operators), 2 * len(graph.edges)
    names = [f"{o.name} {phase}" for o in graph.operators for phase in _KINDS[:3]]
    for e in graph.edges:
        between = graph.operators[e.producer].name, graph.operators[e.consumer].name
        names += [f"{between[0]} to {between[1]}", f"gradient, {between[1]} to {between[0]}"]
    names += [f"reduce {w.path}" for w in graph.weights for _ in range(2)]
    assert len(names) == n + edges + 2 * len(graph.weights), "a name for each group"
    return PlacementTimeline(
        simulation.seconds,
        tuple(rows),
        tuple(names),
        group,
        np.where(group < n, group % 3, 3),
        row[machine.count :],
        (times.start[on] * TICK_S).astype(np.float64),
        (times.end[on] * TICK_S).astype(np.float64),
    )


def _trace(shown: PlacementTimeline) -> Iterator[bytes]:
    """The file in parts: a thread for each row, a complete event for each task."""
    yield b'{"displayTimeUnit": "ms", "otherData": ' + json.dumps({"step_time_s": shown.step_time_s}).encode()
    yield b', "traceEvents": [\n{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "devices and connections"}}'
    for row, name in enumerate(shown.rows):
        where = {"pid": 1, "tid": row}
        yield b",\n" + json.dumps({"ph": "M", **where, "name": "thread_name", "args": {"name": name}}).encode()
        yield b",\n" + json.dumps({"ph": "M", **where, "name": "thread_sort_index", "args": {"sort_index": row}}).encode()
    order = np.lexsort((shown.start_s, shown.row))
    for n in order.tolist():
        start = round(float(shown.start_s[n]) * 1e9)
        event = {
            "ph": "X",
            "pid": 1,
            "tid": int(shown.row[n]),
            "ts": start / 1e3,
            "dur": (round(float(shown.end_s[n]) * 1e9) - start) / 1e3,
            "name": shown.names[int(shown.name[n])],
            "cat": _KINDS[int(shown.kind[n])],
        }
        yield b",\n" + json.dumps(event).encode()
    yield b"\n]}\n"


def _gantt(shown: PlacementTimeline, title: str, suffix: str) -> bytes:
    """The bytes of a picture: a bar for each task. Equal timelines give equal bytes."""
    figure: Any = new_figure(dpi=120)
    count = len(shown.rows)
    figure.set_size_inches(11.0, 1.4 + 0.28 * count)
    axes = figure.subplots()
    for kind, (colour, name) in enumerate(zip(_COLOURS, _KINDS, strict=True)):
        axes.fill_between([], [], color=colour, label=name)
        for row in range(count):
            own = np.flatnonzero((shown.row == row) & (shown.kind == kind))
            bars = np.stack([shown.start_s[own], shown.end_s[own] - shown.start_s[own]], axis=1) * 1e3
            axes.broken_barh(bars.tolist(), (row - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.2)
    axes.set_yticks(range(count), shown.rows, fontsize=7)
    axes.set_ylim(count - 0.5, -0.5)
    axes.set_xlim(0, max(shown.step_time_s, 1e-12) * 1e3)
    axes.set_xlabel("time [ms]", fontsize=8)
    axes.set_title(f"{title}\n" * bool(title) + f"step {seconds(shown.step_time_s)}", fontsize=9, loc="left")
    axes.legend(fontsize=7, ncols=4, loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.tight_layout()
    return rendered(figure, suffix)
