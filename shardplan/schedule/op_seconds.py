"""Seconds that each op of a plan computes on one device, as the plan's ``compute_s`` adds them up."""

from __future__ import annotations

import numpy as np

from shardplan.cost import Network, compute
from shardplan.graph import Node
from shardplan.schedule.planned import PlannedProgram


def op_seconds(planned: PlannedProgram) -> tuple[float, ...]:
    """[nodes]: seconds of one execution of each op on a device's share; times their weights they are the plan's ``compute_s``."""
    return tuple(_seconds(planned, node) for node in planned.graph.nodes)


def _seconds(planned: PlannedProgram, node: Node) -> float:
    """The seconds of one op: those of its use, or, inside a group with one layout, the time to move its share of the bytes."""
    use = planned.uses.get(node.id)
    if use is not None:
        return use.compute_s
    traffic = node.costed.traffic
    layout = planned.layouts[node.outputs[0]] if node.outputs else None
    if traffic is None or traffic.empty or layout is None:
        return 0.0
    resharder, tensors = planned.programs.resharder, planned.graph.tensors
    assert isinstance(resharder.network, Network)
    device, shape = resharder.network.cluster.device, tensors[node.outputs[0]].shape
    ends = zip((*node.inputs, *node.outputs), (*traffic.reads, *traffic.writes), strict=True)
    nbytes = sum(tensors[t].nbytes * part for t, part in ends if t >= 0)
    local = float(resharder.space(shape).local[resharder.state(shape, layout)])
    return float(compute.moving_s(device, np.array(nbytes))) * local + traffic.launches * device.launch_s
