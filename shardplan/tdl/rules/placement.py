"""Primitives that say where a value lies and leave it as it is."""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

from shardplan.tdl.describe import Call, Lambda, rule
from shardplan.tdl.language import Named, TensorRef


@rule("optimization_barrier", "device_put")
def _barrier(call: Call, *operands: TensorRef) -> tuple[Lambda, ...]:
    """Each result is its operand; the loops are the results' own, so each may be cut in its own way."""

    def same(number: int, x: TensorRef) -> Lambda:
        return Named(tuple(f"i{number}_{d}" for d in range(len(x.shape))), lambda *i: x[i])

    return tuple(same(n, x) for n, x in enumerate(operands))


@rule("sharding_constraint", "layout_constraint", "reshard", "pvary", "reduced_vary_cast_p", "vary_unreduced_cast_p", "preduced")
def _identity(call: Call, *operands: TensorRef) -> tuple[Lambda, ...]:
    return _barrier(call, *operands)


@rule("tie")
def _tie(call: Call, before: TensorRef, x: TensorRef) -> Lambda:
    """The second operand, once the first is there."""
    return lambda *i: x[i]
