"""What changed from one plan to another, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardplan.report.plan_diff import Cost, Difference, Moved, PlanDiff, SentDifference
from shardplan.report.tables import seconds, size, table

_SHOWN = 12
"""The most rows shown of collectives, and of arguments with their costs."""


def diff_text(diff: PlanDiff, names: tuple[str, str]) -> str:
    """The changes in words; ``names`` are the names of the plans' files."""
    if diff.alike:
        head = f"{names[0]} and {names[1]} plan alike"
        return "\n".join([head, *(f"  asked for another {_pair(c)}, with the same plan" for c in diff.asked)])
    parts = [f"{names[0]} and {names[1]} plan differently"]
    if diff.other_program:
        parts.append(
            "\n".join(["They are plans of different programs:", *map(_program_text, diff.program), *_same_program(diff)])
        )
    parts += _section("Asked for", diff.asked) + _section("Machine and program", diff.machine)
    parts += _why(diff)
    parts += _layouts(diff.layouts, names)
    replaced = {_below(c) for c in diff.layouts}
    parts += _section("Layouts of other results", [c for c in diff.results if _below(c) not in replaced])
    if diff.inside:
        parts.append("Operators or values between arguments and results are cut otherwise.")
    if diff.other_groups:
        parts.append(f"{diff.other_groups} operators run on other groups of devices.")
    if diff.figures:
        rows = [[c.name, *(_figure(c.name, x) for x in (c.before, c.after)), _ratio(c.before, c.after)] for c in diff.figures]
        parts.append("Figures of one step, per device\n\n" + table(["", names[0], names[1], "change"], rows, align="lrrr"))
    if diff.collectives:
        parts.append("Collectives, by how much they change\n\n" + _collectives_text(diff.collectives, names))
    return "\n\n".join(parts)


def _same_program(diff: PlanDiff) -> list[str]:
    return [] if diff.program else ["  the arguments and the number of operators agree, the operators do not"]


def _program_text(change: Difference) -> str:
    if change.before is None:
        return f"  {change.name} {change.after} is new"
    if change.after is None:
        return f"  {change.name} {change.before} is gone"
    return f"  {_pair(change)}"


def _why(diff: PlanDiff) -> list[str]:
    """The reasons for other layouts; where nothing explains them, a note that says so."""
    if diff.reasons:
        return _section("Why, as far as the files say", diff.reasons)
    if diff.other_program or diff.asked or diff.machine or not (diff.layouts or diff.inside):
        return []
    return [
        "The files hold no reason: program, options, machine and constants agree. Another release may search or price otherwise."
    ]


def _layouts(rows: Sequence[Moved], names: tuple[str, str]) -> list[str]:
    """The arguments whose layouts differ; those whose communication changes most are followed by reasons and costs."""
    if not rows:
        return []
    weight = {r.name: abs(r.costs[1].communication_s - r.costs[0].communication_s) for r in rows}
    told = sorted(rows, key=lambda r: (-weight[r.name], r.name))[:_SHOWN]
    lines = ["Layouts of arguments, and of the results that replace them"]
    for row in rows:
        lines.append(f"  {row.name}: {row.before} -> {row.after}")
        if row in told:
            lines += [f"    {name}: {cost.why}" for name, cost in zip(names, row.costs, strict=True) if cost.why]
            lines.append(f"    {_costs_text(*row.costs)}")
    return ["\n".join(lines)]


def _costs_text(a: Cost, b: Cost) -> str:
    held = f"a device holds {size(a.held_bytes)} -> {size(b.held_bytes)}"
    if not a.communication_s and not b.communication_s:
        return f"{held}; no collective moves it"
    moved = f"collectives that move it take {seconds(a.communication_s)} -> {seconds(b.communication_s)}"
    return f"{held}; {moved} (exposed {seconds(a.exposed_s)} -> {seconds(b.exposed_s)})"


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return size(value) if name.split(" ")[0].endswith("_bytes") else seconds(value)


def _section(title: str, changes: Sequence[Difference]) -> list[str]:
    return ["\n".join([title, *(f"  {_pair(c)}" for c in changes)])] if changes else []


def _pair(change: Difference) -> str:
    return f"{change.name}: {change.before} -> {change.after}"


def _below(change: Difference | Moved) -> tuple[str, Any, Any]:
    """The change of a layout, with its path below the argument's name or the place in the result."""
    return change.name.partition("/")[2], change.before, change.after


def _ratio(before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return "new" if before is None else "gone"
    return f"{after / before - 1:+.1%}" if before else "new"


def _collectives_text(rows: Sequence[SentDifference], names: tuple[str, str]) -> str:
    shown = [[_collective(r), r.tensor, seconds(r.before[0]), seconds(r.after[0]), _signed(r)] for r in rows[:_SHOWN]]
    more = sum(r.after[0] - r.before[0] for r in rows)
    total = f"all {len(rows)} changes: {'+' if more >= 0 else ''}{seconds(more)}"
    return table(["collective", "array", names[0], names[1], "change"], shown, align="llrrr") + f"\n{total}"


def _collective(row: SentDifference) -> str:
    return f"{row.kind} over {' x '.join(row.axes)}" + (f" in group {row.group}" if row.group is not None else "")


def _signed(row: SentDifference) -> str:
    more = row.after[0] - row.before[0]
    return f"{'+' if more >= 0 else ''}{seconds(more)}"
