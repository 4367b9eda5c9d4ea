# pyright: basic
"""Cases of elementwise primitives, dtype by dtype."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardplan.tdl.proof.case import (
    FLOATS,
    Case,
    Draw,
    array,
    bound,
    case,
    shuffled,
    some,
    traced,
)

_INTEGERS = ("int32", "uint8", "int16")

# Each unary primitive's domain.
_UNARY_FLOAT: dict[str, str] = {
    "acos": "unit",
    "acosh": "above",
    "asin": "unit",
    "asinh": "any",
    "atan": "any",
    "atanh": "unit",
    "bessel_i0e": "any",
    "bessel_i1e": "any",
    "cbrt": "any",
    "ceil": "any",
    "cos": "any",
    "cosh": "any",
    "digamma": "above",
    "erf": "any",
    "erf_inv": "unit",
    "erfc": "any",
    "exp": "any",
    "exp2": "any",
    "expm1": "any",
    "floor": "any",
    "is_finite": "any",
    "lgamma": "above",
    "log": "above",
    "log1p": "above",
    "log2": "above",
    "logistic": "any",
    "round": "any",
    "rsqrt": "above",
    "sin": "any",
    "sinh": "any",
    "sqrt": "above",
    "tan": "any",
    "tanh": "any",
}


def pooled(draw: Draw) -> tuple[int, ...]:
    """One of few shapes: these primitives share a handful of rules, and compiling takes most of the time."""
    return draw.choose(((4, 6), (12,), (4, 6)))


def _domain(x: Any, where: str) -> Any:
    match where:
        case "unit":
            return np.tanh(x.astype(np.float32)).astype(x.dtype)
        case "above":
            return (np.abs(x.astype(np.float32)) + 1.1).astype(x.dtype)
        case _:
            return x


@case(*_UNARY_FLOAT)
def _unary_float(name: str, draw: Draw) -> Case:
    x = _domain(array(draw, pooled(draw), draw.choose(FLOATS)), _UNARY_FLOAT[name])
    params = {"rounding_method": draw.choose(tuple(lax.RoundingMethod))} if name == "round" else {}
    return traced(name, partial(getattr(lax, name), **params), x)


@case("abs", "neg", "one_minus_square", "sign", "square")
def _unary_number(name: str, draw: Draw) -> Case:
    return bound(name, array(draw, pooled(draw), draw.choose((*FLOATS, "int32", "complex64"))))


@case("polynomial")
def _polynomial(name: str, draw: Draw) -> Case:
    operands = _operands(draw, draw.choose((3, 4, 5)), draw.choose(FLOATS))
    return traced(name, lambda x, *coefficients: lax.polynomial(x, coefficients), *operands)


@case("not", "population_count", "clz")
def _unary_integer(name: str, draw: Draw) -> Case:
    return bound(name, array(draw, pooled(draw), draw.choose(_INTEGERS)))


@case("real", "imag", "conj")
def _unary_complex(name: str, draw: Draw) -> Case:
    params = {"input_dtype": jnp.dtype("complex64")} if name == "conj" else {}
    return bound(name, array(draw, pooled(draw), "complex64"), **params)


@case("copy", "stop_gradient", "name", "integer_pow", "reduce_precision")
def _unary_special(name: str, draw: Draw) -> Case:
    x = array(draw, pooled(draw), draw.choose((*FLOATS, "float32")))
    params: dict[str, Any] = {
        "name": {"name": "kept"},
        "integer_pow": {"y": draw.choose((2, 3, 5))},
        "reduce_precision": {"exponent_bits": 8, "mantissa_bits": draw.choose((3, 7))},
    }.get(name, {})
    return bound(name, x, **params)


@case("convert_element_type")
def _convert(name: str, draw: Draw) -> Case:
    old, new = (draw.choose(("float32", "bfloat16", "int32", "bool", "uint8", "complex64")) for _ in range(2))
    old = "float32" if old == "complex64" else old
    return bound(name, array(draw, pooled(draw), old), new_dtype=jnp.dtype(new), weak_type=False, sharding=None)


@case("bitcast_convert_type")
def _bitcast(name: str, draw: Draw) -> Case:
    old, new = draw.choose((("float32", "int32"), ("float32", "uint16"), ("uint16", "float32"), ("int32", "uint8")))
    dims = pooled(draw) if new != "float32" else (*pooled(draw), 2)
    return bound(name, array(draw, dims, old, low=0), new_dtype=jnp.dtype(new))


def _operands(draw: Draw, count: int, dtype: str) -> list[Any]:
    """Operands of one shape; all but the first may be scalars or have dims of size 1."""
    dims = pooled(draw)
    operands: list[Any] = []
    for n in range(count):
        small = some(draw, range(len(dims))) if n and draw.choose((False, True)) else ()
        scalar = n > 0 and draw.choose((False, False, True))
        operands.append(array(draw, () if scalar else tuple(1 if d in small else k for d, k in enumerate(dims)), dtype))
    return operands


_PAIR: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "add": ((*FLOATS, "int32", "complex64"), {}),
    "sub": ((*FLOATS, "int32"), {}),
    "mul": ((*FLOATS, "int32"), {"out_dtype": None}),
    "div": ((*FLOATS, "int32"), {}),
    "rem": ((*FLOATS, "int32"), {}),
    "max": ((*FLOATS, "int32"), {}),
    "min": ((*FLOATS, "int32"), {}),
    "pow": (("float32",), {}),
    "atan2": (FLOATS, {}),
    "nextafter": (("float32",), {}),
    "complex": (("float32",), {}),
    "and": ((*_INTEGERS, "bool"), {}),
    "or": ((*_INTEGERS, "bool"), {}),
    "xor": ((*_INTEGERS, "bool"), {}),
    "eq": ((*FLOATS, "int32"), {}),
    "ne": ((*FLOATS, "int32"), {}),
    "ge": ((*FLOATS, "int32"), {}),
    "gt": ((*FLOATS, "int32"), {}),
    "le": ((*FLOATS, "int32"), {}),
    "lt": ((*FLOATS, "int32"), {}),
    "eq_to": (FLOATS, {}),
    "le_to": (FLOATS, {}),
    "lt_to": (FLOATS, {}),
    "shift_left": (("int32", "uint8"), {}),
    "shift_right_arithmetic": (("int32", "uint8"), {}),
    "shift_right_logical": (("int32", "uint8"), {}),
    "mulhi": (("int32", "uint32"), {}),
    "igamma": (("float32",), {}),
    "igammac": (("float32",), {}),
    "igamma_grad_a": (("float32",), {}),
    "zeta": (("float32",), {}),
    "polygamma": (("float32",), {}),
    "add_any": (FLOATS, {}),
}
_SLOW = {"igamma", "igammac", "igamma_grad_a", "zeta", "polygamma"}
_POSITIVE = {"pow", "igamma", "igammac", "igamma_grad_a", "zeta", "polygamma"}


@case(*_PAIR)
def _pair(name: str, draw: Draw) -> Case:
    dtypes, params = _PAIR[name]
    dtype = draw.choose(dtypes)
    x, y = _operands(draw, 2, dtype)
    if name in _SLOW:
        x, y = array(draw, (6,)), array(draw, (6,))
    if name == "add_any":
        y = array(draw, x.shape, dtype)
    if name in ("div", "rem") and dtype == "int32":
        y = np.abs(y) + 1
    if name.startswith("shift"):
        y = np.abs(y) % 7
    if name in _POSITIVE:
        x, y = _domain(x, "above"), _domain(y, "above")
    if name == "polygamma":
        x = np.round(x)
    x, y = shuffled(draw, (x, y)) if y.shape == x.shape or (y.shape == () and draw.choose((True, False))) else (x, y)
    return bound(name, x, y, **params)


@case("clamp")
def _clamp(name: str, draw: Draw) -> Case:
    dims = pooled(draw)
    edge = draw.choose(((), dims))
    x, low = array(draw, dims), array(draw, edge)
    return bound(name, low, x, low + np.float32(1))


@case("select_n")
def _select(name: str, draw: Draw) -> Case:
    dims, dtype = pooled(draw), draw.choose((*FLOATS, "int32", "bool"))
    which = draw.choose(((), dims))
    count = draw.choose((2, 3))
    selector = array(draw, which, "bool") if count == 2 else array(draw, which, "int32", low=0, high=3)
    return bound(name, selector, *(array(draw, dims, dtype) for _ in range(count)))


@case("regularized_incomplete_beta")
def _beta(name: str, draw: Draw) -> Case:
    dims = (6,)
    a, b, x = (np.abs(array(draw, dims)) + np.float32(0.5) for _ in range(3))
    return bound(name, a, b, (x / (1 + x)).astype(np.float32))


@case("optimization_barrier")
def _barrier(name: str, draw: Draw) -> Case:
    return bound(name, *(array(draw, pooled(draw)) for _ in range(draw.choose((1, 2)))))


@case("tie")
def _tie(name: str, draw: Draw) -> Case:
    return bound(name, array(draw, pooled(draw)), array(draw, pooled(draw)))
