"""The cost of values in host memory: copies between a device and its host's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardplan.graph.nodes import Graph
from shardplan.mesh.machine import Machine
from shardplan.search.coarsening.coarsen import FREE, Coarse
from shardplan.search.problem.interiors import Inside


def host_copies(graph: Graph, coarse: Coarse, machine: Machine) -> Mapping[int, Inside]:
    """The copies of a step by variable: of each argument in host memory that is read, of each result that replaces one, and of
    each value that the step itself copies to host memory or from there.

    One copy follows the other, in both directions, and nothing hides them.

    Raises:
        ClusterError: if the device has no figure for its link to the host.
    """
    own = [node for node in graph.nodes if node.signature.part == "copy"]
    if not graph.offloaded and not own:
        return {}
    rate, launch_s = machine.host_link_bytes_per_s(), machine.device.launch_s
    read = {t for node in graph.nodes for t in node.inputs} | {link.source for link in graph.links}
    hosted = {graph.inputs[i] for i in graph.offloaded}
    replacing = {t for t, i in zip(graph.outputs, graph.feedback, strict=True) if i in graph.offloaded}
    copies = [(t, 1.0) for t in (*sorted(hosted & read), *sorted(replacing - hosted))]
    copies += [(t, node.weight) for node in own if coarse.of[t := node.outputs[0]] != FREE]
    result: dict[int, Inside] = {}
    for t, times in copies:
        v = coarse.of[t]
        known = result.get(v, Inside(0.0, 0.0, coarse.variables[v].shape))
        seconds = known.seconds + times * graph.tensors[t].nbytes / rate
        result[v] = replace(known, seconds=seconds, launches_s=known.launches_s + times * launch_s)
    return result
