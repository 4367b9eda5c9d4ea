"""A sweep as text: a table with a row for each point, the Pareto front, and what the points without a plan need."""

from __future__ import annotations

from shardplan.report.sweep import Point, Sweep, setting_text, settings_text
from shardplan.report.tables import seconds, size, table


def sweep_text(sweep: Sweep) -> str:
    """The whole report."""
    lines = [f"{sweep.target}: {len(sweep.points)} of {sweep.total} points, {len(sweep.planned)} with a plan", "", _table(sweep)]
    if sweep.planned:
        lines += ["", *_notes(sweep)]
    if sweep.best is not None:
        lines += ["", *_ranking(sweep)]
    refused = [(n, p) for n, p in enumerate(sweep.points, 1) if not p.fits]
    if refused:
        lines += ["", "no plan:", *(f"  {n}  {settings_text(p.settings)}: {p.error or p.remedy}" for n, p in refused)]
    return "\n".join(lines)


def _table(sweep: Sweep) -> str:
    tokens, cost = any(p.tokens for p in sweep.planned), any(sweep.cost(p) is not None for p in sweep.points)
    headers = ["", *sweep.varied, "devices", "step", "samples/s"]
    headers += ["tokens/s"] * tokens + ["peak memory", "fits"] + [f"$/1e6 {sweep.unit}s"] * cost + ["front"]
    front, best = sweep.pareto, sweep.best

    def row(number: int, point: Point) -> list[object]:
        cells: list[object] = [number, *(setting_text(point.settings[name]) for name in sweep.varied), point.devices or "-"]
        cells += ["-" if point.step_time_s is None else seconds(point.step_time_s), _rate(point.samples_per_s)]
        cells += [_rate(point.tokens_per_s)] * tokens
        cells += ["-" if point.peak_bytes is None else size(point.peak_bytes)]
        cells += ["refused" if point.error else "yes" if point.fits else "no"]
        cells += ["-" if (dollars := sweep.cost(point)) is None else f"{dollars:.4g}"] * cost
        return [*cells, "best" if point is best else "*" if point in front else ""]

    return table(headers, [row(n, p) for n, p in enumerate(sweep.points, 1)])


def _notes(sweep: Sweep) -> list[str]:
    """What the columns count."""
    notes: list[str] = []
    if sweep.samples_from:
        notes.append(f"Samples are counted by the batch dim of {sweep.samples_from}, over all devices.")
    else:
        notes.append("No argument is a batch: points are compared by seconds per step.")
    if sweep.priced:
        notes.append(f"Costs are {sweep.cost_unit}.")
    if any(p.stopped for p in sweep.points):
        notes.append("The search of some points was cut short: their plans may be improved.")
    return notes


def _ranking(sweep: Sweep) -> list[str]:
    """The Pareto front, its fastest point and its cheapest one."""
    measure = f"seconds per {sweep.unit}"
    lines = [f"Pareto front of {measure} and {'cost' if sweep.priced else 'devices'}, fastest first:"]
    lines += [f"  {_named(sweep, point)}" for point in sweep.pareto]
    best, cheapest = sweep.best, sweep.cheapest
    assert best is not None
    lines.append(f"Best (fewest {measure}): {settings_text(best.settings)}")
    if cheapest is not None and cheapest is not best:
        lines.append(f"Cheapest: {settings_text(cheapest.settings)}")
    return lines


def _named(sweep: Sweep, point: Point) -> str:
    time_s, other = sweep.measures(point)
    return f"{settings_text(point.settings)}: {seconds(time_s)}, " + (f"${other:.4g}" if sweep.priced else f"{other:g} devices")


def _rate(per_s: float | None) -> str:
    return "-" if per_s is None else f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"
