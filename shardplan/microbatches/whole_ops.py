"""Ops of a traced step, applied to whole values."""

# pyright: basic
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardplan import _jax
from shardplan.emit.walk import literal
from shardplan.ir import Constant, Op, Operand
from shardplan.tdl.rewrite import compilable


def operand_of(values: Mapping[int, Any], operand: Operand) -> Any:
    """The value of an operand, or a literal as an array."""
    return literal(operand) if isinstance(operand, Constant) else values[operand]


def whole_op(op: Op, operands: Sequence[Any], **changed: Any) -> Sequence[Any]:
    """The results of an op, with some of its parameters changed."""
    eqn = op.handle
    params = {**eqn.params, **changed}
    with _jax.settings_of(eqn):
        return _jax.bound(eqn, compilable(op.primitive, operands, params), params)
