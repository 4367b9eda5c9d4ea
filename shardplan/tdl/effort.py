"""Which ops are so light that a compiler computes them again at each reader, in place of storing what they make."""

from __future__ import annotations

from shardplan.tdl.description import Description, children
from shardplan.tdl.language import Apply, HiddenLoops, OpaqueResult, Reduce, Scalar

_LIGHT = frozenset({
    "abs", "and", "bitcast_convert_type", "ceil", "clamp", "convert_element_type", "eq", "floor", "ge", "gt", "integer_pow",
    "is_finite", "le", "lt", "max", "min", "ne", "not", "or", "reduce_precision", "round", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "square", "xor",
})  # fmt: skip


def light(description: Description) -> bool:
    """Whether an element of every result takes but a few sums, products, comparisons and choices of elements.

    No reduction, and no division, root or transcendental: broadcasts are light, a matrix product is not. XLA's fusion duplicates
    such ops into their readers, and no others (its `InstructionFusion.IsExpensive`).
    """
    return all(_light(tree) for tree in description.trees)


def _light(node: Scalar) -> bool:
    if isinstance(node, Reduce | OpaqueResult | HiddenLoops):
        return False
    if isinstance(node, Apply) and (node.how == "div" or (node.how == "apply" and node.name not in _LIGHT)):
        return False
    return all(_light(child) for child in children(node))
