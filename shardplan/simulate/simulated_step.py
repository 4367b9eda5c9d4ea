"""A step simulated on one device (FlexFlow, section 5): from the schedule of a plan to the figures of its tasks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardplan.schedule import PlannedProgram, Schedule
from shardplan.simulate import busy
from shardplan.simulate.engine import NO_CONTENTION, NONE, Contention, SimulatedRun, simulate
from shardplan.simulate.figures import PlannedFigures, Simulated
from shardplan.simulate.folds import unfolded
from shardplan.simulate.step_tasks import count_instructions, longest_scan, step_tasks
from shardplan.simulate.tasks import StepTasks


def simulated(
    schedule: Schedule,
    planned: PlannedProgram,
    priced: PlannedFigures,
    *,
    donated: frozenset[int] = frozenset(),
    overlap: bool = True,
    contention: Contention = NO_CONTENTION,
    iterations: int | None = None,
) -> Simulated:
    """Simulates a step. Without ``overlap`` its tasks run one after the other, in program order.

    At least ``iterations`` iterations of each scan are simulated one by one (by default all; `_FEW` in steps of more than `_MANY`
    instructions). One of them stands for the rest if that gives the same times.
    """
    tasks, run = _run(schedule, planned, donated, overlap=overlap, contention=contention, iterations=iterations)
    return _figures(tasks, run, priced, overlap=overlap, contention=contention)


def peak_bytes(schedule: Schedule, planned: PlannedProgram) -> float:
    """The most bytes that a device holds while it runs the tasks of a program one after the other; no argument is donated."""
    tasks, run = _run(schedule, planned, frozenset(), overlap=False, contention=NO_CONTENTION, iterations=None)
    held = tasks.held
    return float(busy.memory(run, held.nbytes, held.birth, held.value, held.reader)[1].max(initial=0.0))


def _run(
    schedule: Schedule,
    planned: PlannedProgram,
    donated: frozenset[int],
    *,
    overlap: bool,
    contention: Contention,
    iterations: int | None,
) -> tuple[StepTasks, SimulatedRun]:
    longest = longest_scan(schedule.body)
    if iterations is None:
        iterations = longest if count_instructions(schedule.body) <= _MANY else _FEW
    while True:
        tasks = step_tasks(schedule, planned, donated, iterations=max(iterations, 4))
        run = unfolded(simulate((tasks if overlap else tasks.in_program_order()).graph, contention), tasks.folds)
        if run is not None:
            return tasks, run
        assert iterations < longest, "a step without folds is as simulated"
        iterations *= 2


_MANY = 200_000
"""From more instructions than this on, loops are folded."""
_FEW = 8
"""The iterations that are simulated first in a folded loop."""


def _figures(tasks: StepTasks, run: SimulatedRun, priced: PlannedFigures, *, overlap: bool, contention: Contention) -> Simulated:
    """The figures of a simulated step."""
    graph = tasks.graph
    kinds = np.array([s.kind == "link" for s in graph.streams])
    communicates = np.where(graph.stream == NONE, False, kinds[graph.stream])
    hidden_s = _hidden_s(run) if overlap else np.zeros(len(tasks))
    held = tasks.held
    memory_at_s, memory_bytes = busy.memory(run, held.nbytes, held.birth, held.value, held.reader)
    streams = run.graph.streams
    return Simulated(
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
        stream=run.graph.stream,
        start_s=run.start_s,
        end_s=run.end_s,
        seconds=run.graph.seconds,
        communicates=communicates,
        times=_times(tasks),
        hidden_s=np.where(communicates, hidden_s, 0.0),
        memory_at_s=memory_at_s,
        memory_bytes=memory_bytes,
        priced=priced,
    )


def _times(tasks: StepTasks) -> NDArray[np.int64]:
    """[n]: the number of executions that each task stands for."""
    times = np.ones(len(tasks), np.int64)
    for fold in tasks.folds:
        times[fold.last + 1 - fold.size : fold.last + 1] *= 1 + fold.more
    return times


def _hidden_s(run: SimulatedRun) -> NDArray[np.float64]:
    """[n]: the seconds of each task during which the device computes."""
    return sum(
        (busy.beside_s(run, s) for s, stream in enumerate(run.graph.streams) if stream.kind == "compute"),
        np.zeros(len(run.graph)),
    )


def _exposed_s(run: SimulatedRun, communicates: NDArray[np.bool_]) -> float:
    """The seconds in which the device communicates and does not compute."""
    computing = np.unique(run.graph.stream[~communicates & (run.graph.stream != NONE)])
    if len(run.graph.streams) == 1:
        return float((run.end - run.start)[communicates].sum()) * run.tick_s
    every = np.arange(len(run.graph.streams))
    return busy.covered_s(run, every) - busy.covered_s(run, computing)
