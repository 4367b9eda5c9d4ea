"""Primitives that say where a value lies and leave it as it is."""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

from shardplan.tdl.describe import rule
from shardplan.tdl.description import Call, Lambda
from shardplan.tdl.language import Named, TensorRef


@rule(
    "optimization_barrier",
    "device_put",
    "sharding_constraint",
    "layout_constraint",
    "reshard",
    "pvary",
    "reduced_vary_cast_p",
    "vary_unreduced_cast_p",
    "preduced",
)
def _identity(call: Call, *operands: TensorRef) -> tuple[Lambda, ...]:
    """Each result is its operand; those of one shape are cut together, others have loops of their own."""
    shapes = sorted({x.shape for x in operands})

    def same(x: TensorRef) -> Lambda:
        return Named(tuple(f"i{shapes.index(x.shape)}_{d}" for d in range(len(x.shape))), lambda *i: x[i])

    return tuple(same(x) for x in operands)


@rule("tie")
def _tie(call: Call, before: TensorRef, x: TensorRef) -> Lambda:
    """The second operand, once the first is there."""
    return lambda *i: x[i]
