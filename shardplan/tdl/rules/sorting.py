"""Sorting along a dim: that dim stays whole, all others may be cut."""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

from typing import Any

from shardplan.tdl.describe import rule
from shardplan.tdl.description import Call, Lambda
from shardplan.tdl.language import Opaque, TensorRef

_ALL = slice(None)


def _along(operands: tuple[TensorRef, ...], axis: int, i: tuple[Any, ...]) -> Any:
    return Opaque()(*(x[tuple(_ALL if d == axis else loop for d, loop in enumerate(i))] for x in operands))[i[axis]]


@rule("sort")
def _sort(call: Call, *operands: TensorRef) -> tuple[Lambda, ...]:
    axis = int(call.params["dimension"])
    return (lambda *i: _along(operands, axis, i),) * len(operands)


@rule("top_k")
def _top_k(call: Call, x: TensorRef) -> tuple[Lambda, ...]:
    axis = int(call.params.get("axis", -1)) % len(x.shape)
    return (lambda *i: _along((x,), axis, i),) * 2


@rule("approx_top_k")
def _approx_top_k(call: Call, x: TensorRef) -> tuple[Lambda, ...]:
    axis = int(call.params["reduction_dimension"]) % len(x.shape)
    return (lambda *i: _along((x,), axis, i),) * 2
