"""A plan in ten lines, or eleven where devices are idle, as `repr` prints it. It says what is known and starts no search."""

from __future__ import annotations

import math

from shardplan.ir import spec_text
from shardplan.plans.data import PlanData
from shardplan.report.parallelism import purposes_text
from shardplan.report.paths import grouped
from shardplan.report.plan_text import best_baseline, bound_text, collective_rows, idle_facts, spent_text
from shardplan.report.tables import seconds, size
from shardplan.sizes import axes_text, counted

_WIDEST = 130
"""The most letters of a line."""


def plan_lines(plan: PlanData) -> str:
    """Ten lines on a plan, and one on idle devices."""
    devices = math.prod(level.size for level in plan.cluster.levels)
    rows = [
        ("plan", f"{counted(plan.operators, 'operator')} on {plan.cluster.name}, {devices} x {plan.cluster.device.name}"),
        *idle_facts(plan),
        ("mesh", axes_text(plan.axes)),
        ("parallelism", purposes_text(plan) or "none"),
        ("step time", spent_text(plan)),
        ("memory", _memory(plan)),
        ("traffic", f"{size(plan.communication_bytes)} on the wire, per device and step"),
        ("dearest", _dearest(plan)),
        ("arguments", _arguments(plan)),
        ("bound", "known once plan.gap asks for it" if plan.bound_s is None else bound_text(plan)),
        ("baselines", _baselines(plan)),
    ]
    return "\n".join(_cut(f"{name:<11} {text}") for name, text in rows)


def _cut(line: str) -> str:
    return line if len(line) <= _WIDEST else line[: _WIDEST - 3] + "..."


def _memory(plan: PlanData) -> str:
    """The peak of a device beside its limit, and the bytes in host memory."""
    text = f"{size(plan.peak_bytes)} a device of {size(plan.memory_limit)} ({plan.peak_bytes / plan.memory_limit:.1%})"
    return f"{text}, and {size(plan.host_bytes)} of its host's" if plan.offloaded else text


def _dearest(plan: PlanData) -> str:
    """The collectives that take longest."""
    rows = collective_rows(plan)
    if not rows:
        return "nothing is communicated"
    one = rows[0]
    where = one["source"].rsplit("/", 1)[-1]
    return f"{one['kind']} over {' x '.join(one['axes'])}, {one['times']:g} times, {seconds(one['seconds'])}: {where}"


def _arguments(plan: PlanData) -> str:
    """The count of arrays, their bytes on a device, and the layout of the largest."""
    if not plan.arguments:
        return "none"
    ways = {f: factor.size for f, factor in enumerate(plan.factors)}
    local = [a.nbytes / math.prod(ways[f] for f in (a.layout.used if a.layout else ())) for a in plan.arguments]
    largest = max(plan.arguments, key=lambda a: a.nbytes)
    alike = grouped({a.path: (a.shape, a.dtype, a.layout) for a in plan.arguments})
    pattern = next(g.pattern for g in alike if largest.path in g.paths)
    count = f"{counted(len(plan.arguments), 'array')}, {size(sum(local))} a device"
    return f"{count}; the largest {pattern} {spec_text(plan.entries[largest.path])}"


def _baselines(plan: PlanData) -> str:
    if plan.baselines is None:
        return "known once plan.baselines asks for them"
    best = best_baseline(plan)
    if best is None:
        return "none fits" if plan.baselines else "this step has none"
    ratio = f", {best.step_time_s / plan.step_time_s:.2f}x" if plan.step_time_s else ""
    return f"the best that fits is {best.name}: {seconds(best.step_time_s)}{ratio}"
