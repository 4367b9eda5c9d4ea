"""Merges activations with their gradients and recomputed copies, and the timesteps of an unrolled recurrence."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shardplan.constants import CONSTANTS
from shardplan.graph.nodes import Graph, Node
from shardplan.ir import Constant
from shardplan.search.coarsening.tensor_roles import Marks
from shardplan.search.coarsening.variables import FREE, Sets


def pair(graph: Graph, sets: Sets, marks: Marks, *, timesteps: bool = True) -> None:
    """Merges each activation with its gradient and recomputed copies, and three or more pieces of equal shape at one op.

    A forward contraction reads (x, w) and makes y. A backward one reads w and y's gradient, and makes x's gradient. The gradient
    of a weight stays apart from the weight. With ``timesteps``, the steps of an unrolled recurrence share one choice.
    """
    mergeable = [not any(t.id in kind for kind in (marks.apart, marks.weights, marks.free)) for t in graph.tensors]
    value = same_values(graph)
    for t, v in enumerate(value):
        if v != t and mergeable[t] and mergeable[v] and graph.tensors[t].shape == graph.tensors[v].shape:
            sets.union(t, v)
    _timesteps(graph, sets, mergeable, value, marks, CONSTANTS.timesteps if timesteps else len(graph.nodes) + 1)
    mergeable = [allowed and t not in marks.deferred for t, allowed in enumerate(mergeable)]
    forward: dict[int, list[Node]] = {}
    moved_to = moved(graph, marks.free)
    root, ending = _roots(graph, marks), ends(graph, moved_to, marks.free)
    for node in graph.nodes:
        operands = [t for t in dict.fromkeys(node.inputs) if t >= 0 and t not in marks.free]
        if node.signature.elementwise:
            continue
        for side in (operands, list(node.outputs)):
            pieces = [t for t in side if mergeable[t]]
            if len(pieces) > 2 and len({graph.tensors[t].shape for t in pieces}) == 1:
                for t in pieces[1:]:
                    sets.union(pieces[0], t)
        if len(operands) != 2 or len(node.outputs) != 1:
            continue
        if not node.backward or node.op.recomputed:
            for t in operands:
                forward.setdefault(value[t], []).append(node)
            continue
        for shared, gradient in (operands, operands[::-1]):
            candidates = forward.get(value[shared], ())
            # where several weights multiply an activation: the contraction whose weight's gradient this op makes
            own = [f for f in candidates if any(root.get(t, FREE) in ending.get(node.outputs[0], ()) for t in f.inputs)]
            for first in own or candidates:
                other = next((t for t in first.inputs if value[t] != value[shared]), None)
                if other is None:
                    continue
                _same_layout(graph, sets, mergeable, moved_to, first.outputs[0], gradient)
                _same_layout(graph, sets, mergeable, moved_to, other, node.outputs[0])


def _timesteps(graph: Graph, sets: Sets, mergeable: list[bool], value: list[int], marks: Marks, least: int) -> None:
    """Merges the results and other operands of equal ops on one weight, if there are ``least`` or more: unrolled timesteps.

    Each step could be cut in its own way. Tofu gives that up too, so that the graph is a chain.
    """
    uses: dict[tuple[int, int, int], list[Node]] = {}
    for node in graph.nodes:
        operands = [t for t in dict.fromkeys(node.inputs) if t >= 0 and t not in marks.free]
        if node.signature.elementwise or len(operands) != 2 or len(node.outputs) != 1:
            continue
        for slot, t in enumerate(node.inputs):
            if t >= 0 and value[t] in marks.weights:
                uses.setdefault((value[t], node.signature.id, slot), []).append(node)
    for nodes in uses.values():
        if len(nodes) >= least:
            first = nodes[0]
            for node in nodes[1:]:
                for a, b in zip((*first.inputs, *first.outputs), (*node.inputs, *node.outputs), strict=True):
                    if a >= 0 and b >= 0 and mergeable[a] and mergeable[b] and (a in marks.deferred) == (b in marks.deferred):
                        sets.union(a, b)


def same_values(graph: Graph) -> list[int]:
    """For each tensor the first one known to hold the same value: computed again by an equal op, or saved by one loop and read
    by another.
    """
    value = list(range(len(graph.tensors)))
    stacked = {link.target: link.source for link in graph.links if link.lift < 0}
    entered: dict[int, list[tuple[int, int]]] = {}
    for link in graph.links:
        if link.target in graph.boundary:
            entered.setdefault(link.target, []).append((link.source, link.lift))
    slices: dict[int, int] = {}
    for t in sorted(graph.boundary):
        if len(entered.get(t, ())) != 1:
            continue  # a carry
        source, lift = entered[t][0]
        if not lift:
            value[t] = value[source]
        elif source in stacked:
            value[t] = stacked[source]
        else:
            value[t] = slices.setdefault(value[source], t)
    seen: dict[object, tuple[int, ...]] = {}
    for node in graph.nodes:
        literals = tuple((i.dtype, np.asarray(i.value).tobytes()) for i in node.op.inputs if isinstance(i, Constant))
        key = (node.signature.id, literals, tuple(value[value[t]] if t >= 0 else -1 for t in node.inputs))
        first = seen.setdefault(key, node.outputs)
        for t, v in zip(node.outputs, first, strict=True):
            value[t] = value[v] if v != t else t
    return [value[v] for v in value]


def _roots(graph: Graph, marks: Marks) -> dict[int, int]:
    """For each weight, the input of the program that it is, or from which it is made."""
    root = {t: t for t in graph.inputs if t in marks.weights}
    for link in graph.links:
        if link.target in marks.weights and link.source in root:
            root.setdefault(link.target, root[link.source])
    for node in graph.nodes:
        operands = [t for t in dict.fromkeys(node.inputs) if t in root]
        if len(operands) == 1:
            root.update(
                {t: root[operands[0]] for t in node.outputs if t in marks.weights and t not in marks.free and t not in root}
            )
    return root


def ends(graph: Graph, moved_to: Mapping[int, int], free: frozenset[int]) -> dict[int, frozenset[int]]:
    """For each tensor, the inputs whose new values it feeds through elementwise ops and moves: for a gradient, its weight."""
    replaced = {
        o: frozenset({graph.inputs[i]}) for o, i in zip(graph.outputs, graph.feedback, strict=True) if o >= 0 and i is not None
    }
    into: dict[int, list[int]] = {}
    for link in graph.links:
        into.setdefault(link.source, []).append(link.target)

    none = frozenset[int]()

    def known(t: int) -> frozenset[int]:
        own = replaced.get(t, none)
        return own.union(*(replaced.get(u, none) for u in into[t])) if t in into else own

    for node in reversed(graph.nodes):
        if node.signature.elementwise or any(t in moved_to for t in node.inputs):
            reached = none.union(*(known(t) for t in node.outputs))
            if reached:
                size = graph.tensors[node.outputs[0]].size
                for t in node.inputs:
                    if t >= 0 and t not in free and graph.tensors[t].size == size:
                        replaced[t] = known(t) | reached
        else:
            for t in node.outputs:
                replaced[t] = known(t)
    return replaced


def moved(graph: Graph, free: frozenset[int]) -> dict[int, int]:
    """For each tensor that an op only rearranges (transposes, reshapes), the result."""
    moved_to: dict[int, int] = {}
    for node in graph.nodes:
        operands = [t for t in node.inputs if t >= 0 and t not in free]
        if node.signature.elementwise or not len(operands) == len(node.outputs) == 1:
            continue
        if graph.tensors[node.outputs[0]].size == graph.tensors[operands[0]].size:
            moved_to[operands[0]] = node.outputs[0]
    return moved_to


def _same_layout(graph: Graph, sets: Sets, mergeable: list[bool], moved_to: dict[int, int], value: int, gradient: int) -> None:
    """Merges a value and its gradient if their shapes agree, the gradient's before or after it is rearranged."""
    if not mergeable[value] or not mergeable[gradient]:
        return
    shape = graph.tensors[value].shape
    for t in (gradient, moved_to.get(gradient, gradient)):
        if graph.tensors[t].shape == shape and mergeable[t]:
            sets.union(value, t)
            return
