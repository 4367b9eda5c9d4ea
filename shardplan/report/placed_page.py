"""The HTML page of a plan with groups of devices: where and when each line runs, and how arrays lie in each group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from shardplan.ir import Op
from shardplan.plans.data import TriedPlacement
from shardplan.plans.placed_data import PlacedData
from shardplan.regions.buffers import most_held
from shardplan.regions.loops import loop_of
from shardplan.regions.placed import PlacedStep
from shardplan.report.html_arrays import ArrayRow, explained_rows
from shardplan.report.html_collectives import CollectiveRow, folded_collectives
from shardplan.report.html_page import axis_values, filled_page, machine_values
from shardplan.report.parallelism import purposes_text
from shardplan.report.placed_text import PlacedFigures, placed_text
from shardplan.report.placed_timeline import PlacedTimeline
from shardplan.report.tables import device_ranges, seconds, size

_MOST = 1500
"""The most bars of a row; in a row with more, neighbours of one kind are joined."""
_KINDS = ("forward compute", "backward compute", "update", "transfer")
_BUBBLE = "bubble"


@dataclass(frozen=True, slots=True)
class GroupView:
    """One group: its devices and mesh, the seconds of a step in which it computes and waits, the most bytes that a device of it
    holds, the layouts of its arguments, and its collectives. ``why`` is its explanation by `plan.explain`.
    """

    number: int
    devices: tuple[int, ...]
    ranges: str
    axes: tuple[Mapping[str, Any], ...]
    purposes: str
    busy_s: float
    wait_s: float
    held_bytes: int
    why: str
    arrays: tuple[ArrayRow, ...]
    collectives: tuple[CollectiveRow, ...]


@dataclass(frozen=True, slots=True)
class LineRow:
    """A source line of the step with the group that runs it, and its ops in the forward and in the backward pass."""

    source: str
    group: int
    forward: int
    backward: int


@dataclass(frozen=True, slots=True)
class RowBars:
    """The runs and waits of a group, or the transfers from one group to another, as bars: each begins at ``start_s``, lasts
    ``seconds``, and has a kind and the name `Rows.labels[label]`.
    """

    name: str
    busy_s: float
    start_s: tuple[float, ...]
    seconds: tuple[float, ...]
    label: tuple[int, ...]
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """The planned order of a step: the rows of groups, then those of transfers."""

    step_time_s: float
    labels: tuple[str, ...]
    streams: tuple[RowBars, ...]


@dataclass(frozen=True, slots=True)
class PlacedPage:
    """All that a page shows. Seconds are of one step, bytes of one device."""

    title: str
    facts: tuple[tuple[str, str], ...]
    figures: Mapping[str, Any]
    cluster: Mapping[str, Any]
    groups: tuple[GroupView, ...]
    lines: tuple[LineRow, ...]
    timeline: Rows
    tried: tuple[TriedPlacement, ...]


def placed_page(plan: PlacedData, placed: PlacedStep, shown: PlacedTimeline, figures: PlacedFigures, limit: int) -> str:
    """The page of a plan that has explanations; ``limit`` is the bytes that a device may hold."""
    data = PlacedPage(
        title=figures.title,
        facts=tuple(_facts(plan, figures, limit)),
        figures={**figures.figures, "bubble_s": shown.bubble_s, "memory_limit": limit},
        cluster=machine_values(plan.cluster),
        groups=tuple(_groups(plan, placed)),
        lines=tuple(_lines(plan, placed)),
        timeline=_rows(shown),
        tried=plan.placements_tried,
    )
    return filled_page(f"{data.title} on {plan.cluster.name}", asdict(data), placed_text(figures), "groups.js")


def _facts(plan: PlacedData, shown: PlacedFigures, limit: int) -> Iterator[tuple[str, str]]:
    figures, graph = shown.figures, shown.placed.graph
    yield "groups", f"{len(plan.groups)} ({plan.origin})"
    yield "runs", f"{len(graph.pieces)} programs, {len(graph.tasks)} runs of them a step, {shown.microbatches} microbatches"
    yield "step time", f"{seconds(figures['step_time_s'])}; devices compute nothing for {figures['idle_share']:.0%} of it"
    yield "between groups", f"{size(figures['transfer_bytes'])} in {len(graph.transfers)} transfers"
    yield "memory", f"{size(figures['peak_bytes'])} a device at most, of {size(limit)}"
    yield "planned in", seconds(figures["trace_s"] + figures["search_s"])
    if plan.stopped:
        yield "ended early by", plan.stopped


# -- groups ------------------------------------------------------------------------------------------------------------


def _groups(plan: PlacedData, placed: PlacedStep) -> Iterator[GroupView]:
    explanations = plan.explanations or {}
    _, *whys = explanations.get("", "").split("\n\n")
    for n, (devices, own) in enumerate(zip(plan.devices, plan.groups, strict=True)):
        busy_s = placed.dispatch.busy_s(placed.graph, n)
        yield GroupView(
            number=n,
            devices=devices,
            ranges=device_ranges(devices),
            axes=axis_values(own),
            purposes=purposes_text(own),
            busy_s=busy_s,
            wait_s=placed.dispatch.step_time_s - busy_s,
            held_bytes=most_held(placed.graph, placed.dispatch, n, inside=True),
            why=whys[n] if n < len(whys) else "",
            arrays=explained_rows(own, [path for path, group in plan.group_of.items() if group == n], explanations),
            collectives=folded_collectives(own.collectives),
        )


def _lines(plan: PlacedData, placed: PlacedStep) -> Iterator[LineRow]:
    """The source lines by group, each group's in the order of the step."""
    counts: dict[tuple[int, str], list[int]] = {}
    for op, group in _placed_ops(plan, placed):
        counts.setdefault((group, str(op.source)), [0, 0])[op.backward] += 1
    for (group, source), (forward, backward) in sorted(counts.items(), key=lambda row: row[0][0]):
        if source != "?":  # an op without a source line
            yield LineRow(source, group, forward, backward)


def _placed_ops(plan: PlacedData, placed: PlacedStep) -> Iterator[tuple[Op, int]]:
    """The ops of the step, each with its group: those of a pipeline's microbatch, then those outside of its loop."""
    if plan.inner is not None:
        inner = plan.inner_groups
        yield from ((op, inner[op.id]) for op in loop_of(placed.program).bodies[0].ops if op.id in inner)
    yield from ((op, plan.outer[op.id]) for op in placed.program.ops if op.id in plan.outer)


# -- the timeline ------------------------------------------------------------------------------------------------------

_Bar = tuple[float, float, str, int]
"""(start, end, kind, label)."""


def _rows(shown: PlacedTimeline) -> Rows:
    joined, waits = len(shown.names), len(shown.names) + 1
    busy_s = shown.busy_s().tolist()
    rows: list[RowBars] = []
    for number, name in enumerate(shown.rows):
        bars = _joined(_bars(shown, number), shown.step_time_s, joined)
        bars = [*bars, *_bubbles(bars, shown.step_time_s, waits)] if number < shown.groups else bars
        start, end, kinds, label = (tuple(column) for column in zip(*bars, strict=True)) if bars else ((), (), (), ())
        spans = tuple(_short(b - a) for a, b in zip(start, end, strict=True))
        rows.append(RowBars(name, busy_s[number], tuple(map(_short, start)), spans, label, kinds))
    return Rows(shown.step_time_s, (*shown.names, "several runs", "waits"), tuple(rows))


def _bars(shown: PlacedTimeline, row: int) -> list[_Bar]:
    own = np.flatnonzero(shown.row == row)
    own = own[np.argsort(shown.start_s[own], kind="stable")]
    columns = (shown.start_s[own].tolist(), shown.end_s[own].tolist(), shown.kind[own].tolist(), shown.name[own].tolist())
    return [(start, end, _KINDS[kind], name) for start, end, kind, name in zip(*columns, strict=True)]


def _joined(bars: list[_Bar], step_time_s: float, label: int) -> list[_Bar]:
    """The bars of a row; if they are too many, neighbours of one kind are joined where the gap is too short to be seen."""
    if len(bars) <= _MOST:
        return bars
    found: list[_Bar] = []
    for start, end, kind, name in bars:
        if found and found[-1][2] == kind and start - found[-1][1] <= step_time_s / _MOST:
            found[-1] = (found[-1][0], max(end, found[-1][1]), kind, label)
        else:
            found.append((start, end, kind, name))
    return found


def _bubbles(bars: Sequence[_Bar], step_time_s: float, label: int) -> Iterator[_Bar]:
    """The waits of a group that are long enough to be seen."""
    at = 0.0
    for start, end in [*((bar[0], bar[1]) for bar in bars), (step_time_s, step_time_s)]:
        if start - at > step_time_s / (2 * _MOST):
            yield at, start, _BUBBLE, label
        at = max(at, end)


def _short(value: float) -> float:
    """Six significant digits: more cannot be seen."""
    return float(f"{value:.6g}")
