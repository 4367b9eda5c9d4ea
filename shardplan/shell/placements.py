"""Plans with ops on groups of devices: reads ``placement=``, and plans each group."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from shardplan.errors import ClusterError, PlacementError, ShardplanError
from shardplan.graph import flatten
from shardplan.ir import Program
from shardplan.mesh import Cluster
from shardplan.microbatches.accumulating import microbatched
from shardplan.placement.device_groups import used_groups
from shardplan.placement.device_topology import machine_of
from shardplan.placement.grouping import operator_graph
from shardplan.placement.operators import OperatorGraph
from shardplan.placement.placement_problem import problem_of
from shardplan.placement.strategy_files import read_strategy_file
from shardplan.planning.planner import Made
from shardplan.regions.assignment import Assignment, Group, on_devices
from shardplan.regions.group_plans import choices_of, group_plans
from shardplan.regions.group_programs import split
from shardplan.regions.looped import looped_step
from shardplan.regions.loops import LoopSplit, loop_of
from shardplan.regions.placed import PlacedStep, placed_step
from shardplan.regions.stages import stages_of
from shardplan.shell.made_plans import Asked, plan_data
from shardplan.shell.placed_plan import PlacedPlan


@runtime_checkable
class Placed(Protocol):
    """What says where the ops of a step run, as the result of `shardplan.place` does."""

    def assignment_of(self, program: Program, cluster: Cluster) -> Assignment:
        """The group of devices of each op of a traced step."""
        ...


PlacementLike = str | os.PathLike[str] | Placed


def on_groups(asked: Asked, stages: int, placement: PlacementLike) -> PlacedPlan:
    """The plan of a step on groups of devices: as a pipeline, or as a placement says.

    Raises:
        ShardplanError: for both at once, or for options that a placement does not take.
        PlacementError: as `staged_plan` and `placed_plan`.
    """
    wanted = asked.searcher.wanted
    refuse_with_groups({"backend": wanted.backend != "explicit"})
    if stages > 1:
        refuse_with_groups({"placement": placement != "one"})
        if asked.microbatches.count == 1:
            raise PlacementError(f"{stages} stages take turns with one microbatch: give microbatches, for example {4 * stages}")
        return staged_plan(asked, microbatched(asked.traced.program, asked.microbatches, asked.searcher.replicate), stages)
    refuse_with_groups({"microbatches": asked.microbatches.count > 1, "axes": wanted.axes, "factors": wanted.factors})
    origin = placement if isinstance(placement, str) else type(placement).__name__
    return placed_plan(asked, _assignment(asked, placement), origin)


def placed_plan(asked: Asked, assignment: Assignment, origin: str) -> PlacedPlan:
    """The plan of a step with the ops of each group of devices planned together. ``origin`` says where the groups come from.

    Raises:
        PlacementError: for a step that names mesh axes.
        MemoryLimitError: if the ops of a group fit its devices in no layout.
    """
    cluster = asked.searcher.cluster
    cut = split(assignment)
    made = group_plans(cut.assignment.groups, cut.group_parts, cluster, asked.searcher, _donated(asked), asked.limit.origin)
    placed = placed_step(cut, choices_of(made), cluster, asked.searcher.replicate)
    return _plan(asked, made, placed, origin)


def staged_plan(asked: Asked, program: Program, stages: int) -> PlacedPlan:
    """The plan of a step as a pipeline of stages, on equal groups of consecutive devices.

    ``program`` is the step in microbatches.

    Raises:
        PlacementError: if the step has fewer places to cut than stages need, or names mesh axes.
        MemoryLimitError: if a stage fits its devices in no layout.
    """
    cluster, replicate = asked.searcher.cluster, asked.searcher.replicate
    if program.meshed:
        raise PlacementError("the step names mesh axes, which the groups of a pipeline do not have: remove its constraints")
    loop, groups = loop_of(program), stage_groups(cluster, stages)
    where = stages_of(program, loop, stages, cluster.device, replicate)
    cut = LoopSplit(program, loop, groups, where.outer, where.inner)
    parts = tuple(cut.group_program(g)[0] for g in range(stages))
    made = group_plans(groups, parts, cluster, asked.searcher, _donated(asked), asked.limit.origin)
    return _plan(asked, made, looped_step(cut, choices_of(made), cluster, replicate), f"{stages} stages")


def stage_groups(cluster: Cluster, stages: int) -> tuple[Group, ...]:
    """The devices of each stage: consecutive ones, so that stages differ at the slowest levels.

    Raises:
        ClusterError: for a number of stages that does not divide the devices.
    """
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1 or cluster.size % stages:
        raise ClusterError(f"axes: stage={stages!r} does not divide the {cluster.size} devices of {cluster.name!r}")
    size = cluster.size // stages
    return tuple(tuple(range(g * size, (g + 1) * size)) for g in range(stages))


def _donated(asked: Asked) -> frozenset[int]:
    """The tensors of the arguments that the step may reuse."""
    return frozenset(asked.traced.program.inputs[i] for i in asked.searcher.wanted.donated)


def _plan(asked: Asked, made: Sequence[Made], placed: PlacedStep, origin: str) -> PlacedPlan:
    data = tuple(plan_data(asked, own) for own in made)
    return PlacedPlan(
        data,
        placed,
        cluster=asked.searcher.cluster,
        traced=asked.traced,
        step=asked.step,
        donate_argnums=asked.donate_argnums,
        origin=origin,
        trace_s=data[0].trace_s,
        search_s=max(d.search_s for d in data),
    )


def _assignment(asked: Asked, placement: PlacementLike) -> Assignment:
    program, cluster = asked.traced.program, asked.searcher.cluster
    if isinstance(placement, Placed):
        return placement.assignment_of(program, cluster)
    if isinstance(placement, str | os.PathLike) and os.fspath(placement).endswith(".json"):
        graph = operator_graph(flatten(program, replicate=asked.searcher.replicate), program)
        strategy = read_strategy_file(os.fspath(placement), problem_of(graph, machine_of(cluster)))
        return assignment_of(program, graph, used_groups(strategy))
    raise PlacementError(
        f"unsupported placement {placement!r}: use 'one', 'auto', the result of shardplan.place, or the file that it saved"
    )


def assignment_of(program: Program, graph: OperatorGraph, groups: Sequence[Group]) -> Assignment:
    """The group of each op of a step whose operators run on these groups.

    An op that computes values again in the backward pass belongs to one operator, although its body may hold ops of several.
    """
    return on_devices(program, {op: groups[j] for op, j in graph.owners})


def refuse_with_groups(given: Mapping[str, Any]) -> None:
    """Refuses options of `shardplan.plan` that a plan with groups of devices does not take.

    Raises:
        ShardplanError: naming the first one that was given.
    """
    for name, value in given.items():
        if value:
            raise ShardplanError(
                f"{name} cannot be given where ops run on groups of devices, each with axes of its own: leave it out"
            )
