"""The data of a plan that comparisons read, in one form for plans with and without groups of devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from shardplan.ir import Layout, spec_text
from shardplan.plans.data import Argument, PlanData
from shardplan.plans.files import AnyData
from shardplan.plans.placed_data import PlacedData, conditions
from shardplan.report.tables import device_ranges
from shardplan.sizes import axes_text

_RUN = ("backend", "microbatches", "remat", "donate_argnums")
_OF_A_GROUP = ("compute_s", "communication_s", "communication_bytes", "peak_bytes")


@dataclass(frozen=True, slots=True)
class PlanPart:
    """The plan of all devices (``group`` None), or that of one group's ops as if they ran in one piece."""

    group: int | None
    plan: PlanData

    def text(self, layout: Layout | None) -> str:
        """A layout as text, with its group if there are groups."""
        spec = spec_text(layout.entries(tuple(self.plan.axes)) if layout else ())
        return spec if self.group is None else f"{spec} on group {self.group}"

    def device_bytes(self, argument: Argument) -> int:
        """The bytes of an argument on one device."""
        used = () if argument.layout is None else argument.layout.used
        return argument.nbytes // math.prod(self.plan.factors[f].size for f in used)


@dataclass(frozen=True, slots=True)
class View:
    """One plan as a comparison sees it. ``arguments`` has those of the whole step by path, each with the part that holds it."""

    data: AnyData
    parts: tuple[PlanPart, ...]
    arguments: Mapping[str, tuple[PlanPart, Argument]]
    results: Mapping[str, str]
    machine: Mapping[str, Any]
    figures: Mapping[str, float]

    @property
    def asked(self) -> PlanData:
        """The data that hold the plan's options."""
        return conditions(self.data)

    @property
    def types(self) -> dict[str, str]:
        """The type of each argument."""
        return {path: f"{a.dtype}{list(a.shape)}" for path, (_, a) in self.arguments.items()}

    @property
    def specs(self) -> dict[str, str]:
        """The layout of each argument, with its group if there are groups."""
        return {path: part.text(a.layout) for path, (part, a) in self.arguments.items()}

    @property
    def op_groups(self) -> dict[tuple[str, int], int]:
        """The group of each op, where there are groups."""
        if isinstance(self.data, PlanData):
            return {}
        of = {"outer": self.data.outer, "inner": self.data.inner_groups}
        return {(where, op): group for where, groups in of.items() for op, group in groups.items()}

    @property
    def order(self) -> tuple[tuple[str, int], ...]:
        """The order in which runs and transfers are issued, where there are groups."""
        return () if isinstance(self.data, PlanData) else tuple((row.kind, row.number) for row in self.data.issues)

    def held_bytes(self, paths: Iterable[str]) -> int:
        """The bytes of arguments on one device."""
        return sum(part.device_bytes(a) for part, a in (self.arguments[path] for path in paths))

    def moving(self, paths: Set[str]) -> tuple[float, float]:
        """(all, exposed) seconds of the collectives that move these arguments, their gradients or their updates."""
        own = [c for part in self.parts for c in part.plan.collectives if not paths.isdisjoint(c.paths)]
        return sum(c.seconds * c.times for c in own), sum((c.seconds - c.hideable_s) * c.times for c in own)


def view(data: AnyData) -> View:
    """A plan as a comparison sees it."""
    return _on_groups(data) if isinstance(data, PlacedData) else _on_all_devices(data)


def _on_all_devices(data: PlanData) -> View:
    part = PlanPart(None, data)
    names = ("step_time_s", "compute_s", "communication_s", "host_s", "communication_bytes", "peak_bytes", "host_bytes")
    return View(
        data,
        (part,),
        {a.path: (part, a) for a in data.arguments},
        dict(zip(data.result_paths, map(part.text, data.result_layouts), strict=True)),
        {"axes": axes_text(data.axes), **_run(data)},
        {name: getattr(data, name) for name in names},
    )


def _on_groups(data: PlacedData) -> View:
    parts = tuple(PlanPart(n, plan) for n, plan in enumerate(data.groups))
    own = [{a.path: a for a in part.plan.arguments} for part in parts]
    meshes = [axes_text(plan.axes) for plan in data.groups]
    runs = sum(row.kind == "task" for row in data.issues)
    groups = {
        f"group {n}": f"devices {device_ranges(d)} as {mesh}"
        for n, (d, mesh) in enumerate(zip(data.devices, meshes, strict=True))
    }
    return View(
        data,
        parts,
        {path: (parts[n], own[n][path]) for path, n in data.group_of.items()},
        {},  # a result lies where the program that makes it leaves it
        {**groups, "schedule": f"{runs} runs of programs, {len(data.issues) - runs} transfers", **_run(data.groups[0])},
        {
            "step_time_s": max((row.end_s for row in data.issues), default=0.0),
            **{f"{name} of group {n}": getattr(plan, name) for n, plan in enumerate(data.groups) for name in _OF_A_GROUP},
        },
    )


def _run(plan: PlanData) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in _RUN}
