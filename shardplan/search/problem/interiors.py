"""Elementwise ops that run in one layout, such as those inside a variable: what they cost on a device's part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shardplan.cost import compute
from shardplan.graph.nodes import Graph, Node
from shardplan.mesh import Device
from shardplan.search.coarsening.coarsen import FREE, Coarse

Parts = TypeVar("Parts", float, NDArray[np.float64])


@dataclass(frozen=True, slots=True)
class Inside:
    """The elementwise ops or copies inside a variable of a shape: the seconds in which one device that holds everything moves
    their bytes, and the seconds of their launches, which no cut reduces.
    """

    seconds: float
    launches_s: float
    shape: tuple[int, ...]

    @classmethod
    def of(cls, device: Device, nbytes: float, launches: float, shape: tuple[int, ...]) -> Inside:
        """The ops or copies that move these bytes in so many launches."""
        return cls(float(compute.moving_s(device, np.array(nbytes))), launches * device.launch_s, shape)

    def seconds_at(self, local: Parts) -> Parts:
        """The seconds on a device that holds this fraction of the variable's tensors."""
        return self.seconds * local + self.launches_s


def moved_bytes(graph: Graph, node: Node) -> float:
    """The bytes that one execution of an op moves where one device holds everything."""
    traffic = node.costed.traffic
    assert traffic is not None, "the graph says what each op moves"
    ends = zip((*node.inputs, *node.outputs), (*traffic.reads, *traffic.writes), strict=True)
    return sum(graph.tensors[t].nbytes * part for t, part in ends if t >= 0)


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
        moved[v] = moved.get(v, 0.0) + moved_bytes(graph, node) * node.weight
        launches[v] = launches.get(v, 0.0) + traffic.launches * node.weight
    return {v: Inside.of(device, n, launches[v], coarse.variables[v].shape) for v, n in sorted(moved.items())}
