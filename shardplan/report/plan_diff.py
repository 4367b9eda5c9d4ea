"""What changed from one plan to another, and why as far as their files say, as values; `diff_text` has the words."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from shardplan.ir import Microbatches, spec_text
from shardplan.plans.files import AnyData
from shardplan.remat import Remat
from shardplan.report.diff_reasons import explained, reasons
from shardplan.report.diff_views import View, view
from shardplan.report.paths import PathGroup, grouped

_ROUNDING = 1e-9
"""The relative difference up to which figures are equal."""

_ASKED = ("memory_limit", "objective", "time_model", "pins", "fixed_axes", "one_choice", "replicate", "time_budget_s")


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing under both plans; None where a plan does not have it."""

    name: str
    before: Any
    after: Any

    @property
    def json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {"name": self.name, "before": self.before, "after": self.after}


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of arguments for a device under one plan: the bytes that it holds of them, the seconds a step of the collectives
    that move them, their gradients or their updates, and the exposed part of these seconds. ``why`` is the reason that the
    plan's file gives for the layout of the first argument.
    """

    held_bytes: int
    communication_s: float
    exposed_s: float
    why: str


@dataclass(frozen=True, slots=True)
class Moved:
    """Arguments of the pattern ``name``, all with one layout before and another after, and their total costs."""

    name: str
    before: str
    after: str
    costs: tuple[Cost, Cost]

    @property
    def json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        costs = {when: asdict(cost) for when, cost in zip(("before", "after"), self.costs, strict=True)}
        return {"name": self.name, "before": self.before, "after": self.after, "costs": costs}


@dataclass(frozen=True, slots=True)
class SentDifference:
    """Collectives of equal kind, axes and costs under both plans: the arrays that they move, and seconds and wire bytes a step.

    ``count`` is the number of arrays under the pattern ``tensor``; seconds and bytes are totals over them. ``group`` is their
    group of devices, if there are groups.
    """

    group: int | None
    kind: str
    axes: tuple[str, ...]
    tensor: str
    count: int
    before: tuple[float, float]
    after: tuple[float, float]

    @property
    def json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        own = {"group": self.group, "kind": self.kind, "axes": list(self.axes), "tensor": self.tensor, "count": self.count}
        return own | {
            when: {"seconds": found[0], "wire_bytes": found[1]}
            for when, found in (("before", self.before), ("after", self.after))
        }


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """All changes. ``program``: arguments added, removed or reshaped, and operators. ``asked`` has the options that differ,
    ``reasons`` all other causes; the remaining fields compare what was planned. ``inside``: ops or values between arguments and
    results are cut otherwise; ``other_groups``: the number of ops that run on another group of devices.
    """

    program: tuple[Difference, ...]
    other_program: bool
    asked: tuple[Difference, ...]
    reasons: tuple[Difference, ...]
    machine: tuple[Difference, ...]
    layouts: tuple[Moved, ...]
    results: tuple[Difference, ...]
    inside: bool
    other_groups: int
    figures: tuple[Difference, ...]
    collectives: tuple[SentDifference, ...]

    @property
    def alike(self) -> bool:
        """Whether both plan the same, even if their options differ."""
        changes = (self.other_program, self.machine, self.layouts, self.results, self.inside, self.other_groups, self.figures)
        return not any((*changes, self.collectives))

    @property
    def json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        lists = ("program", "asked", "reasons", "machine", "layouts", "results", "figures", "collectives")
        return {
            "alike": self.alike,
            "other_program": self.other_program,
            "inside": self.inside,
            "other_groups": self.other_groups,
            **{name: [change.json for change in getattr(self, name)] for name in lists},
        }


def plan_diff(before: AnyData, after: AnyData) -> PlanDiff:
    """What changed from one plan to another, whose fingerprints are known."""
    assert None not in (before.fingerprint, after.fingerprint)
    a, b = view(before), view(after)
    same = before.fingerprint == after.fingerprint
    machine = [] if before.cluster.fingerprint() == after.cluster.fingerprint() else [("cluster", before.cluster, after.cluster)]
    return PlanDiff(
        program=tuple(_program(a, b)),
        other_program=not same,
        asked=tuple(_fields(a.asked, b.asked, _ASKED)),
        reasons=tuple(Difference(*pair) for pair in reasons(a, b)),
        machine=(*(Difference(name, x.name, y.name) for name, x, y in machine), *_machine(a, b)),
        layouts=tuple(_moved(a, b)),
        results=tuple(_changed(_common(a.results, b.results), _common(b.results, a.results))),
        inside=same and [part.plan.choices for part in a.parts] != [part.plan.choices for part in b.parts],
        other_groups=sum(group != b.op_groups.get(op, group) for op, group in a.op_groups.items()) if same else 0,
        figures=tuple(c for c in _differing(a.figures, b.figures) if not _close(c.before, c.after)),
        collectives=tuple(_collectives(a, b)),
    )


def _program(a: View, b: View) -> Iterator[Difference]:
    """The arguments and the number of operators that differ; the same arguments share a row."""
    yield from _changed(a.types, b.types)
    if len(a.parts) == len(b.parts) == 1:
        yield from _fields(a.asked, b.asked, ("operators",))


def _machine(a: View, b: View) -> Iterator[Difference]:
    yield from _differing(a.machine, b.machine)
    if a.order != b.order and sorted(a.order) == sorted(b.order):
        yield Difference("order of the schedule", "as planned", "another")


def _fields(a: Any, b: Any, names: Sequence[str]) -> Iterator[Difference]:
    yield from _differing(*({name: getattr(plan, name) for name in names} for plan in (a, b)))


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    """The entries that differ, by name."""
    for name in dict.fromkeys([*a, *b]):
        if a.get(name) != b.get(name):
            yield Difference(name, _value(a.get(name)), _value(b.get(name)))


def _value(value: Any) -> Any:
    """A field as a JSON value; a composite one as the text that a user knows it by."""
    match value:
        case Remat():
            return f"{value.loops} loop bodies and {value.blocks} blocks ({value.policy})" if value.parts else "nothing"
        case Microbatches():
            return value.count if not value.batch else f"{value.count} (of leaves {', '.join(map(str, value.batch))})"
        case Mapping():
            pairs = cast("Mapping[str, int | tuple[Any, ...]]", value).items()
            texts = (f"{name}={own if isinstance(own, int) else spec_text(own)}" for name, own in pairs)
            return ", ".join(texts) or "none"
        case tuple():
            return ", ".join(map(str, cast("tuple[Any, ...]", value))) or "none"
        case _:
            return value if isinstance(value, int | float | str | None) else str(value)


def _close(before: float | None, after: float | None) -> bool:
    return before is not None and after is not None and math.isclose(before, after, rel_tol=_ROUNDING)


def _common(own: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    return {path: text for path, text in own.items() if path in other}


def _changed(a: Mapping[str, str], b: Mapping[str, str]) -> list[Difference]:
    """The entries that differ, by path; equal changes of paths that differ in numbers or names share a row."""
    return [Difference(g.pattern, a.get(g.paths[0]), b.get(g.paths[0])) for g in _groups(a, b)]


def _groups(a: Mapping[str, str], b: Mapping[str, str]) -> tuple[PathGroup, ...]:
    changed: dict[str, Hashable] = {p: (a.get(p), b.get(p)) for p in dict.fromkeys([*a, *b]) if a.get(p) != b.get(p)}
    return grouped(changed)


def _moved(a: View, b: View) -> Iterator[Moved]:
    """The arguments of both plans whose layouts differ."""
    old, new = _common(a.specs, b.specs), _common(b.specs, a.specs)
    for group in _groups(old, new):
        first = group.paths[0]
        costs = (_cost(a, group.paths), _cost(b, group.paths))
        yield Moved(group.pattern, old[first], new[first], costs)


def _cost(own: View, paths: Sequence[str]) -> Cost:
    return Cost(own.held_bytes(paths), *own.moving(frozenset(paths)), explained(own, paths[0]))


_Key = tuple[int | None, str, tuple[str, ...], str]
"""The group, kind, axes and array of collectives."""


def _collectives(a: View, b: View) -> list[SentDifference]:
    """The collectives that differ, those with the largest change of seconds first; equal ones share a row."""
    sent = [_sent(a), _sent(b)]
    rows: dict[tuple[int | None, str, tuple[str, ...], tuple[float, float], tuple[float, float]], dict[str, Hashable]] = {}
    for key in dict.fromkeys([*sent[0], *sent[1]]):
        before, after = (own.get(key, (0.0, 0.0)) for own in sent)
        if not all(math.isclose(x, y, rel_tol=_ROUNDING) for x, y in zip(before, after, strict=True)):
            group, kind, axes, tensor = key
            rows.setdefault((group, kind, axes, before, after), {})[tensor] = None
    found: list[SentDifference] = []
    for (group, kind, axes, before, after), tensors in rows.items():
        for g in grouped(tensors):
            n = len(g.paths)
            own = (before[0] * n, before[1] * n), (after[0] * n, after[1] * n)
            found.append(SentDifference(group, kind, axes, g.pattern, n, *own))
    return sorted(found, key=lambda s: (-abs(s.after[0] - s.before[0]), s.kind, s.axes, s.tensor, s.group or 0))


def _sent(own: View) -> dict[_Key, tuple[float, float]]:
    """(seconds, wire bytes) of a step, by group, kind, axes and array; a value without a name is named after its function."""
    found: dict[_Key, tuple[float, float]] = {}
    for part in own.parts:
        for c in part.plan.collectives:
            tensor = f"value of {_function(c.source)}" if c.tensor.startswith("value ") else c.arrays
            key = (part.group, str(c.kind), c.axes, tensor)
            before = found.get(key, (0.0, 0.0))
            found[key] = before[0] + c.seconds * c.times, before[1] + c.wire_bytes * c.times
    return found


def _function(source: str) -> str:
    """A source line without folder and number, which differ between checkouts: ``model.py (Block.__call__)``."""
    return re.sub(r":\d+", "", source.rpartition("/")[2], count=1)
