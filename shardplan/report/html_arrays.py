"""The arrays of a step for the HTML page: their cuts and what their next-best layouts would cost, equal arrays folded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardplan.ir import spec_text
from shardplan.plans.data import Argument, PlanData
from shardplan.report.explain import explain_groups
from shardplan.report.paths import PathGroup, grouped
from shardplan.search.coarsening.variables import FREE
from shardplan.search.session import Session

_OTHERS = 3
"""The most other layouts that are shown for an array."""


@dataclass(frozen=True, slots=True)
class OtherLayout:
    """Another layout of an array: with it and all else fixed, a step takes ``more_s`` seconds more."""

    spec: str
    more_s: float


@dataclass(frozen=True, slots=True)
class ArrayRow:
    """Arrays that are alike: ``count`` of them, each of ``shape``, with ``cuts[d]`` the mesh axes (numbers) that cut dim d.

    ``nbytes`` is the size of all of them, ``device_bytes`` the part that one device holds. ``others`` are the cheapest other
    layouts of the first array, ``first``, and ``why`` explains its layout.
    """

    pattern: str
    first: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    spec: str
    cuts: tuple[tuple[int, ...], ...]
    nbytes: int
    device_bytes: float
    others: tuple[OtherLayout, ...]
    why: str


def array_rows(plan: PlanData, session: Session) -> tuple[ArrayRow, ...]:
    """The arguments of a step; those of equal shape and layout are folded if their paths differ only in numbers or names."""
    arguments = {a.path: a for a in plan.arguments}
    groups = grouped({a.path: (a.shape, a.dtype, a.layout) for a in plan.arguments})
    others = _Others(plan, session)
    reasons = explain_groups(plan, session, groups)
    return tuple(_row(plan, arguments, g, others.of(g.paths[0]), why) for g, why in zip(groups, reasons, strict=True))


def explained_rows(plan: PlanData, paths: Iterable[str], explanations: Mapping[str, str]) -> tuple[ArrayRow, ...]:
    """Some arguments, folded as in `array_rows`, with explanations from a plan's file but without other layouts."""
    arguments = {a.path: a for a in plan.arguments}
    groups = grouped({p: (arguments[p].shape, arguments[p].dtype, arguments[p].layout) for p in paths})
    return tuple(_row(plan, arguments, g, (), explanations.get(g.paths[0], "")) for g in groups)


def _row(
    plan: PlanData, arguments: Mapping[str, Argument], group: PathGroup, others: tuple[OtherLayout, ...], why: str
) -> ArrayRow:
    one = arguments[group.paths[0]]
    cuts = one.layout.dims if one.layout is not None else ((),) * len(one.shape)
    nbytes = sum(arguments[path].nbytes for path in group.paths)
    ways = math.prod(plan.factors[f].size for dim in cuts for f in dim)
    return ArrayRow(
        pattern=group.pattern,
        first=one.path,
        count=len(group.paths),
        shape=one.shape,
        dtype=one.dtype,
        spec=spec_text(plan.entries[one.path]),
        cuts=cuts,
        nbytes=nbytes,
        device_bytes=nbytes / ways,
        others=others,
        why=why,
    )


class _Others:
    """The cheapest other layouts of arguments, computed once for arguments that share a variable."""

    def __init__(self, plan: PlanData, session: Session) -> None:
        self._session, self._names = session, tuple(plan.axes)
        self._numbers = {path: i for i, path in enumerate(session.graph.input_paths)}
        self._known: dict[int, tuple[OtherLayout, ...]] = {FREE: ()}

    def of(self, path: str) -> tuple[OtherLayout, ...]:
        """The cheapest other layouts of an argument; none where it has no choice."""
        v = self._session.variable(self._numbers[path])
        if v not in self._known:
            found = self._session.alternatives(v)[:_OTHERS]
            self._known[v] = tuple(OtherLayout(spec_text(a.layout.entries(self._names)), a.more_s) for a in found)
        return self._known[v]
