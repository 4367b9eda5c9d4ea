"""The timeline of a plan with groups of devices: a row for each group and each pair of groups that send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardplan.regions.placed import PlacedStep
from shardplan.regions.tasks import WHOLE, Piece, Task, Transfer
from shardplan.report.placed_text import idle_share
from shardplan.report.placement_timeline import PlacementTimeline
from shardplan.report.tables import device_ranges, seconds, table

_FORWARD, _BACKWARD, _UPDATE, _TRANSFER = range(4)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class PlacedTimeline(PlacementTimeline):
    """When each program of a placed plan runs. Made by `PlacedPlan.simulate`.

    The first ``groups`` rows are those of the groups, the others those of transfers. ``idle_share`` is the part of the step in
    which a device of the cluster computes nothing, on average.
    """

    groups: int
    idle_share: float

    @property
    def bubble_s(self) -> float:
        """Seconds of the step in which a device computes nothing, on average."""
        return self.step_time_s * self.idle_share


def placed_timeline(placed: PlacedStep, devices: int) -> PlacedTimeline:
    """The timeline of a placed step on a cluster of ``devices``, as its dispatch predicts it."""
    graph, issues = placed.graph, placed.dispatch.issues
    rows = {("group", g): f"group {g} ({device_ranges(own.devices)})" for g, own in enumerate(graph.groups)}
    loops = any(t.microbatch != WHOLE for t in graph.tasks)
    kinds = [_kind(p, loops) for p in graph.pieces]
    numbers = {key: n for n, key in enumerate(rows)}
    names: dict[str, int] = {}
    found: list[tuple[int, int, int, float, float]] = []  # name, kind, row, start, end
    for issue in issues:
        match issue.what:
            case Task(number, microbatch):
                piece = graph.pieces[number]
                name = piece.name + (f", microbatch {microbatch}" if microbatch != WHOLE else "")
                kind = _UPDATE if loops and microbatch == WHOLE else kinds[number]
                row = numbers["group", piece.group]
            case Transfer((tensor, microbatch), source, target):
                name = f"value {tensor}" + (f", microbatch {microbatch}" if microbatch != WHOLE else "")
                kind, between = _TRANSFER, (f"group {source}", target)
                row = numbers.setdefault(between, len(numbers))
                rows[between] = f"group {source} to {target}"
        if issue.end_s > issue.start_s:
            found.append((names.setdefault(name, len(names)), kind, row, issue.start_s, issue.end_s))
    columns: list[Any] = [list(column) for column in zip(*found, strict=True)] or [[]] * 5
    name, kind, row = (np.array(column, np.int64) for column in columns[:3])
    start, end = (np.array(column, np.float64) for column in columns[3:])
    texts = tuple(rows.values())
    share = idle_share(placed, devices)
    return PlacedTimeline(
        placed.dispatch.step_time_s, texts, tuple(names), name, kind, row, start, end, len(graph.groups), share
    )  # fmt: skip


def _kind(piece: Piece, loops: bool) -> int:
    """The kind of work that takes most seconds of a piece. Ops that read results of the backward pass are updates; in a loop
    over microbatches they add up gradients, and count as backward.
    """
    if isinstance(piece.own, str):
        return _UPDATE
    planned, spent, late = piece.own[0], [0.0, 0.0, 0.0], set[int]()
    for s, node in zip(planned.op_seconds, planned.graph.nodes, strict=True):
        kind = _FORWARD
        if node.backward or not late.isdisjoint(node.inputs):
            late.update(node.outputs)
            kind = _BACKWARD if node.backward or loops else _UPDATE
        spent[kind] += s * node.weight
    return max(range(3), key=lambda kind: (spent[kind], -kind))


def placed_timeline_json(shown: PlacedTimeline) -> dict[str, Any]:
    """The figures of a timeline as JSON values. Seconds are of one step."""
    busy = shown.busy_s().tolist()
    rows = [{"name": name, "busy_s": s, "idle_s": shown.step_time_s - s} for name, s in zip(shown.rows, busy, strict=True)]
    return {
        "step_time_s": shown.step_time_s,
        "bubble_s": shown.bubble_s,
        "idle_share": shown.idle_share,
        "tasks": len(shown),
        "groups": rows[: shown.groups],
        "transfers": rows[shown.groups :],
    }


def placed_timeline_text(shown: PlacedTimeline, *, title: str = "the step") -> str:
    """The step, the cost of waiting, and the seconds of groups and transfers, for people."""
    figures = placed_timeline_json(shown)
    lines = [
        f"{title}: {seconds(shown.step_time_s)} a step on {shown.groups} groups of devices, {len(shown)} runs and transfers",
        f"the bubble: devices compute nothing for {seconds(shown.bubble_s)} of it on average ({shown.idle_share:.0%})",
    ]
    parts = ["\n".join(lines)]
    groups = [[r["name"], seconds(r["busy_s"]), seconds(r["idle_s"])] for r in figures["groups"]]
    parts.append(table(["group", "busy", "waits"], groups, align="lrr"))
    if figures["transfers"]:
        sent = [[r["name"], seconds(r["busy_s"])] for r in figures["transfers"]]
        parts.append(table(["transfers", "time"], sent, align="lr"))
    return "\n\n".join(parts)
