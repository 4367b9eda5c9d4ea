"""The cost of arrays in host memory: copies between a device and its host's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardplan.graph.nodes import Graph
from shardplan.mesh import Device
from shardplan.search.coarsening.coarsen import Coarse
from shardplan.search.problem.interiors import Inside


def host_copies(graph: Graph, coarse: Coarse, device: Device) -> Mapping[int, Inside]:
    """The copies of a step by variable: of each array in host memory that is read, and of each result that replaces one.

    One copy follows the other, in both directions, and nothing hides them.
    """
    if not graph.offloaded:
        return {}
    assert device.host_bytes_per_s is not None, "nothing is in host memory where its link is not known"
    read = {t for node in graph.nodes for t in node.inputs} | {link.source for link in graph.links}
    hosted = {graph.inputs[i] for i in graph.offloaded}
    replacing = {t for t, i in zip(graph.outputs, graph.feedback, strict=True) if i in graph.offloaded}
    result: dict[int, Inside] = {}
    for t in (*sorted(hosted & read), *sorted(replacing - hosted)):
        v = coarse.of[t]
        known = result.get(v, Inside(0.0, 0.0, coarse.variables[v].shape))
        seconds = known.seconds + graph.tensors[t].nbytes / device.host_bytes_per_s
        result[v] = replace(known, seconds=seconds, launches_s=known.launches_s + device.launch_s)
    return result
