"""A saved plan with groups of devices, for a step: its programs are made again, and run in the order that was saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from shardplan.errors import DeviceError, MicrobatchError, PlacementError, PlanFileError
from shardplan.frontend.trace import Traced
from shardplan.graph import flatten
from shardplan.microbatches.accumulating import microbatched
from shardplan.plans.fit import check_choices
from shardplan.plans.placed_data import PlacedData, group_choices
from shardplan.regions.cuts import Cut, cut_of, graph_of, group_parts, in_order, step_of
from shardplan.regions.dispatch import Issue
from shardplan.regions.tasks import TaskGraph
from shardplan.shell.placed_plan import PlacedPlan


def placed_for_step(name: str, data: PlacedData, step: Callable[..., Any], traced: Traced, mesh: Mesh | None) -> PlacedPlan:
    """The `PlacedPlan` of data read from the file ``name``, for a traced step that has the plan's fingerprint.

    Raises:
        PlanFileError: if the groups, their plans or the order do not fit the step.
        DeviceError: for a mesh: groups have meshes of their own.
    """
    _refuse_mesh(name, data, mesh)
    replicate = data.groups[0].replicate
    try:
        program = microbatched(traced.program, data.groups[0].microbatches, replicate)
        cut = cut_of(program, data.devices, data.outer, data.inner, data.chunks)
        _check_groups(name, data, cut)
        graph = graph_of(cut, group_choices(data.groups), replicate)
        placed = step_of(cut, graph, in_order(graph, _issues(data, graph)))
    except (PlacementError, MicrobatchError) as error:
        raise PlanFileError(f"{name}: {error}; plan this step again") from error
    return PlacedPlan(data, placed, traced=traced, step=step)


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


def _check_groups(name: str, data: PlacedData, cut: Cut) -> None:
    """Checks that the choices of each group fit its program."""
    for n, (part, plan) in enumerate(zip(group_parts(cut), data.groups, strict=True)):
        program = part.program
        check_choices(f"{name}: group {n}", plan, program, flatten(program, replicate=plan.replicate))


def _issues(data: PlacedData, graph: TaskGraph) -> list[Issue]:
    """The issues that the file names.

    Raises:
        PlacementError: for a number that does not exist.
    """
    found: list[Issue] = []
    for row in data.issues:
        own = graph.tasks if row.kind == "task" else graph.transfers
        if row.number >= len(own):
            raise PlacementError(f"the order names {row.kind} {row.number}, and the step has {len(own)}")
        found.append(Issue(own[row.number], row.start_s, row.end_s))
    return found
