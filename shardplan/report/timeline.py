"""A timeline: a simulated step (FlexFlow, section 5) that can be saved and drawn."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path

from shardplan.plans.data import PlanData
from shardplan.plans.files import write_whole
from shardplan.report.chrome_trace import trace
from shardplan.report.draw import picture_format
from shardplan.report.gantt import gantt
from shardplan.simulate.figures import PlannedFigures, Simulated


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


def priced_of(plan: PlanData) -> PlannedFigures:
    """The figures of a plan that its timeline is compared with."""
    devices = 1
    for level in plan.cluster.levels:
        devices *= level.size
    return PlannedFigures(
        plan.step_time_s,
        plan.compute_s + plan.host_s,
        plan.communication_s,
        plan.peak_bytes,
        plan.memory_limit,
        devices,
        plan.time_model,
        plan.backend,
    )


def timeline(step: Simulated) -> Timeline:
    """A simulated step (`shardplan.simulate.simulated_step.simulated`) that can be saved and drawn."""
    return Timeline(**{field.name: getattr(step, field.name) for field in fields(step)})
