"""Plans and comparisons as JSON values: the fields that other programs read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from shardplan.ir import spec_text
from shardplan.mesh import Cluster
from shardplan.plans.codec import Writer
from shardplan.plans.data import PlanData
from shardplan.remat import Remat
from shardplan.report.plan_text import collective_rows

_LONG = frozenset(
    "factors argument_names arguments result_paths result_layouts choices tried left_out fingerprint explanations".split()
)
"""The fields of `PlanData` that are for the plan's file alone."""

_DERIVED = (
    *("communication_s", "exposed_s", "serial_s", "hidden_s", "communication_bytes", "lower_bound_s", "gap"),
    *("host_bytes", "axes", "matrix", "provenance"),
)
"""The properties of `PlanData` that `plan_json` adds to its fields."""


PLAN_KEYS = (*(f.name for f in fields(PlanData) if f.name not in _LONG), *_DERIVED, "in_specs", "collectives", "xla_flags")
"""The keys of `plan_json`."""


def plan_json(plan: PlanData) -> dict[str, Any]:
    """A completed plan as one JSON object: its fields, its collectives by kind and axes, and the baselines.

    Seconds are of one step, bytes of one device and step.
    """
    written = Writer({Cluster: lambda cluster: cluster.name, Remat: remat_json})
    return {
        **{f.name: written.value(getattr(plan, f.name)) for f in fields(plan) if f.name not in _LONG},
        **{name: getattr(plan, name) for name in _DERIVED},
        "offloaded": [plan.arguments[i].path for i in sorted(plan.offloaded)],
        "in_specs": {path: spec_text(entries) for path, entries in plan.entries.items()},
        "collectives": collective_rows(plan),
        "xla_flags": plan.xla_flags,
    }


def remat_json(remat: Remat) -> dict[str, Any]:
    """What the backward pass computes again. Bytes are of whole values; ``without`` is the best plan that recomputes nothing."""
    return {
        "chosen": bool(remat.parts),
        "policy": remat.policy,
        "loops": remat.loops,
        "blocks": remat.blocks,
        "operators": remat.operators,
        "saved_bytes": remat.saved_bytes,
        "without": asdict(remat.without) if remat.without is not None else None,
        "note": remat.note,
    }


def comparison_rows(
    plan: PlanData,
    measured: Mapping[str, tuple[float, float, int]] | None = None,
    timed: Mapping[str, tuple[float, float]] | None = None,
) -> list[dict[str, Any]]:
    """The plan, then baselines by time, those that fit first.

    ``measured``: (wire bytes, raw wire bytes, peak bytes) by name. ``timed``: (seconds of a step, spread of the runs) by name.
    """
    plan_row: dict[str, Any] = {
        "name": "this plan",
        "step_time_s": plan.step_time_s,
        "communication_bytes": plan.communication_bytes,
        "peak_bytes": plan.peak_bytes,
        "fits": plan.peak_bytes <= plan.memory_limit,
    }
    rows: list[dict[str, Any]] = [
        plan_row,
        *sorted((asdict(b) for b in plan.baselines or ()), key=lambda b: (not b["fits"], b["step_time_s"], b["name"])),
    ]
    for row in rows:
        wire, raw, peak = (measured or {}).get(row["name"], (None, None, None))
        row |= {"measured_bytes": wire, "raw_measured_bytes": raw, "measured_peak_bytes": peak}
        row["measured_step_s"], row["measured_spread"] = (timed or {}).get(row["name"], (None, None))
    return rows
