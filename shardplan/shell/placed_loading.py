"""Loads a saved plan with groups of devices for a step: it builds the programs again, to run in the saved order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from shardplan.errors import DeviceError
from shardplan.frontend.trace import Traced
from shardplan.plans.fitted import fitted_groups
from shardplan.plans.placed_data import PlacedData
from shardplan.shell.placed_plan import PlacedPlan


def placed_for_step(name: str, data: PlacedData, step: Callable[..., Any], traced: Traced, mesh: Mesh | None) -> PlacedPlan:
    """The `PlacedPlan` of data read from the file ``name``, for a traced step that has the plan's fingerprint.

    Raises:
        PlanFileError: if the groups, their plans or the order do not fit the step.
        DeviceError: for a mesh: groups have meshes of their own.
    """
    _refuse_mesh(name, data, mesh)
    return PlacedPlan(data, fitted_groups(name, data, traced), traced=traced, step=step)


def _refuse_mesh(name: str, data: PlacedData, mesh: Mesh | None) -> None:
    if mesh is None:
        return
    count = len(data.groups)
    if mesh.size != data.cluster.size:
        raise DeviceError(
            f"{name}: the {count} groups of this plan are parts of {data.cluster.size} devices ({data.cluster.name}), and the "
            f"mesh has {mesh.size}: plan the step again for these, with shardplan.replan or shardplan.plan"
        )
    raise DeviceError(
        f"{name}: each of the {count} groups of this plan has a mesh of its own: leave out mesh, and give plan.jit the devices"
    )
