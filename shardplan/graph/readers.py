"""How the ops of a graph read what a collective has moved."""

from __future__ import annotations

from shardplan.graph.nodes import Graph


def images(graph: Graph) -> frozenset[int]:
    """The tensors that convolutions read as images: they want them in an order of their own."""
    return frozenset(node.inputs[i] for node in graph.nodes for i in node.signature.images)


def read_as_slices(graph: Graph) -> frozenset[int]:
    """The tensors whose readers are all fused kernels, which compute what they read from it: no product, loop or result of the
    step reads them.
    """
    stored = {*graph.outputs, *(link.source for link in graph.links)}
    read = {t for node in graph.nodes for t in node.inputs}
    for node in reversed(graph.nodes):
        renamed = node.signature.part == "none" and all(t in read and t not in stored for t in node.outputs)
        if not (node.signature.fuses or (renamed and not node.signature.swaps)):
            stored.update(node.inputs)
    return frozenset(read - stored)
