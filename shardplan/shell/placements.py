"""Plans with ops on groups of devices: reads ``placement=``, and plans each group."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from shardplan.errors import PlacementError, ShardplanError
from shardplan.graph import flatten
from shardplan.ir import Program
from shardplan.mesh import Cluster
from shardplan.placement.device_groups import used_groups
from shardplan.placement.device_topology import machine_of
from shardplan.placement.grouping import operator_graph
from shardplan.placement.operators import OperatorGraph
from shardplan.placement.placement_problem import problem_of
from shardplan.placement.strategy_files import read_strategy_file
from shardplan.regions.assignment import Assignment, Group, on_devices
from shardplan.regions.group_plans import choices_of, group_plans
from shardplan.regions.group_programs import split
from shardplan.regions.placed import placed_step
from shardplan.shell.made_plans import Asked, plan_data
from shardplan.shell.placed_plan import PlacedPlan


@runtime_checkable
class Placed(Protocol):
    """What says where the ops of a step run, as the result of `shardplan.place` does."""

    def assignment_of(self, program: Program, cluster: Cluster) -> Assignment:
        """The group of devices of each op of a traced step."""
        ...


PlacementLike = str | os.PathLike[str] | Placed


def placed_plan(asked: Asked, placement: PlacementLike) -> PlacedPlan:
    """The plan of a step with the ops of each group of devices planned together.

    Raises:
        PlacementError: for what is no placement, or is one of another step or cluster.
        MemoryLimitError: if the ops of a group fit its devices in no layout.
    """
    cluster, traced = asked.searcher.cluster, asked.traced
    assignment = _assignment(asked, placement)
    cut = split(assignment)
    donated = asked.searcher.wanted.donated
    made = group_plans(cut, cluster, asked.searcher, donated, asked.limit.origin)
    data = tuple(plan_data(asked, own) for own in made)
    return PlacedPlan(
        data,
        placed_step(cut, choices_of(made), cluster, asked.searcher.replicate),
        cluster=cluster,
        traced=traced,
        step=asked.step,
        donate_argnums=asked.donate_argnums,
        origin=placement if isinstance(placement, str) else type(placement).__name__,
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
        f"unsupported placement {placement!r}: use 'one', the result of shardplan.place, or the file that it saved"
    )


def assignment_of(program: Program, graph: OperatorGraph, groups: Sequence[Group]) -> Assignment:
    """The group of each op of a step whose operators run on these groups.

    An op that computes values again in the backward pass belongs to one operator, although its body may hold ops of several.
    """
    return on_devices(program, {op: groups[j] for op, j in graph.owners})


def refuse_with_placement(**given: Any) -> None:
    """Refuses options of `shardplan.plan` that a plan with groups of devices does not take.

    Raises:
        ShardplanError: naming the first one that was given.
    """
    for name, value in given.items():
        if value:
            raise ShardplanError(f"{name} cannot be given with a placement, whose groups have axes of their own: leave one out")
