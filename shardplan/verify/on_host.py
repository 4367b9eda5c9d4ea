"""Arguments of a step on the host: drawn where they are only shapes, copied before donation deletes them, and nudged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardplan.verify.perturb import neighbours


@dataclass(frozen=True, slots=True)
class Key:
    """A random key on the host."""

    data: np.ndarray
    impl: Any


def drawn(leaves: Sequence[Any], *, seed: int = 0) -> list[Any]:
    """The leaves, with values for those that are only shapes: normal floats and random keys from the seed, zero integers."""
    rng = np.random.default_rng(seed)
    return [_draw(x, rng, seed + i) if isinstance(x, jax.ShapeDtypeStruct) else x for i, x in enumerate(leaves)]


def _draw(shape: jax.ShapeDtypeStruct, rng: np.random.Generator, seed: int) -> Any:
    if _is_key(shape):
        return jax.random.split(jax.random.key(seed), shape.shape) if shape.shape else jax.random.key(seed)
    if jnp.issubdtype(shape.dtype, jnp.inexact):
        return jnp.asarray(rng.standard_normal(shape.shape), shape.dtype)
    return jnp.zeros(shape.shape, shape.dtype)


def drawn_as_zero(leaf: Any) -> bool:
    """Whether a leaf is a nonempty shape of integers or booleans, for which `drawn` gives zeros."""
    return (
        isinstance(leaf, jax.ShapeDtypeStruct)
        and leaf.size > 0
        and not (_is_key(leaf) or jnp.issubdtype(leaf.dtype, jnp.inexact))
    )


def _is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def on_host(x: Any) -> Any:
    """A copy on the host, which donation cannot invalidate."""
    if _is_key(x):
        return Key(np.array(jax.random.key_data(x)), jax.random.key_impl(x))
    return np.array(x) if hasattr(x, "dtype") else x


def as_array(x: Any) -> Any:
    """The step's argument for a value on the host: a random key is wrapped again."""
    return jax.random.wrap_key_data(jnp.asarray(x.data), impl=x.impl) if isinstance(x, Key) else x


def as_numbers(x: Any) -> np.ndarray:
    """A result as numbers to compare; a random key as its words."""
    return np.array(jax.random.key_data(x)) if _is_key(x) else np.array(x)


def nudged(host: Sequence[Any], seed: int) -> list[Any]:
    """The values with each float moved up or down by one unit in the last place, as drawn from the seed."""
    rng = np.random.default_rng(seed)
    return [neighbours(x, rng) if isinstance(x, np.ndarray) else x for x in host]
