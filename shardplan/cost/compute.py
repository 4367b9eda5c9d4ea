"""Roofline: seconds of an op on one device from its flops and bytes (peak rates times the efficiency that large kernels
reach).
"""

from __future__ import annotations

import math

from shardplan.mesh import Device
from shardplan.tdl import Description
from shardplan.tdl.describe import children
from shardplan.tdl.index import FloorDiv, IndexExpr, Mod
from shardplan.tdl.language import Access, Apply, Match, Reduce, Scalar


def flops(description: Description) -> float:
    """Arithmetic of the whole op: one for each scalar operation of each element, as XLA counts (a multiply-add is two).

    A lookup said as a sum over rows reads one row, so its loop counts once.
    """
    return sum(
        _tree(tree, description, math.prod(n for n in shape))
        for tree, shape in zip(description.trees, description.call.results, strict=True)
    )


def _tree(node: Scalar, description: Description, times: float) -> float:
    match node:
        case Reduce(_, loops, body):
            looked_up = _matched(body)
            inner = times * math.prod(description.loops[v].extent for v in loops if v not in looked_up)
            return inner * _density(body) + _tree(body, description, inner * _density(body))
        case Apply(how, args, _):
            own = 0.0 if how == "where" else times * max(1, len(args) - 1)
            return own + sum(_tree(a, description, times) for a in args)
        case _:
            return sum(_tree(c, description, times) for c in children(node))


def _matched(node: Scalar) -> frozenset[int]:
    from shardplan.tdl.index import loops_of

    found = loops_of(node.index) if isinstance(node, Match) else frozenset[int]()
    for child in children(node):
        found |= _matched(child)
    return found


def _density(node: Scalar) -> float:
    """The part of a dilated operand's positions that hold an element (an index ``// d`` beside no ``% d``)."""
    if isinstance(node, Access):
        return math.prod(_spread(ix) for ix in node.indices)
    return math.prod(_density(c) for c in children(node))


def _spread(ix: IndexExpr) -> float:
    match ix:
        case FloorDiv(inner, by) if not isinstance(inner, Mod):
            return 1.0 / by
        case _:
            return 1.0


def is_contraction(description: Description) -> bool:
    """Whether the op sums products of two operands (matrix products, convolutions)."""
    return any(_sums_products(tree) for tree in description.trees)


def _sums_products(node: Scalar) -> bool:
    if isinstance(node, Reduce) and node.reducer == "sum" and isinstance(node.body, Apply) and node.body.how == "mul":
        return True
    return any(_sums_products(c) for c in children(node))


def seconds(device: Device, flop: float, nbytes: float, dtype: str, *, matrix: bool) -> float:
    """The roofline's time: the slower of arithmetic and memory, plus a launch.

    ``matrix`` ops run at the dtype's peak, others at the vector rate, which no elementwise op of ours is bound by.
    """
    peak = device.flops_per_s.get(dtype) or device.flops_per_s.get("float32") or max(device.flops_per_s.values())
    arithmetic = flop / (peak * device.flops_efficiency) if matrix else 0.0
    return max(arithmetic, nbytes / (device.memory_bytes_per_s * device.memory_efficiency)) + (
        device.launch_s if nbytes or matrix else 0.0
    )
