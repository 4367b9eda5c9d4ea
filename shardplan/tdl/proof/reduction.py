# pyright: basic
"""Cases of reductions over dims and windows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardplan import _jax
from shardplan.tdl.proof.case import (
    FLOATS,
    Case,
    Draw,
    array,
    bound,
    case,
    shape,
    some,
    traced,
)


@case("reduce_sum", "reduce_prod", "reduce_max", "reduce_min")
def _reduce(name: str, draw: Draw) -> Case:
    dims = shape(draw)
    x = array(draw, dims, draw.choose((*FLOATS, "int32")), low=1 if name == "reduce_prod" else -4, high=3)
    return bound(name, x, axes=some(draw, range(len(dims))), out_sharding=None)


@case("reduce_and", "reduce_or", "reduce_xor")
def _reduce_bits(name: str, draw: Draw) -> Case:
    dims = shape(draw)
    return bound(
        name, array(draw, dims, draw.choose(("bool", "int32", "uint8")), low=0), axes=some(draw, range(len(dims)), least=1)
    )


@case("reduce")
def _reduce_any(name: str, draw: Draw) -> Case:
    """Reduces two operands at once: the sum of one, the maximum of the other."""
    dims = shape(draw)
    axes = some(draw, range(len(dims)), least=1)
    x, y = array(draw, dims, "int32"), array(draw, dims)
    zeros = (np.int32(0), np.float32(0))

    def both(a: Any, b: Any) -> Any:
        return (a[0] + b[0], jnp.maximum(a[1], b[1]))

    return traced(name, lambda x, y: lax.reduce((x, y), zeros, both, axes), x, y)


@case("argmax", "argmin")
def _argument(name: str, draw: Draw) -> Case:
    dims = shape(draw)
    x = np.round(
        array(draw, dims, draw.choose(("float32", "int32", "bfloat16")))
    )  # rounding makes ties, where the first one counts
    if x.dtype == np.float32 and draw.choose((False, False, True)):
        x = np.where(array(draw, dims) > 1, np.float32("nan"), x)
    return bound(name, x, axes=(draw.choose(range(len(dims))),), index_dtype=np.dtype("int32"))


@case("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _cumulative(name: str, draw: Draw) -> Case:
    dims = shape(draw)
    return bound(name, array(draw, dims), axis=draw.choose(range(len(dims))), reverse=draw.choose((False, True)))


def _window(draw: Draw) -> tuple[tuple[int, ...], dict[str, Any]]:
    dims = shape(draw, draw.choose((1, 2, 2)), sizes=(4, 6, 12), largest=150)
    window, stride, wide, apart, padding = [], [], [], [], []
    for n in dims:
        window.append(draw.choose((1, 2, 3, n)))
        stride.append(draw.choose((1, 1, 2, 3)))
        wide.append(draw.choose((1, 1, 2)) if window[-1] < n else 1)
        apart.append(draw.choose((1, 1, 1, 2)))
        spread, dilated = (window[-1] - 1) * wide[-1] + 1, (n - 1) * apart[-1] + 1
        total = max(0, (-(-n * apart[-1] // stride[-1]) - 1) * stride[-1] + spread - dilated)
        padding.append(draw.choose(((total // 2, total - total // 2), (0, 0), (1, 1), (total, 0))))
        if dilated + sum(padding[-1]) < spread:
            padding[-1] = (0, spread)
    return dims, {
        "window_dimensions": tuple(window),
        "window_strides": tuple(stride),
        "padding": tuple(padding),
        "base_dilation": tuple(apart),
        "window_dilation": tuple(wide),
    }


@case("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def _reduce_window(name: str, draw: Draw) -> Case:
    dims, params = _window(draw)
    return bound(name, array(draw, dims, draw.choose(("float32", "int32"))), **params)


@case("reduce_window")
def _reduce_window_any(name: str, draw: Draw) -> Case:
    dims, p = _window(draw)
    x = array(draw, dims, "int32", low=1, high=3)
    windows = p["window_dimensions"], p["window_strides"], p["padding"], p["base_dilation"], p["window_dilation"]
    start = np.int32(draw.choose((1, 2)))
    return traced(name, lambda x: lax.reduce_window(x, start, lambda a, b: a * b + 0 * a, *windows), x)


def _plain_window(draw: Draw, *, batch: bool = False) -> tuple[tuple[int, ...], dict[str, Any]]:
    dims, p = _window(draw)
    if batch:
        dims = (4, *dims[1:])
        p: dict[str, Any] = {k: ((1 if k != "padding" else (0, 0)), *v[1:]) for k, v in p.items()}
    for d, n in enumerate(dims):  # padding for windows without dilation
        w, s = p["window_dimensions"][d], p["window_strides"][d]
        total = max(0, (-(-n // s) - 1) * s + w - n)
        low = draw.choose((total // 2, 0))
        p["padding"] = (*p["padding"][:d], draw.choose(((low, total - low), (0, 0))), *p["padding"][d + 1 :])
    return dims, {k: p[k] for k in ("window_dimensions", "window_strides", "padding")}


@case("select_and_scatter_add")
def _select_and_scatter_add(name: str, draw: Draw) -> Case:
    """The gradient of max pooling."""
    dims, p = _plain_window(draw)
    x = array(draw, dims)
    pooled = jax.eval_shape(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, *p.values()), x)
    return bound(name, array(draw, pooled.shape), x, select_prim=draw.choose((lax.ge_p, lax.le_p)), **p)


@case("select_and_gather_add")
def _select_and_gather_add(name: str, draw: Draw) -> Case:
    """The tangent of max pooling."""
    dims, p = _plain_window(draw)
    ones = (1,) * len(dims)
    x, t = array(draw, dims), array(draw, dims)
    return bound(name, t, x, select_prim=draw.choose((lax.ge_p, lax.le_p)), **p, base_dilation=ones, window_dilation=ones)


@case("select_and_scatter")
def _select_and_scatter(name: str, draw: Draw) -> Case:
    make = _jax.select_and_scatter()
    dims, p = _plain_window(draw, batch=True)
    x = array(draw, dims)
    pooled = jax.eval_shape(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, *p.values()), x)
    return traced(
        name,
        lambda x, s: make(x, lax.ge, p["window_dimensions"], p["window_strides"], p["padding"], s, jnp.float32(0), lax.add),
        x,
        array(draw, pooled.shape),
    )
