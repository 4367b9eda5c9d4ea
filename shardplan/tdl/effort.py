"""Which ops are so light that a compiler recomputes them at each reader instead of storing their results."""

from __future__ import annotations

from shardplan.tdl.description import Description, children
from shardplan.tdl.language import Apply, HiddenLoops, OpaqueResult, Reduce, Scalar

_LIGHT = frozenset({
    "abs", "and", "bitcast_convert_type", "ceil", "clamp", "convert_element_type", "eq", "floor", "ge", "gt", "integer_pow",
    "is_finite", "le", "lt", "max", "min", "ne", "not", "one_minus_square", "or", "reduce_precision", "round", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "square", "xor",
})  # fmt: skip


def light(description: Description) -> bool:
    """Whether each result element takes only a few sums, products, comparisons and selections.

    Reductions, divisions, roots and transcendentals are not light: a broadcast is, a matrix product is not. XLA's fusion
    duplicates only light ops into their readers (its `InstructionFusion.IsExpensive`).
    """
    return all(_light(tree) for tree in description.trees)


def _light(node: Scalar) -> bool:
    if isinstance(node, Reduce | OpaqueResult | HiddenLoops):
        return False
    if isinstance(node, Apply) and (node.how == "div" or (node.how == "apply" and node.name not in _LIGHT)):
        return False
    return all(_light(child) for child in children(node))
