"""Plans and comparisons as JSON values: the fields that other programs read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from shardplan.ir import spec_text
from shardplan.plans.data import PlanData
from shardplan.plans.xla_flags import xla_flags
from shardplan.remat import Remat
from shardplan.report.text import collective_rows


def figures(plan: PlanData) -> dict[str, Any]:
    """The figures of a plan as JSON values: seconds of one step, bytes of one device and step."""
    return {
        "step_time_s": plan.step_time_s,
        "compute_s": plan.compute_s,
        "communication_s": plan.communication_s,
        "exposed_s": plan.exposed_s,
        "serial_s": plan.serial_s,
        "hidden_s": plan.hidden_s,
        "communication_bytes": plan.communication_bytes,
        "peak_bytes": plan.peak_bytes,
        "memory_limit": plan.memory_limit,
        "memory_limit_origin": plan.limit_origin,
        "lower_bound_s": plan.lower_bound_s,
        "gap": plan.gap,
        "unlimited_s": plan.unlimited_s,
        "exact": plan.exact,
        "stopped": plan.stopped,
        "trace_s": plan.trace_s,
        "search_s": plan.search_s,
        "operators": plan.operators,
        "remat": remat_json(plan.remat),
        "objective": plan.objective,
        "time_model": plan.time_model,
        "backend": plan.backend,
        "axes": dict(plan.axes),
        "matrix": plan.matrix,
        "provenance": plan.provenance,
        "in_specs": {path: spec_text(entries) for path, entries in plan.entries.items()},
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


def plan_json(plan: PlanData) -> dict[str, Any]:
    """A completed plan as one JSON object: its figures, its collectives by kind and axes, and the baselines."""
    return {
        **figures(plan),
        "cluster": plan.cluster.name,
        "idle_axes": dict(plan.idle_axes),
        "unknown_trips": list(plan.unknown_trips),
        "whole_ops": list(plan.whole_ops),
        "collectives": collective_rows(plan),
        "baselines": [asdict(b) for b in plan.baselines or ()],
        "xla_flags": xla_flags(plan.cluster),
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
