"""Primitives that place a value without changing it."""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

from shardplan.ir import HOST_COPY
from shardplan.tdl.describe import rule
from shardplan.tdl.description import Call, Lambda
from shardplan.tdl.language import Named, TensorRef


@rule(
    "optimization_barrier",
    "device_put",
    HOST_COPY,
    "placed",
    "sharding_constraint",
    "layout_constraint",
    "reshard",
    "pvary",
    "preduced",
    "stage",
    "xla_metadata_value",
)
@rule("relayout", since="0.11")
@rule("reduced_vary_cast", "vary_unreduced_cast", since="0.12")
@rule("reduced_vary_cast_p", "vary_unreduced_cast_p", until="0.12")
def _identity(call: Call, *operands: TensorRef) -> tuple[Lambda, ...]:
    """Each result is its operand. Operands of the same shape share loops and so are cut together."""
    shapes = sorted({x.shape for x in operands})

    def same(x: TensorRef) -> Lambda:
        return Named(tuple(f"i{shapes.index(x.shape)}_{d}" for d in range(len(x.shape))), lambda *i: x[i])

    return tuple(same(x) for x in operands)


@rule("tie")
def _tie(call: Call, before: TensorRef, x: TensorRef) -> Lambda:
    """Returns the second operand, ordered after the first."""
    return lambda *i: x[i]
