"""Coarsening: which tensors share one layout (Tofu, section 5.1), and which uses share one resharded copy.

A *variable* is the layout of a group of tensors. Elementwise ops, and ops that only add or drop dims of one element, merge their
operands and results, so that forward chains merge with their backward ones through the products of a gradient. Three things stay
apart: a sum from its operands that are read elsewhere too (so the residual stream stays a chain), values that may stay partial
sums from those that may not, and a stored parameter from the group of its moments, its update and its reduced gradient (so
optimizer state can be split apart from its parameter, ZeRO-1). A copy between the memories of a device and its host always
merges: its result is cut as its operand is.

A *view* is a variable too: the layout of a resharded copy that several contractions read. A weight has one view for the forward
pass and one for the backward pass. The backward view is the forward copy, kept, or a second gather.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardplan.graph.nodes import Graph, Node
from shardplan.search.coarsening.gradient_pairing import pair
from shardplan.search.coarsening.layers import share_layers
from shardplan.search.coarsening.tensor_roles import Marks, mark
from shardplan.search.coarsening.variables import FREE, Coarse, OneChoice, Sets, Variable
from shardplan.search.coarsening.views import add_views

__all__ = ["FREE", "Coarse", "Variable", "coarsen", "tied"]


def coarsen(
    graph: Graph,
    one_choice: OneChoice = "timesteps",
    alone: frozenset[int] = frozenset(),
    kinds: Sequence[object] | None = None,
) -> Coarse:
    """Groups the tensors of a graph into variables; ``one_choice`` says which tensors share a layout though they need not.

    ``alone`` are arguments that share a layout only with the outputs that replace them; their readers use layouts of their own.
    Tensors of different ``kinds`` [tensors] share no layout.
    """
    marks = mark(graph, alone)
    sets = Sets(len(graph.tensors), kinds)
    for one, other in tied(graph, marks.free):
        sets.union(one, other)
    for node in graph.nodes:
        if node.signature.elementwise or node.signature.resizes:
            _merge(graph, node, sets, marks)
    pair(graph, sets, marks, timesteps=one_choice != "none")
    if one_choice == "layers":
        share_layers(graph, sets, marks)
    return replace(_variables(graph, sets, marks, one_choice), kinds=kinds)


def tied(graph: Graph, free: frozenset[int] = frozenset()) -> Iterator[tuple[int, int]]:
    """Pairs of tensors that must have the same layout: two that are one value, a leaf of the state before and after the step, and
    a value that is not ``free`` with its copy in another memory, because nothing moves between the hosts of devices.
    """
    for link in graph.links:
        if link.same:
            yield link.source, link.target
    for o, i in zip(graph.outputs, graph.feedback, strict=True):
        if i is not None and o >= 0:
            yield o, graph.inputs[i]
    for node in graph.nodes:
        if node.signature.part == "copy" and node.inputs[0] not in free:
            yield node.inputs[0], node.outputs[0]


def _merge(graph: Graph, node: Node, sets: Sets, marks: Marks) -> None:
    out = node.outputs[0]
    if out in marks.free:
        return
    shape = graph.tensors[out].shape
    same_shape = [t for t in dict.fromkeys(node.inputs) if t >= 0 and (graph.tensors[t].shape == shape or node.signature.resizes)]
    operands = [t for t in same_shape if t not in marks.free]
    for other in node.outputs[1:]:
        if out not in marks.apart and other not in marks.apart:
            sets.union(out, other)
    if out in marks.apart:
        return
    mergeable = [t for t in operands if t not in marks.apart and (t in marks.deferred) == (out in marks.deferred)]
    hard = [t for t in mergeable if t not in marks.soft and marks.uses[t] > 1]
    several = len([t for t in operands if t not in marks.soft]) > 1
    additive = several and node.signature.adds
    for t in mergeable:
        if t not in hard or not additive:
            sets.union(t, out)


def _variables(graph: Graph, sets: Sets, marks: Marks, one_choice: OneChoice) -> Coarse:
    members: dict[int, list[int]] = {}
    live = _live(graph)
    for t in sorted(live):
        if t not in marks.free:
            members.setdefault(sets.find(t), []).append(t)
    variables: list[Variable] = []
    of = [FREE] * len(graph.tensors)
    for tensors in members.values():
        late = marks.deferred.issuperset(tensors)
        variable = Variable(len(variables), graph.tensors[tensors[0]].shape, tuple(tensors), deferred=late)
        variables.append(variable)
        for t in tensors:
            of[t] = variable.id
    joins = tuple(
        node.id
        for node in graph.nodes
        if not (node.signature.elementwise or node.signature.resizes)
        or len({of[t] for t in (*node.inputs, *node.outputs) if t >= 0 and of[t] != FREE}) > 1
    )
    read = add_views(graph, variables, of, marks.weights, one_choice, marks.alone)
    return Coarse(tuple(variables), tuple(of), read, joins, marks.free, marks.weights, marks.parameters, marks.zero, one_choice)


def _live(graph: Graph) -> set[int]:
    live = set(graph.inputs) | {t for t in graph.outputs if t >= 0} | set(graph.boundary)
    for node in graph.nodes:
        live.update(t for t in node.inputs if t >= 0)
        live.update(node.outputs)
    for link in graph.links:
        live.update((link.source, link.target))
    return live
