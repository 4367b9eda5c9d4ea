"""A plan with groups of devices, as text and as JSON values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardplan.ir import spec_text
from shardplan.plans.data import PlanData, TriedPlacement
from shardplan.regions.buffers import most_held
from shardplan.regions.placed import PlacedStep
from shardplan.regions.tasks import PlacedTaskGraph, Task
from shardplan.report.json import PLAN_KEYS
from shardplan.report.paths import grouped
from shardplan.report.plan_text import placements_text
from shardplan.report.tables import device_ranges, seconds, size, table
from shardplan.sizes import axes_text


@dataclass(frozen=True, slots=True)
class PlacedFigures:
    """The data of a report on a placed plan: the plans of its groups, their tasks, and the figures of the whole step.

    ``paths`` are the arguments' paths, ``tried`` the placements among which this one was chosen.
    """

    title: str
    cluster: str
    groups: Sequence[PlanData]
    placed: PlacedStep
    paths: Sequence[str]
    microbatches: int
    figures: Mapping[str, Any]
    tried: Sequence[TriedPlacement] = ()


def placed_text(plan: PlacedFigures) -> str:
    """The step, what each group runs and holds, and where arguments lie, for people."""
    figures, graph = plan.figures, plan.placed.graph
    lines = [
        f"{plan.title} on {plan.cluster}: {seconds(figures['step_time_s'])} a step on {len(plan.groups)} groups of devices",
        f"  {plan.microbatches} microbatches, {len(graph.pieces)} programs, {len(graph.tasks)} runs of them a step",
        f"  {figures['idle_share']:.0%} of the devices' time is idle; {size(figures['transfer_bytes'])} go between groups",
        f"  planned in {seconds(figures['trace_s'] + figures['search_s'])}",
    ]
    rows = [
        [
            str(g),
            device_ranges(own.devices),
            axes_text({f.name: f.size for f in own.factors}),
            " ".join(f"{name}={n}" for name, n in zip(data.matrix["axes"], _products(data), strict=True)) or "-",
            seconds(plan.placed.dispatch.busy_s(graph, g)),
            size(most_held(graph, plan.placed.dispatch, g)),
        ]
        for g, (own, data) in enumerate(zip(graph.groups, plan.groups, strict=True))
    ]
    lines += ["", table(["group", "devices", "mesh", "used for", "busy", "held"], rows, align="lllrrr")]
    held = Counter(group for group, _ in graph.inputs)
    lies = [(str(group), _spec(plan, group, key[0])) for group, key in graph.inputs]
    specs = dict(zip(plan.paths, lies, strict=True))
    alike = [[g.pattern, str(len(g.paths)), *specs[g.paths[0]]] for g in grouped(specs)]
    lines += ["", table(["argument", "arrays", "group", "spec"], alike, align="lrrl"), ""]
    lines.append("arguments held: " + ", ".join(f"group {g} {n}" for g, n in sorted(held.items())))
    lines += ["", "Placements", "", placements_text(plan.tried)] if plan.tried else []
    return "\n".join(lines)


_ASKED = (
    *("memory_limit", "memory_limit_origin", "objective", "one_choice", "donate_argnums", "replicate", "time_budget_s"),
    *("time_model", "constants"),
)
"""The options and constants, which are the same in each group."""


def placed_json(plan: PlacedFigures) -> dict[str, Any]:
    """The figures as JSON values. Seconds are of one step, bytes of one device. Keys only of plans on all devices are None."""
    graph, dispatch = plan.placed.graph, plan.placed.dispatch
    groups = [
        {
            "devices": list(own.devices),
            "axes": {f.name: f.size for f in own.factors},
            "matrix": data.matrix,
            "busy_s": dispatch.busy_s(graph, g),
            "held_bytes": most_held(graph, dispatch, g),
            "peak_bytes": data.peak_bytes,
        }
        for g, (own, data) in enumerate(zip(graph.groups, plan.groups, strict=True))
    ]
    issues = [
        {
            "name": graph.pieces[i.what.piece].name if isinstance(i.what, Task) else "transfer",
            "group": graph.pieces[i.what.piece].group if isinstance(i.what, Task) else i.what.target,
            "microbatch": i.what.microbatch if isinstance(i.what, Task) else i.what.key[1],
            "start_s": i.start_s,
            "end_s": i.end_s,
        }
        for i in dispatch.issues
    ]
    asked = {name: getattr(plan.groups[0], name) for name in _ASKED}
    return {
        **dict.fromkeys(PLAN_KEYS),
        **asked,
        **plan.figures,
        "cluster": plan.cluster,
        "backend": "regions",
        "microbatches": plan.microbatches,
        "placements_tried": [asdict(row) for row in plan.tried],
        "groups": groups,
        "group_of": {path: group for path, (group, _) in zip(plan.paths, graph.inputs, strict=True)},
        "in_specs": {path: _spec(plan, group, key[0]) for path, (group, key) in zip(plan.paths, graph.inputs, strict=True)},
        "issues": issues,
    }


def _spec(plan: PlacedFigures, group: int, tensor: int) -> str:
    own = plan.placed.graph.groups[group]
    layout = own.layouts.get(tensor)
    return spec_text(() if layout is None else layout.entries(own.names))


def _products(data: PlanData) -> list[int]:
    found: list[int] = []
    for row in data.matrix["factors"]:
        product = 1
        for n in row:
            product *= n
        found.append(product)
    return found


def transfer_bytes(graph: PlacedTaskGraph) -> int:
    """Bytes of all tensors that go from one group to another in a step."""
    return sum(graph.tensors[t.key[0]].nbytes for t in graph.transfers)


def idle_share(placed: PlacedStep, devices: int) -> float:
    """The part of the step in which a device computes nothing, on average over ``devices``."""
    graph, dispatch = placed.graph, placed.dispatch
    total = sum(dispatch.busy_s(graph, g) * len(own.devices) for g, own in enumerate(graph.groups))
    whole = dispatch.step_time_s * devices
    return 1 - total / whole if whole else 0.0
