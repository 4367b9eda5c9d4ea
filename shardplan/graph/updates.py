"""Which argument a value updates: gradients and their moments have no name of their own, and are named by the weight."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from shardplan.graph.nodes import Graph

HANDED_ON = "handed on: "
"""How the path of an output begins that is no result of the step, but goes to another part of it."""


def value_names(graph: Graph, output_paths: Sequence[str]) -> dict[int, str]:
    """The names of tensors: the path of an argument, ``result PATH``, and the gradient or update of an argument."""
    paths, backward = graph.input_paths, {t for node in graph.nodes if node.backward for t in node.outputs}
    names = {t: f"{'gradient' if t in backward else 'update'} of {paths[i]}" for t, i in updated(graph).items()}
    results = [(t, path) for t, path in zip(graph.outputs, output_paths, strict=True) if t >= 0]
    names |= {t: f"result {path}" for t, path in results if t not in names or not path.startswith(HANDED_ON)}
    return names | dict(zip(graph.inputs, paths, strict=True))


def described(graph: Graph) -> dict[int, str]:
    """What makes each tensor, for those without a name: ``dot_general in block_0/attention``. A value that enters or leaves a
    loop is what it is on the other side.
    """
    found: dict[int, str] = {}
    for node in graph.nodes:
        words = [w for w in _MODULE.findall(node.op.scope) if w not in _TRANSFORMS]
        pass_ = " (backward)" if node.backward else ""
        what = node.op.primitive if node.signature.constraint is None else "sharding constraint"
        found.update(dict.fromkeys(node.outputs, what + (f" in {'/'.join(words)}" if words else "") + pass_))
    for link in graph.links:
        for here, there in ((link.target, link.source), (link.source, link.target)):
            if here not in found and there in found:
                found[here] = found[there]
    return found


_MODULE = re.compile(r"[\w.]+(?=$|[/)])")
_TRANSFORMS = ("rematted_computation", "checkpoint", "closed_call", "while", "body", "cond", "")


def updated(graph: Graph) -> dict[int, int]:
    """The number of the argument that each value updates, by tensor; of several, the first that the backward pass depends on: a
    weight before its moments.

    A value updates an argument where the result that replaces the argument is made of it by elementwise ops on as many elements,
    and by ops that only move elements. A weight's gradient updates the weight, whatever the optimizer.
    """
    before = _before_backward(graph)
    moments = [t not in before for t in graph.inputs]

    def first(of: Iterable[int]) -> int:
        """The argument that gives the name."""
        return min(of, key=lambda i: (moments[i], i))

    found = {t: i for t, i in zip(reversed(graph.outputs), reversed(graph.feedback), strict=True) if t >= 0 and i is not None}
    after: dict[int, list[int]] = {}
    for link in graph.links:
        after.setdefault(link.source, []).append(link.target)
    for node in reversed(graph.nodes):
        for t in node.outputs:
            ends = [found[u] for u in (t, *after.get(t, ())) if u in found]
            if ends:
                found[t] = first(ends)
        ends = [found[t] for t in node.outputs if t in found]
        if ends and (node.signature.elementwise or node.signature.moves):
            size = math.prod(node.signature.call.results[0])
            for t in node.inputs:
                if t >= 0 and graph.tensors[t].size == size:
                    found[t] = first([*ends, found.get(t, ends[0])])
    return found


def _before_backward(graph: Graph) -> set[int]:
    """The tensors on which an op of the backward pass depends."""
    sources: dict[int, list[int]] = {}
    for link in graph.links:
        sources.setdefault(link.target, []).append(link.source)
    found = set[int]()
    for node in reversed(graph.nodes):
        if node.backward or not found.isdisjoint(node.outputs):
            found.update(t for t in node.inputs if t >= 0)
            found.update(s for t in node.inputs for s in sources.get(t, ()))
    return found
