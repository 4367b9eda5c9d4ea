"""What changed from one plan to another, as values and in words."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardplan.ir import spec_text
from shardplan.plans.data import PlanData
from shardplan.report.paths import apart, grouped
from shardplan.report.tables import seconds, size, table

_SHOWN = 12
"""The most rows of collectives that are shown; the last line counts all."""
_ROUNDING = 1e-9
"""The part by which equal figures may differ."""

_ASKED = ("memory_limit", "objective", "time_model", "pins", "fixed_axes", "one_choice", "replicate", "time_budget_s")
_RUN = ("backend", "microbatches", "remat", "donate_argnums")
_FIGURES = {
    "step_time_s": seconds,
    "compute_s": seconds,
    "communication_s": seconds,
    "host_s": seconds,
    "communication_bytes": size,
    "peak_bytes": size,
    "host_bytes": size,
}


@dataclass(frozen=True, slots=True)
class Change:
    """One thing under both plans; None where a plan does not have it."""

    name: str
    before: Any
    after: Any

    @property
    def json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {"name": self.name, "before": self.before, "after": self.after}


@dataclass(frozen=True, slots=True)
class Sent:
    """Collectives of equal kind, axes and costs under both plans: the arrays that they move, their seconds and wire bytes a step.

    ``count`` is the number of arrays under the pattern ``tensor``; seconds and bytes are of all of them together.
    """

    kind: str
    axes: tuple[str, ...]
    tensor: str
    count: int
    before: tuple[float, float]
    after: tuple[float, float]

    @property
    def json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        own = {"kind": self.kind, "axes": list(self.axes), "tensor": self.tensor, "count": self.count}
        return own | {
            when: {"seconds": found[0], "wire_bytes": found[1]}
            for when, found in (("before", self.before), ("after", self.after))
        }


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """All changes. ``program``: arguments added, removed or reshaped, and operators. ``asked`` has the options that differ; all
    other fields say what was planned. ``inside``: ops or values between arguments and results are cut otherwise.
    """

    program: tuple[Change, ...]
    other_program: bool
    asked: tuple[Change, ...]
    machine: tuple[Change, ...]
    layouts: tuple[Change, ...]
    results: tuple[Change, ...]
    inside: bool
    figures: tuple[Change, ...]
    collectives: tuple[Sent, ...]

    @property
    def alike(self) -> bool:
        """Whether both plan the same, whatever they were asked for."""
        changes = (self.other_program, self.machine, self.layouts, self.results, self.inside, self.figures, self.collectives)
        return not any(changes)

    @property
    def json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        lists = ("program", "asked", "machine", "layouts", "results", "figures", "collectives")
        return {
            "alike": self.alike,
            "other_program": self.other_program,
            "inside": self.inside,
            **{name: [change.json for change in getattr(self, name)] for name in lists},
        }


def plan_diff(a: PlanData, b: PlanData) -> PlanDiff:
    """What changed from ``a`` to ``b``, whose fingerprints are known."""
    assert None not in (a.fingerprint, b.fingerprint)
    machine = [] if a.cluster.fingerprint() == b.cluster.fingerprint() else [Change("cluster", a.cluster.name, b.cluster.name)]
    return PlanDiff(
        program=tuple(_program(a, b)),
        other_program=a.fingerprint != b.fingerprint,
        asked=tuple(_fields(a, b, _ASKED)),
        machine=(*machine, *_fields(a, b, ("axes", *_RUN))),
        layouts=tuple(_layouts([x.path for x in a.arguments], _specs(a), [x.path for x in b.arguments], _specs(b))),
        results=tuple(_layouts(a.result_paths, _result_specs(a), b.result_paths, _result_specs(b))),
        inside=a.fingerprint == b.fingerprint and a.choices != b.choices,
        figures=tuple(c for c in _fields(a, b, tuple(_FIGURES)) if not math.isclose(c.before, c.after, rel_tol=_ROUNDING)),
        collectives=tuple(_collectives(a, b)),
    )


def _program(a: PlanData, b: PlanData) -> Iterator[Change]:
    """The arguments and the number of operators that differ; the same arguments share a row."""
    kinds = [
        dict(zip(apart(x.path for x in p.arguments), [f"{x.dtype}{list(x.shape)}" for x in p.arguments], strict=True))
        for p in (a, b)
    ]
    yield from _grouped(*kinds)
    yield from _fields(a, b, ("operators",))


def _fields(a: PlanData, b: PlanData, names: Sequence[str]) -> Iterator[Change]:
    for name in names:
        before, after = getattr(a, name), getattr(b, name)
        if before != after or (name == "axes" and list(before) != list(after)):
            yield Change(name, _value(before), _value(after))


def _value(value: Any) -> Any:
    """A field as a JSON value; one with parts as text."""
    return value if isinstance(value, int | float | str | None) else str(value)


def _specs(plan: PlanData) -> list[str]:
    names = tuple(plan.axes)
    return [spec_text(x.layout.entries(names) if x.layout else ()) for x in plan.arguments]


def _result_specs(plan: PlanData) -> list[str]:
    names = tuple(plan.axes)
    return [spec_text(layout.entries(names) if layout else ()) for layout in plan.result_layouts]


def _layouts(before: Sequence[str], old: Sequence[str], after: Sequence[str], new: Sequence[str]) -> list[Change]:
    """The paths that both plans have with other specs."""
    a, b = dict(zip(apart(before), old, strict=True)), dict(zip(apart(after), new, strict=True))
    common = [path for path in a if path in b]
    return _grouped({path: a[path] for path in common}, {path: b[path] for path in common})


def _grouped(a: Mapping[str, str], b: Mapping[str, str]) -> list[Change]:
    """What differs by path; equal changes of paths that differ in numbers or names share a row."""
    changed: dict[str, Hashable] = {p: (a.get(p), b.get(p)) for p in dict.fromkeys([*a, *b]) if a.get(p) != b.get(p)}
    return [Change(g.pattern, a.get(g.paths[0]), b.get(g.paths[0])) for g in grouped(changed)]


def _collectives(a: PlanData, b: PlanData) -> list[Sent]:
    """The collectives that differ, those with the largest change of seconds first; equal ones share a row."""
    sent = [_sent(a), _sent(b)]
    rows: dict[tuple[str, tuple[str, ...], tuple[float, float], tuple[float, float]], dict[str, Hashable]] = {}
    for key in dict.fromkeys([*sent[0], *sent[1]]):
        before, after = (own.get(key, (0.0, 0.0)) for own in sent)
        if not all(math.isclose(x, y, rel_tol=_ROUNDING) for x, y in zip(before, after, strict=True)):
            kind, axes, tensor = key
            rows.setdefault((kind, axes, before, after), {})[tensor] = None
    found: list[Sent] = []
    for (kind, axes, before, after), tensors in rows.items():
        for g in grouped(tensors):
            n = len(g.paths)
            found.append(Sent(kind, axes, g.pattern, n, (before[0] * n, before[1] * n), (after[0] * n, after[1] * n)))
    return sorted(found, key=lambda s: (-abs(s.after[0] - s.before[0]), s.kind, s.axes, s.tensor))


def _sent(plan: PlanData) -> dict[tuple[str, tuple[str, ...], str], tuple[float, float]]:
    """Seconds and wire bytes of a step, by kind, axes and array; a value without a name has the function that makes it."""
    found: dict[tuple[str, tuple[str, ...], str], tuple[float, float]] = {}
    for c in plan.collectives:
        key = (str(c.kind), c.axes, f"value of {_function(c.source)}" if c.tensor.startswith("value ") else c.tensor)
        own = found.get(key, (0.0, 0.0))
        found[key] = own[0] + c.seconds * c.times, own[1] + c.wire_bytes * c.times
    return found


def _function(source: str) -> str:
    """A source line without folder and number, which differ between checkouts: ``model.py (Block.__call__)``."""
    return re.sub(r":\d+", "", source.rpartition("/")[2], count=1)


# -- words -------------------------------------------------------------------------------------------------------------


def diff_text(diff: PlanDiff, names: tuple[str, str]) -> str:
    """The changes in words; ``names`` are those of the plans' files."""
    if diff.alike:
        head = f"{names[0]} and {names[1]} plan alike"
        return "\n".join([head, *(f"  asked for another {_pair(c)}, with the same plan" for c in diff.asked)])
    parts = [f"{names[0]} and {names[1]} plan differently"]
    if diff.other_program:
        parts.append(
            "\n".join(["They are plans of different programs:", *map(_program_text, diff.program), *_same_program(diff)])
        )
    parts += _section("Asked for", diff.asked) + _section("Machine and program", diff.machine)
    parts += _section("Layouts of arguments, and of the results that replace them", diff.layouts)
    replaced = {_below(c) for c in diff.layouts}
    parts += _section("Layouts of other results", [c for c in diff.results if _below(c) not in replaced])
    if diff.inside:
        parts.append("Operators or values between arguments and results are cut otherwise.")
    if diff.figures:
        rows = [[c.name, *(_FIGURES[c.name](x) for x in (c.before, c.after)), _ratio(c.before, c.after)] for c in diff.figures]
        parts.append("Figures of one step, per device\n\n" + table(["", names[0], names[1], "change"], rows, align="lrrr"))
    if diff.collectives:
        parts.append("Collectives, by how much they change\n\n" + _collectives_text(diff.collectives, names))
    return "\n\n".join(parts)


def _same_program(diff: PlanDiff) -> list[str]:
    return [] if diff.program else ["  the arguments and the number of operators agree, the operators do not"]


def _program_text(change: Change) -> str:
    if change.before is None:
        return f"  {change.name} {change.after} is new"
    if change.after is None:
        return f"  {change.name} {change.before} is gone"
    return f"  {_pair(change)}"


def _section(title: str, changes: Sequence[Change]) -> list[str]:
    return ["\n".join([title, *(f"  {_pair(c)}" for c in changes)])] if changes else []


def _pair(change: Change) -> str:
    return f"{change.name}: {change.before} -> {change.after}"


def _below(change: Change) -> tuple[str, Any, Any]:
    """The change of a layout, by its path below the argument or the place in the result."""
    return change.name.partition("/")[2], change.before, change.after


def _ratio(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before else "new"


def _collectives_text(rows: Sequence[Sent], names: tuple[str, str]) -> str:
    shown = [
        [f"{r.kind} over {' x '.join(r.axes)}", r.tensor, seconds(r.before[0]), seconds(r.after[0]), _signed(r)]
        for r in rows[:_SHOWN]
    ]
    more = sum(r.after[0] - r.before[0] for r in rows)
    total = f"all {len(rows)} changes: {'+' if more >= 0 else ''}{seconds(more)}"
    return table(["collective", "array", names[0], names[1], "change"], shown, align="llrrr") + f"\n{total}"


def _signed(row: Sent) -> str:
    more = row.after[0] - row.before[0]
    return f"{'+' if more >= 0 else ''}{seconds(more)}"
