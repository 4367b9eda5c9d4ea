"""Tensors with one value: the same op made them from the same values."""

from __future__ import annotations

import numpy as np

from shardplan.graph.nodes import Graph
from shardplan.ir import Constant


def equal_values(graph: Graph) -> tuple[int, ...]:
    """[tensors]: the first tensor that is known to have the same value, as an op of the same signature made it from the same
    operands. Ops that may not run twice (`Op.repeatable`) make values equal to no other.
    """
    first = list(range(len(graph.tensors)))
    passed = {link.target: link.source for link in graph.links if link.same}
    made: dict[tuple[object, ...], tuple[int, ...]] = {}

    def of(t: int) -> int:
        while t in passed:
            t = passed[t]
        return first[t]

    for node in graph.nodes:
        if node.op.repeatable:
            operands = zip(node.inputs, node.op.inputs, strict=True)
            key = node.signature.id, *(of(t) if t >= 0 else content(own) for t, own in operands)
            for t, same in zip(node.outputs, made.setdefault(key, node.outputs), strict=True):
                first[t] = of(same)
    return tuple(of(t) for t in range(len(first)))


def content(source: int | Constant) -> object:
    """A value by its number, a literal by its type and content; random keys are equal only to themselves."""
    if not isinstance(source, Constant):
        return source
    if source.dtype.startswith("key"):
        return source.dtype, id(source.value)
    array = np.asarray(source.value)
    return source.dtype, array.shape, array.tobytes()
