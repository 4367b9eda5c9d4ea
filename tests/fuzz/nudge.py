"""Floats inside a step moved by one unit in the last place: how far rounding alone may carry its results."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def nudge(x: Any, place: int, seed: int) -> Any:
    """``x`` with each float a unit of its type up or down, by the seed and the place in the program."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    eps = jnp.finfo(x.dtype).eps
    up = jax.random.bernoulli(jax.random.fold_in(jax.random.key(seed), place), 0.5, x.shape)
    return x * jnp.where(up, 1 + eps, 1 - eps).astype(x.dtype)
