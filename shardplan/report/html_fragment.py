"""A plan as a small piece of HTML for notebooks: no script, no network, and styles that apply to nothing else."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape

from shardplan.plans.data import PlanData
from shardplan.report.json import comparison_rows
from shardplan.report.parallelism import purposes_text
from shardplan.report.plan_text import collective_rows, plan_facts
from shardplan.report.tables import seconds, size

_ROWS = 5
"""The most collectives that are shown."""
_FACTS = frozenset({"cluster", "mesh", "step time", "memory", "traffic"})

_STYLE = """
.shardplan { font: 13px/1.45 system-ui, sans-serif; max-width: 900px; }
.shardplan h4 { margin: 10px 0 2px; font-size: 13px; }
.shardplan .wide { overflow-x: auto; }
.shardplan table { border-collapse: collapse; }
.shardplan th, .shardplan td { text-align: left; padding: 2px 14px 2px 0; border-bottom: 1px solid #8885; vertical-align: top; }
.shardplan .number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.shardplan .bar { display: inline-block; height: 10px; background: #0072b2; }
.shardplan .unfit { background: repeating-linear-gradient(45deg, #8c8c8c 0 3px, transparent 3px 6px); }
"""


def plan_fragment(plan: PlanData) -> str:
    """The summary, the parallelism matrix, the dearest collectives and the baselines of a completed plan."""
    parts = [
        _table((), [[name, text] for name, text in plan_facts(plan, "the step") if name in _FACTS]),
        "<h4>Parallelism matrix</h4>",
        _matrix(plan),
        "<h4>Dearest collectives of a step</h4>",
        _collectives(plan),
        "<h4>Baselines</h4>",
        _baselines(plan),
    ]
    return f'<div class="shardplan"><style>{_STYLE}</style>{"".join(parts)}</div>'


def _matrix(plan: PlanData) -> str:
    matrix = plan.matrix
    rows = [[axis, *map(str, row)] for axis, row in zip(matrix["axes"], matrix["factors"], strict=True)]
    return (
        _table(("axis", *matrix["levels"]), rows, range(1, 1 + len(matrix["levels"])))
        + f"<div>{escape(purposes_text(plan))}</div>"
    )


def _collectives(plan: PlanData) -> str:
    rows = collective_rows(plan)
    if not rows:
        return "<div>none: every device works on its own</div>"
    cells = [
        [
            *(row["kind"], " x ".join(row["axes"]), f"{row['times']:g}", size(row["wire_bytes"]), seconds(row["seconds"])),
            row["source"].rsplit("/", 1)[-1],
        ]
        for row in rows[:_ROWS]
    ]
    more = f"<div>and {len(rows) - _ROWS} more rows</div>" if len(rows) > _ROWS else ""
    return _table(("collective", "over", "times", "on the wire", "time", "most of it at"), cells, (2, 3, 4)) + more


def _baselines(plan: PlanData) -> str:
    rows = comparison_rows(plan)
    longest = min(max(row["step_time_s"] for row in rows), 6 * plan.step_time_s) or 1.0
    cells = [
        [
            *(row["name"], seconds(row["step_time_s"]), size(row["peak_bytes"]), "yes" if row["fits"] else "no"),
            _Bar(min(1.0, row["step_time_s"] / longest), row["fits"]),
        ]
        for row in rows
    ]
    return _table(("plan", "step time", "memory", "fits", ""), cells, (1, 2))


class _Bar(str):
    """A cell that is a bar, as HTML."""

    def __new__(cls, part: float, fits: bool) -> _Bar:
        look = "bar" if fits else "bar unfit"
        return super().__new__(cls, f'<span class="{look}" style="width: {round(180 * part)}px"></span>')


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[int] = ()) -> str:
    """A table; the cells of the columns ``numbers`` are right-aligned."""
    head = "".join(_cell("th", text, i in numbers) for i, text in enumerate(heads))
    body = "".join(f"<tr>{''.join(_cell('td', text, i in numbers) for i, text in enumerate(row))}</tr>" for row in rows)
    return f'<div class="wide"><table>{f"<tr>{head}</tr>" if heads else ""}{body}</table></div>'


def _cell(tag: str, text: str, number: bool) -> str:
    look = ' class="number"' if number else ""
    return f"<{tag}{look}>{text if isinstance(text, _Bar) else escape(text)}</{tag}>"
