"""Marks: the roles of a graph's tensors in coarsening, found by following them through the graph."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from shardplan.graph.nodes import Graph
from shardplan.graph.partials import deferrable


@dataclass(frozen=True, slots=True)
class Marks:
    """Sets of tensors by role.

    ``free`` depend on no input: every device has them. ``weights`` are inputs, or made from one input each; ``parameters`` are
    the weights that a non-elementwise op reads. ``apart`` keep a layout of their own; ``soft`` follow the layout of their reader;
    ``deferred`` may stay partial sums; ``zero`` are free and zero. ``uses`` counts each tensor's readers. ``alone`` are those
    that the caller or the step asks to keep apart.
    """

    free: frozenset[int]
    weights: frozenset[int]
    parameters: frozenset[int]
    apart: frozenset[int]
    soft: frozenset[int]
    deferred: frozenset[int]
    zero: frozenset[int]
    uses: tuple[int, ...]
    alone: frozenset[int] = frozenset()


def mark(graph: Graph, alone: frozenset[int] = frozenset()) -> Marks:
    """Finds the roles of a graph's tensors.

    The arguments ``alone``, the outputs that replace them, and tensors for which the step says where they lie are kept apart.
    """
    alone |= graph.placed.keys()
    free = _free(graph)
    weights = _weights(graph, free)
    parameters = _parameters(graph, weights)
    apart = {*parameters, *(t for t in graph.boundary if t in weights), *alone}
    for o, i in zip(graph.outputs, graph.feedback, strict=True):
        if i is not None and o >= 0 and graph.inputs[i] in parameters | alone:
            apart.add(o)
    if alone:
        for link in reversed(graph.links):  # a tensor that leaves a body that runs once is the same inside
            if link.same and link.target in apart:
                apart.add(link.source)
    sums = deferrable(graph, free)
    late = sums.late - apart - set(graph.outputs)
    return Marks(free, weights, parameters, frozenset(apart), _soft(graph, free), late, sums.zero, _uses(graph), alone)


def _uses(graph: Graph) -> tuple[int, ...]:
    uses = [0] * len(graph.tensors)
    for node in graph.nodes:
        for t in set(node.inputs):
            if t >= 0:
                uses[t] += 1
    for link in graph.links:
        uses[link.source] += 1
    for t in graph.outputs:
        if t >= 0:
            uses[t] += 1
    return tuple(uses)


def _free(graph: Graph) -> frozenset[int]:
    """Scalars, constants, and values made from them alone: every device has them, in any layout, at no cost.

    Random bits are not free: the bits of a key are drawn once.
    """
    inputs = {t for t in (*graph.inputs, *graph.boundary) if graph.tensors[t].size > 1}
    free = set(graph.constants) | {t.id for t in graph.tensors if t.size == 1}
    for node in graph.nodes:
        keyed = any(d.startswith("key") for d in node.signature.call.dtypes)
        if not keyed and node.signature.manual is None and all(t < 0 or t in free for t in node.inputs):
            free.update(node.outputs)
    return frozenset(free - inputs)


def _weights(graph: Graph, free: frozenset[int]) -> frozenset[int]:
    """Inputs of the program, and tensors made from one of them element by element: its slices in a scan, its casts."""
    after: dict[int, list[int]] = {}
    for node in graph.nodes:
        operands = {t for t in node.inputs if t >= 0 and t not in free}
        if node.signature.elementwise and len(operands) == 1:
            after.setdefault(next(iter(operands)), []).extend(node.outputs)
    entries = Counter(link.target for link in graph.links if link.target in graph.boundary)
    for link in graph.links:
        if entries[link.target] == 1:  # a carry has two: from the start and from the iteration before
            after.setdefault(link.source, []).append(link.target)
    reached, stack = set(graph.inputs), list(graph.inputs)
    while stack:
        for t in after.get(stack.pop(), ()):
            if t not in reached:
                reached.add(t)
                stack.append(t)
    return frozenset(reached - free)


def _parameters(graph: Graph, weights: frozenset[int]) -> frozenset[int]:
    """The weights that a non-elementwise op or a loop reads, directly or through weights made from them."""
    heavy = {t for node in graph.nodes if not node.signature.elementwise for t in node.inputs if t in weights}
    heavy.update(link.source for link in graph.links if link.source in weights and not link.same)
    for node in reversed(graph.nodes):
        if node.signature.elementwise and any(o in heavy and o in weights for o in node.outputs):
            heavy.update(t for t in node.inputs if t in weights)
    return frozenset(heavy)


def _soft(graph: Graph, free: frozenset[int]) -> frozenset[int]:
    """Tensors that follow the layout of their reader: free ones, broadcasts of smaller tensors, and random bits."""
    soft = set(free)
    for node in graph.nodes:
        tensors = [t for t in node.inputs if t >= 0]
        if not node.outputs:
            continue
        if node.signature.elementwise:
            follows = all(t in soft or graph.tensors[t].size < graph.tensors[node.outputs[0]].size for t in tensors)
        else:
            follows = sum(graph.tensors[t].size for t in tensors) < graph.tensors[node.outputs[0]].size and len(tensors) == 1
        if follows:
            soft.update(node.outputs)
    return frozenset(soft)
