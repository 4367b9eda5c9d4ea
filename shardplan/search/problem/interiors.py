"""The elementwise ops inside variables: what they cost, whatever the layout of the variable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardplan.cost import compute
from shardplan.graph.nodes import Graph
from shardplan.mesh import Device
from shardplan.search.coarsening.coarsen import FREE, Coarse


@dataclass(frozen=True, slots=True)
class Inside:
    """The elementwise ops inside a variable of a shape: the seconds of their memory traffic on one device that holds everything,
    and those of launching their kernels, which no cut makes fewer.
    """

    seconds: float
    launches_s: float
    shape: tuple[int, ...]


def interiors(graph: Graph, coarse: Coarse, device: Device) -> Mapping[int, Inside]:
    """By variable: the elementwise ops inside it."""
    joins = set(coarse.joins)
    moved: dict[int, float] = {}
    launches: dict[int, float] = {}
    for node in graph.nodes:
        traffic = node.costed.traffic
        assert traffic is not None, "the graph says what each op moves"
        if node.id in joins or traffic.empty or not node.outputs or (v := coarse.of[node.outputs[0]]) == FREE:
            continue
        ends = zip((*node.inputs, *node.outputs), (*traffic.reads, *traffic.writes), strict=True)
        nbytes = sum(graph.tensors[t].nbytes * part for t, part in ends if t >= 0)
        moved[v] = moved.get(v, 0.0) + nbytes * node.weight
        launches[v] = launches.get(v, 0.0) + traffic.launches * node.weight
    return {
        v: Inside(float(compute.moving_s(device, np.array(n))), launches[v] * device.launch_s, coarse.variables[v].shape)
        for v, n in sorted(moved.items())
    }
