"""Elementwise primitives: every operand is read at the result's own index; scalars and size-1 dims broadcast.

Descriptions of these are shared by calls whose extents are 0, 1 or more in the same places: a rule here must not read an extent.
"""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

from typing import Any

from shardplan.tdl.describe import rule
from shardplan.tdl.description import Call, Lambda
from shardplan.tdl.language import Opaque, Scalar, TensorRef, apply, where

# Bits of the significand: a conversion to at least as many loses nothing and so is linear.
_SIGNIFICAND = {
    "float8_e4m3fn": 4, "float8_e5m2": 3, "bfloat16": 8, "float16": 11, "float32": 24, "float64": 53,
    "complex64": 24, "complex128": 53,
}  # fmt: skip


def at(operand: TensorRef, index: tuple[Any, ...]) -> Scalar:
    """The operand's element at the result's index; a scalar's only element."""
    return operand[index] if operand.shape else operand[()]


@rule("add", "add_any")
def _add(call: Call, x: TensorRef, y: TensorRef) -> Lambda:
    return lambda *i: at(x, i) + at(y, i)


@rule("sub")
def _sub(call: Call, x: TensorRef, y: TensorRef) -> Lambda:
    return lambda *i: at(x, i) - at(y, i)


@rule("mul")
def _mul(call: Call, x: TensorRef, y: TensorRef) -> Lambda:
    return lambda *i: at(x, i) * at(y, i)


@rule("div")
def _div(call: Call, x: TensorRef, y: TensorRef) -> Lambda:
    if "int" in x.dtype or "int" in y.dtype:
        return lambda *i: apply("div", at(x, i), at(y, i))
    return lambda *i: at(x, i) / at(y, i)


@rule("neg")
def _neg(call: Call, x: TensorRef) -> Lambda:
    return lambda *i: -at(x, i)


@rule(
    "copy", "real", "imag", "conj", "stop_gradient", "name",
)  # fmt: skip
def _linear(call: Call, x: TensorRef) -> Lambda:
    return lambda *i: at(x, i)


@rule("complex")
def _complex(call: Call, x: TensorRef, y: TensorRef) -> Lambda:
    return lambda *i: at(x, i) + at(y, i)


@rule("convert_element_type")
def _convert(call: Call, x: TensorRef) -> Lambda:
    """Linear where nothing is lost; a partial sum does not cross a narrowing conversion."""
    old, new = _SIGNIFICAND.get(x.dtype, 99), _SIGNIFICAND.get(str(call.params["new_dtype"]), 0)
    if old <= new:
        return lambda *i: at(x, i)
    return lambda *i: apply("convert_element_type", at(x, i))


@rule("select_n")
def _select(call: Call, which: TensorRef, *cases: TensorRef) -> Lambda:
    def element(*i: Any) -> Scalar:
        value = at(cases[-1], i)
        for case in reversed(cases[:-1]):
            value = where(at(which, i), at(case, i), value)
        return value

    return element


@rule(
    "abs", "acos", "acosh", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp",
    "clz", "cos", "cosh", "digamma", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1",
    "floor", "ge", "gt", "igamma", "igamma_grad_a", "igammac", "integer_pow", "is_finite", "le", "le_to", "lgamma", "log",
    "log1p", "logistic", "lt", "lt_to", "max", "min", "mulhi", "ne", "nextafter", "not", "or", "polygamma", "population_count",
    "pow", "reduce_precision", "regularized_incomplete_beta", "rem", "round", "rsqrt", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh", "xor", "zeta",
)  # fmt: skip
@rule("log2", "one_minus_square", since="0.11")
@rule("polynomial", since="0.12")
def _function(call: Call, *operands: TensorRef) -> Lambda:
    return lambda *i: apply(call.primitive, *(at(x, i) for x in operands))


@rule("bitcast_convert_type")
def _bitcast(call: Call, x: TensorRef) -> Lambda:
    """Reinterprets bytes: a last dim that is added or removed holds the parts of one element."""
    rank, new_rank = len(x.shape), len(call.results[0])
    if rank == new_rank:
        return lambda *i: apply("bitcast_convert_type", x[i])
    if rank > new_rank:
        return lambda *i: Opaque()(x[(*i, slice(None))])
    return lambda *i: Opaque()(x[i[:-1]])[i[-1]]
