"""A placed step, planned: what the ``regions`` backend runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardplan.collectives.issued import StepCost
from shardplan.mesh import Cluster
from shardplan.placement.device_topology import machine_of
from shardplan.regions.dispatch import Dispatch, dispatched
from shardplan.regions.group_programs import Split
from shardplan.regions.segment_plans import GroupChoices, planned_segments
from shardplan.schedule import PlannedProgram, Schedule, build, issued, windows


@dataclass(frozen=True, slots=True)
class PlacedStep:
    """A step cut into segments, each with the choices of its group, its schedule and its cost, and the order in which segments
    and transfers are issued.
    """

    split: Split
    groups: tuple[GroupChoices, ...]
    segments: tuple[PlannedProgram, ...]
    schedules: tuple[Schedule, ...]
    costs: tuple[StepCost, ...]
    dispatch: Dispatch


def placed_step(split: Split, groups: Sequence[GroupChoices], cluster: Cluster, replicate: Sequence[str] = ()) -> PlacedStep:
    """The segments of a step with the choices of their groups, scheduled and priced."""
    segments = planned_segments(split, groups, replicate)
    schedules = tuple(map(build, segments))
    costs = tuple(map(_cost, segments, schedules))
    dispatch = dispatched(split, [c.step_time_s for c in costs], machine_of(cluster))
    return PlacedStep(split, tuple(groups), segments, schedules, costs, dispatch)


def _cost(planned: PlannedProgram, schedule: Schedule) -> StepCost:
    """The cost of a segment on one device."""
    network = planned.programs.resharder.network
    return StepCost(
        issued=issued(schedule, planned, windows(schedule, planned) if planned.overlaps else None),
        compute_s=sum(s * node.weight for s, node in zip(planned.op_seconds, planned.graph.nodes, strict=True)),
        contention=network.cluster.device.contention,
    )
