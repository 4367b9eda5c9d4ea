"""Assertions about plans, for the tests of projects that use them (`shardplan.testing`)."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import replace
from os import PathLike
from pathlib import Path

from shardplan.collectives.issued import PlannedCollective
from shardplan.errors import PlanFileError, ShardplanError, nearest
from shardplan.ir import Collective
from shardplan.plans.files import read_any
from shardplan.plans.fingerprint import fingerprint
from shardplan.report.diff_text import diff_text
from shardplan.report.peak_text import peak_lines
from shardplan.report.plan_diff import plan_diff
from shardplan.report.tables import size, table
from shardplan.shell.placed_plan import PlacedPlan
from shardplan.shell.plan_of_step import Plan
from shardplan.sizes import parse_bytes

_SHOWN = 8
"""The most collectives that a failure lists."""


def assert_fits(plan: Plan | PlacedPlan, memory_limit: int | str | None = None) -> None:
    """Fails if a device's peak exceeds ``memory_limit`` (bytes, or text such as "60GiB"; by default the plan's own limit).

    Raises:
        AssertionError: with what a device holds where memory peaks.
    """
    __tracebackhide__ = True
    limit = plan.memory_limit if memory_limit is None else parse_bytes(memory_limit)
    if plan.peak_bytes > limit:
        lines = peak_lines(plan.session) if isinstance(plan, Plan) else []
        over = f"the plan needs {size(plan.peak_bytes)} a device, {size(plan.peak_bytes - limit)} over the limit of {size(limit)}"
        raise AssertionError("\n".join([over, *lines]))


def assert_communication_at_most(plan: Plan | PlacedPlan, limit: int | str) -> None:
    """Fails if a device sends more bytes in a step than ``limit`` (bytes, or text such as "2GiB").

    Raises:
        AssertionError: with the collectives that send most.
    """
    __tracebackhide__ = True
    sent, most = plan.communication_bytes, 0 if limit == 0 else parse_bytes(limit, what="limit of communication")
    if sent > most:
        head = f"a device sends {size(sent)} in a step, {size(sent - most)} over the limit of {size(most)}"
        raise AssertionError(f"{head}\n{_collectives_text(plan.collectives)}")


def assert_no_collective(plan: Plan | PlacedPlan, pattern: str = "*", kind: str | None = None) -> None:
    """Fails if the plan moves an array whose path or source line matches the glob ``pattern``, by any collective or one ``kind``.

    The gradient and the update of an argument have its path. Kinds are those of `Plan.collectives`: "all-reduce", "all-gather",
    "reduce-scatter", "all-to-all", ...

    Raises:
        AssertionError: with these collectives.
        ShardplanError: for a kind that does not exist, or a pattern that matches no path and no source line of the step.
    """
    __tracebackhide__ = True
    kinds = [str(known.value) for known in Collective]
    if kind is not None and kind not in kinds:
        raise ShardplanError(f"there is no collective {kind!r}{nearest(kind, kinds)}: kinds are written as in plan.collectives")
    known = _places(plan)
    if not fnmatch.filter(known, pattern):
        raise ShardplanError(
            f"{pattern!r} matches no path of an argument or a result, and no source line of the step{nearest(pattern, known)}"
        )
    moved = [c for c in plan.collectives if kind in (None, str(c.kind))]
    found = [c for c in moved if any(fnmatch.fnmatchcase(text, pattern) for text in (c.tensor, c.source, *c.paths))]
    if found:
        wanted = f"no {kind or 'collective'} of {pattern!r} was expected"
        raise AssertionError(f"{wanted}, the plan has {len(found)}\n{_collectives_text(found)}")


def assert_plan_unchanged(plan: Plan | PlacedPlan, file: str | PathLike[str], *, update: bool = False) -> None:
    """Fails if the plan differs from the one saved in ``file``; with ``update``, saves it there instead.

    Measured seconds of planning are not compared.

    Raises:
        AssertionError: with what changed, or if there is no such file.
        PlanFileError: for a file that is not a plan of this release.
    """
    __tracebackhide__ = True
    path = Path(file)
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save(path)
        return
    if not path.exists():
        raise AssertionError(f"there is no saved plan {path}: save it with pytest --update-plans, or plan.save({str(path)!r})")
    try:
        saved = read_any(path)
    except PlanFileError as error:
        raise PlanFileError(f"{error}; pytest --update-plans saves the plan of today") from error
    found = plan_diff(saved, replace(plan.data, fingerprint=fingerprint(plan.traced, numbers=False)))
    if not found.alike:
        text = diff_text(found, (path.name, "the plan"))
        raise AssertionError(f"{text}\n\npytest --update-plans takes the plan of today for the right one")


def _places(plan: Plan | PlacedPlan) -> list[str]:
    """What a pattern may match: paths of arguments and results, source lines, and the names of values that collectives move."""
    program = plan.traced.program
    lines = dict.fromkeys(str(op.source) for op in program.every_op())
    return [*program.input_paths, *program.output_paths, *lines, *(c.tensor for c in plan.collectives)]


def _collectives_text(collectives: Iterable[PlannedCollective]) -> str:
    """The collectives that send most, one line each: kind, axes, bytes on the wire in a step, array, source line."""
    rows = sorted(collectives, key=lambda c: (-c.wire_bytes * c.times, c.tensor, c.source))
    names = ["-" if c.tensor.startswith("value ") else c.arrays for c in rows]
    shown = [
        [f"{c.kind} over {' x '.join(c.axes)}", size(c.wire_bytes * c.times), name, c.source]
        for c, name in zip(rows[:_SHOWN], names, strict=False)
    ]
    rest = [f"and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else []
    return "\n".join([table(["collective", "sent", "array", "source"], shown, align="lrll"), *rest])
