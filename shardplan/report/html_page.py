"""A plan as one HTML page that needs no network: its data as JSON inside, drawn by the script in ``page/``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from html import escape
from importlib.resources import files
from typing import Any

from shardplan.mesh import Cluster
from shardplan.mesh.machine import Level
from shardplan.planning.losses import Loss
from shardplan.plans.data import PlanData
from shardplan.plans.score import Score
from shardplan.report.html_arrays import ArrayRow, array_rows
from shardplan.report.html_collectives import CollectiveRow, folded_collectives
from shardplan.report.html_memory import MemoryCurve, memory_curve
from shardplan.report.html_seconds import LineSeconds, parts_of
from shardplan.report.html_timeline import Bars, bars_of
from shardplan.report.json import comparison_rows
from shardplan.report.parallelism import purposes_text
from shardplan.report.paths import grouped
from shardplan.report.plan_text import best_baseline, bound_text, plan_facts, plan_text
from shardplan.report.tables import rate
from shardplan.schedule import PlannedProgram
from shardplan.search.session import Session
from shardplan.simulate.figures import Simulated

_SCRIPTS = ("page.js", "tables.js", "charts.js")
"""The files in ``page/`` that draw pages of every kind."""


@dataclass(frozen=True, slots=True)
class PageData:
    """All that a page shows. Seconds are of one step, bytes of one device."""

    title: str
    facts: tuple[tuple[str, str], ...]
    figures: Mapping[str, Any]
    cluster: Mapping[str, Any]
    matrix: Mapping[str, Any]
    axes: tuple[Mapping[str, Any], ...]
    arrays: tuple[ArrayRow, ...]
    parts: tuple[LineSeconds, ...]
    memory: MemoryCurve
    collectives: tuple[CollectiveRow, ...]
    baselines: tuple[Mapping[str, Any], ...]
    left_out: tuple[tuple[str, str], ...]
    own: Mapping[str, Any] | None
    timeline: Bars


def page_data(
    plan: PlanData, session: Session, planned: PlannedProgram, shown: Simulated, *, title: str = "", score: Score | None = None
) -> PageData:
    """The data for the page of a completed plan; ``score`` is that of the user's own sharding."""
    return PageData(
        title=title or "the step",
        facts=tuple(plan_facts(plan, title or "the step")),
        figures=_figures(plan),
        cluster=machine_values(plan.cluster),
        matrix={**plan.matrix, "words": purposes_text(plan)},
        axes=axis_values(plan),
        arrays=array_rows(plan, session),
        parts=parts_of(planned, plan.collectives),
        memory=memory_curve(session),
        collectives=folded_collectives(plan.collectives),
        baselines=tuple(_figures_of(row) for row in comparison_rows(plan)),
        left_out=plan.left_out,
        own=None if score is None else _own(plan, score),
        timeline=bars_of(shown),
    )


def page(data: PageData, plan: PlanData) -> str:
    """The page as text. Readers without JavaScript get the plan as `plan_text` prints it."""
    return filled_page(f"{data.title} on {plan.cluster.name}", asdict(data), plan_text(plan, title=data.title), "cluster.js")


def filled_page(heading: str, data: Mapping[str, Any], words: str, script: str) -> str:
    """The page that shows ``data`` with `_SCRIPTS` and one more ``script``; readers without JavaScript get the ``words``."""
    text = _part("page.html")
    for mark, content in (
        ("TITLE", escape(f"{heading}: shardplan")),
        ("STYLE", _part("page.css")),
        ("TEXT", escape(words)),
        ("SCRIPT", "\n".join(map(_part, (*_SCRIPTS, script)))),
        ("DATA", script_json(data)),
    ):
        head, found, tail = text.partition(f"<!--{mark}-->")
        assert found, f"page.html has no place for {mark}"
        text = head + content + tail
    return text


def script_json(value: Any) -> str:
    """JSON that can stand in a script element: it holds none of the characters that end one or begin markup.

    >>> script_json({"name": "</script>"})
    '{"name":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.translate({ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"})


def _part(name: str) -> str:
    return files("shardplan.report").joinpath("page", name).read_text(encoding="utf-8")


# -- figures -----------------------------------------------------------------------------------------------------------


def _figures(plan: PlanData) -> dict[str, Any]:
    """The figures in the page's head."""
    best = best_baseline(plan)
    names = (
        *("step_time_s", "compute_s", "communication_s", "exposed_s", "serial_s", "hidden_s", "communication_bytes"),
        *("peak_bytes", "memory_limit", "memory_limit_origin", "operators", "backend"),
    )
    return {
        **{name: getattr(plan, name) for name in names},
        "arguments": len(plan.arguments),
        "bound": bound_text(plan),
        "best_baseline": None if best is None else {"name": best.name, "step_time_s": best.step_time_s},
    }


def _figures_of(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("name", "step_time_s", "communication_bytes", "peak_bytes", "fits")}


def machine_values(cluster: Cluster) -> dict[str, Any]:
    """The machine: its levels, slowest first."""
    return {
        "name": cluster.name,
        "device": cluster.device.name,
        "devices": math.prod(level.size for level in cluster.levels),
        "levels": [_level(level) for level in cluster.levels],
    }


def _level(level: Level) -> dict[str, Any]:
    return {"name": level.name, "size": level.size, "link": f"{rate(level.bandwidth_bytes_per_s)} {level.kind}"}


def axis_values(plan: PlanData) -> tuple[dict[str, Any], ...]:
    """The mesh axes, slowest first, each with its level and purposes."""
    return tuple(
        {"name": f.name, "size": f.size, "level": f.level, "purpose": shares[0][0], "shares": list(shares)}
        for f, shares in zip(plan.factors, plan.purposes, strict=True)
    )


def _own(plan: PlanData, score: Score) -> dict[str, Any]:
    """The user's own sharding beside the plan."""
    return {
        "step_time_s": score.step_time_s,
        "communication_bytes": score.communication_bytes,
        "peak_bytes": score.peak_bytes,
        "fits": score.fits,
        "axes": dict(score.axes),
        "specs": {path: score.in_specs[path] for path in plan.entries if path in score.in_specs},
        "losses": [_loss(one) for one in score.losses],
        "unasked": [asdict(row) for row in score.unasked],
    }


def _loss(one: Loss) -> dict[str, Any]:
    """A loss of the user's sharding; ``count`` of its arguments have the pattern, ``together`` lie otherwise."""
    group = grouped(one.together)[0]
    return {
        **{name: getattr(one, name) for name in ("given", "instead", "seconds", "bytes", "source")},
        "pattern": group.pattern,
        "count": len(group.paths),
        "together": len(one.together),
    }
