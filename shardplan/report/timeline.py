"""A timeline: a step as it is simulated (FlexFlow, section 5), with its files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardplan.cost import busy
from shardplan.cost.simulator import NONE, Contention, Run, simulate
from shardplan.plans.files import write_whole
from shardplan.report.draw import picture_format
from shardplan.report.gantt import gantt
from shardplan.report.simulated import Priced, Simulated
from shardplan.report.trace import trace
from shardplan.schedule.tasks import StepTasks


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Timeline(Simulated):
    """A simulated step that can be saved and drawn. Made by `Plan.simulate`."""

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes Chrome's trace events as JSON, for Perfetto (https://ui.perfetto.dev); the file is replaced once complete.

        Raises:
            ShardplanError: if the file cannot be written.
        """
        write_whole(Path(file), trace(self))

    def draw(self, file: str | os.PathLike[str], *, title: str = "") -> None:
        """Draws streams and memory over the step. The suffix of ``file`` sets the format: .png, .svg or .pdf.

        Raises:
            ShardplanError: for another suffix, if matplotlib is not installed, or if the file cannot be written.
        """
        suffix = picture_format(os.fspath(file))
        write_whole(Path(file), gantt(self, title=title, suffix=suffix))


def timeline(tasks: StepTasks, priced: Priced, *, overlap: bool, contention: Contention) -> Timeline:
    """Simulates the tasks of a step. Without ``overlap`` they run one after the other, in the order of the program."""
    graph = tasks.graph
    kinds = np.array([s.kind == "link" for s in graph.streams])
    communicates = np.where(graph.stream == NONE, False, kinds[graph.stream])
    shown = tasks if overlap else tasks.in_program_order()
    run = simulate(shown.graph, contention)
    hidden_s = _hidden_s(run) if overlap else np.zeros(len(tasks))
    held = tasks.held
    memory_at_s, memory_bytes = busy.memory(run, held.nbytes, held.birth, held.value, held.reader)
    streams = shown.graph.streams
    return Timeline(
        step_time_s=run.seconds,
        overlap=overlap,
        contention=contention,
        streams=tuple(s.name for s in streams),
        kinds=tuple(s.kind for s in streams),
        busy_s=dict(zip((s.name for s in streams), busy.busy_s(run).tolist(), strict=True)),
        exposed_s=_exposed_s(run, communicates),
        critical_path=run.critical_path,
        labels=tasks.labels,
        label=tasks.label,
        stream=shown.graph.stream,
        start_s=run.start_s,
        end_s=run.end_s,
        seconds=graph.seconds,
        communicates=communicates,
        hidden_s=np.where(communicates, hidden_s, 0.0),
        memory_at_s=memory_at_s,
        memory_bytes=memory_bytes,
        priced=priced,
    )


def _hidden_s(run: Run) -> NDArray[np.float64]:
    """[n]: the seconds of each task in which the device computes."""
    return sum(
        (busy.beside_s(run, s) for s, stream in enumerate(run.graph.streams) if stream.kind == "compute"),
        np.zeros(len(run.graph)),
    )


def _exposed_s(run: Run, communicates: NDArray[np.bool_]) -> float:
    """The seconds in which the device communicates and does not compute."""
    computing = np.unique(run.graph.stream[~communicates & (run.graph.stream != NONE)])
    if len(run.graph.streams) == 1:
        return float((run.end - run.start)[communicates].sum()) * run.tick_s
    every = np.arange(len(run.graph.streams))
    return busy.covered_s(run, every) - busy.covered_s(run, computing)
