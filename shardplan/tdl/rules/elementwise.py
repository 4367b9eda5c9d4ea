"""Elementwise primitives: every operand is read at the result's own index; scalars and size-1 dims broadcast."""

from __future__ import annotations

from typing import Any

from shardplan.tdl.describe import Call, Lambda, rule
from shardplan.tdl.language import Scalar, TensorRef, apply, where


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
    return lambda *i: at(x, i) / at(y, i)


@rule("neg")
def _neg(call: Call, x: TensorRef) -> Lambda:
    return lambda *i: -at(x, i)


@rule("copy", "copy_p", "real", "imag", "conj", "reduce_precision", "stop_gradient")
def _linear(call: Call, x: TensorRef) -> Lambda:
    return lambda *i: at(x, i)


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
    "clz", "complex", "convert_element_type", "cos", "cosh", "digamma", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1",
    "floor", "ge", "gt", "igamma", "igamma_grad_a", "igammac", "integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p",
    "logistic", "lt", "lt_to", "max", "min", "ne", "nextafter", "not", "or", "polygamma", "population_count", "pow",
    "random_gamma_grad", "regularized_incomplete_beta", "rem", "round", "rsqrt", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh", "xor", "zeta", "optimization_barrier_elementwise",
)  # fmt: skip
def _function(call: Call, *operands: TensorRef) -> Lambda:
    return lambda *i: apply(call.primitive, *(at(x, i) for x in operands))
