"""Reductions of what devices hold, over mesh axes, inside a `shard_map`."""

# pyright: basic
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from shardplan.emit.extremes import as_floats, as_integers
from shardplan.ir import Reducer

TWO_TERMS: Mapping[Reducer, Callable[[Any, Any], Any]] = {
    "sum": jnp.add,
    "prod": jnp.multiply,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "and": jnp.bitwise_and,
    "or": jnp.bitwise_or,
}
"""The reduction of two terms."""


def all_reduced(x: Any, extreme: Any, reducer: Reducer, axes: tuple[str, ...]) -> Any:
    """The reduction of the values that devices along ``axes`` hold; places (argmax) are reduced with the ``extreme`` that each
    device found.

    Floats compare as integers, so that NaN wins. Products, and bits of integers, are gathered: XLA has no all-reduce for them.
    """
    match reducer:
        case "argmax" | "argmin":
            return _first_place(x, extreme, reducer, axes)
        case "sum":
            return lax.psum(x, axes)
        case "max" | "or" if x.dtype == bool:
            return lax.pmax(x.astype("int8"), axes).astype(bool)
        case "min" | "and" if x.dtype == bool:
            return lax.pmin(x.astype("int8"), axes).astype(bool)
        case "max" | "min" if jnp.issubdtype(x.dtype, jnp.floating):
            best = lax.pmax if reducer == "max" else lax.pmin
            return as_floats(best(as_integers(x, reducer), axes), x.dtype)
        case "max":
            return lax.pmax(x, axes)
        case "min":
            return lax.pmin(x, axes)
        case "and" | "or" | "prod":
            return combined(lax.all_gather(x, axes), reducer)


def combined(parts: Any, reducer: Reducer) -> Any:
    """Terms along the first dim, reduced on this device."""
    match reducer:
        case "prod":
            return jnp.prod(parts, axis=0, dtype=parts.dtype)
        case "max":
            return jnp.max(parts, axis=0)
        case "min":
            return jnp.min(parts, axis=0)
        case "and" | "or":
            combine = jnp.bitwise_and if reducer == "and" else jnp.bitwise_or
            return functools.reduce(combine, parts)
        case _:
            raise AssertionError(reducer)


def _first_place(place: Any, extreme: Any, reducer: Reducer, axes: tuple[str, ...]) -> Any:
    """The smallest place of the extreme over all devices; that of a NaN comes before any other."""
    best, beyond = (lax.pmax, -jnp.inf) if reducer == "argmax" else (lax.pmin, jnp.inf)
    value, lost = extreme, jnp.zeros(extreme.shape, bool)
    if jnp.issubdtype(extreme.dtype, jnp.floating):
        lost = jnp.isnan(extreme)
        value = jnp.where(lost, jnp.asarray(beyond, extreme.dtype), extreme)
    elif extreme.dtype == bool:
        value = extreme.astype(jnp.int8)
    last = jnp.iinfo(jnp.int32).max
    ranked = jnp.where(value == best(value, axes), place.astype(jnp.int32), last)
    first = lax.pmin(jnp.where(lost, place.astype(jnp.int32) - last, ranked), axes)
    return jnp.where(first < 0, first + last, first).astype(place.dtype)
