"""Chooses the bundles of a schedule by the time of the step (`shardplan.cost.overlap`).

A bundle saves latency, but less compute can hide it. What that is worth depends on which of compute and communication is the
longer, which is not known before all bundles are.
"""

from __future__ import annotations

from dataclasses import replace

from shardplan.cost import Network
from shardplan.cost.overlap import SERIAL, StepCost, weights_at
from shardplan.schedule.instructions import Schedule
from shardplan.schedule.op_seconds import op_seconds
from shardplan.schedule.passes.bundles import bundled
from shardplan.schedule.planned import PlannedProgram
from shardplan.schedule.sends import issued
from shardplan.schedule.windows import windows


def fastest_bundles(apart: Schedule, planned: PlannedProgram) -> Schedule:
    """A schedule with its bundles. Where communication hides, they are chosen as if nothing did, and as if all did that can.

    The faster of both is returned.
    """
    if not planned.overlaps:
        return replace(apart, body=bundled(apart.body, planned))
    network = planned.programs.resharder.network
    assert isinstance(network, Network)
    contention = network.cluster.device.contention
    compute_s = sum(s * n.weight for s, n in zip(op_seconds(planned), planned.graph.nodes, strict=True))

    def step_time_s(schedule: Schedule) -> float:
        sent = issued(schedule, planned, windows(schedule, planned))
        return StepCost(issued=sent, compute_s=compute_s, contention=contention).step_time_s

    weights = SERIAL, weights_at(1.0, contention)
    return min((replace(apart, body=bundled(apart.body, planned, w)) for w in weights), key=step_time_s)
