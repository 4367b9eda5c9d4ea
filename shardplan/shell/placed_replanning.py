"""Makes a plan with groups of devices again for another cluster, with the placement that was asked for."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from shardplan.errors import ReshardError
from shardplan.frontend.argnums import leaves_of
from shardplan.ir import Program
from shardplan.mesh import Cluster
from shardplan.microbatches.accumulating import checked_microbatches
from shardplan.plans.placed_data import PlacedData
from shardplan.regions.assignment import Assignment, assigned
from shardplan.shell.api import plan as make_plan
from shardplan.shell.clusters import ClusterLike, resolve_cluster
from shardplan.shell.placed_plan import PlacedPlan
from shardplan.shell.plan_of_step import Plan

_log = logging.getLogger("shardplan")


def placed_again(plan: PlacedPlan, cluster: ClusterLike, given: Mapping[str, Any]) -> Plan | PlacedPlan:
    """The plan of the same step on another cluster, with the old plan's options, which those in ``given`` override.

    Raises:
        ReshardError: if the user gave the groups, and one of their devices is gone.
        ShardplanError: as `shardplan.plan`.
    """
    own, resolved = plan.groups[0], resolve_cluster(cluster)[0]
    options: dict[str, Any] = {
        "memory_limit": None if own.memory_limit_origin else own.memory_limit,
        "time_budget_s": own.time_budget_s,
        "time_model": own.time_model,
        "donate_argnums": plan.donate_argnums,
        "replicate": own.replicate,
        "traced": plan.traced,
        **_placement(plan, resolved, given),
        **given,
    }
    args = jax.tree.unflatten(plan.traced.in_tree, plan.traced.in_shapes)
    return make_plan(plan.step, *args, cluster=cluster, **options)


def _placement(plan: PlacedPlan, cluster: Cluster, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that say where ops run."""
    data, own = plan.data, plan.groups[0]
    if data.auto is not None:
        auto = data.auto
        if "axes" in given:
            return {"microbatches": auto.microbatches, "batch_argnums": auto.batch_argnums}
        return {"placement": "auto", "microbatches": auto.microbatches, "batch_argnums": auto.batch_argnums}
    if data.inner is not None:
        axes = {} if "axes" in given else {"axes": _axes(data, cluster)}
        return {**axes, "microbatches": own.microbatches.count, "batch_argnums": _batch_argnums(plan)}
    if gone := sorted({d for group in data.devices for d in group if d >= cluster.size}):
        raise ReshardError(
            f"the groups of this plan were given, and {cluster.name} has no device {gone[0]}: plan the step again, with "
            "placement= a shardplan.place result for that cluster; shardplan.reshard moves its state there"
        )
    return {"placement": KeptGroups(data)}


@dataclass(frozen=True, slots=True)
class KeptGroups:
    """The groups of an old plan, as a placement of the same step."""

    data: PlacedData

    def assignment_of(self, program: Program, cluster: Cluster) -> Assignment:
        """The group of each op."""
        return assigned(program, self.data.devices, self.data.outer)


def _axes(data: PlacedData, cluster: Cluster) -> dict[str, int] | None:
    """The stages, or fewer that divide the devices, and the axes inside each if they still fit; warns of changes."""
    wanted, inside = len(data.groups), dict[str, int](data.groups[0].fixed_axes.items())
    stages = next(n for n in range(min(wanted, cluster.size), 0, -1) if cluster.size % n == 0)
    if stages < wanted:
        _log.warning("%d stages of the old plan do not divide %d devices: %d do", wanted, cluster.size, stages)
    if inside and math.prod(inside.values()) * stages != cluster.size:
        sizes = ", ".join(f"{name}={n}" for name, n in inside.items())
        _log.warning("axes %s of the old plan's stages do not make %d devices: the search chooses", sizes, cluster.size // stages)
        inside = {}
    chunks = {} if data.chunks_asked is None else {"chunk": data.chunks_asked}
    return {**({"stage": stages, **chunks} if stages > 1 else {}), **inside} or None


def _batch_argnums(plan: PlacedPlan) -> tuple[int, ...] | None:
    """The arguments that are the batch of the old plan; None where the default finds the same ones."""
    parts, traced = plan.groups[0].microbatches, plan.traced
    if checked_microbatches(traced, parts.count, None) == parts:
        return None
    count = len(traced.in_tree.children())
    return tuple(n for n in range(count) if not set(parts.batch).isdisjoint(leaves_of(traced.in_tree, (n,))))
