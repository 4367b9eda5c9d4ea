"""Arguments of fuzzed steps, each from a seed: the vocabulary of generated and of printed programs."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Shape = tuple[int, ...]
WORDS = ("normal", "spread", "ints", "permutation", "bools", "key", "own_vjp", "own_jvp")
"""What the source of a program may use of this file."""


def normal(seed: int, shape: Shape, dtype: str = "float32") -> jax.Array:
    """Standard normal numbers: any two differ, but sums of them may come close to each other."""
    rng = np.random.default_rng([seed, 1])
    x: Any = rng.standard_normal(shape)
    if dtype == "complex64":
        x = x + 1j * rng.standard_normal(shape)
    return jnp.asarray(x, dtype)


def spread(seed: int, shape: Shape, dtype: str = "float32") -> jax.Array:
    """Numbers in -1.5 to 1.5, evenly spaced in a random order: comparing them with each other or a constant is safe."""
    size = math.prod(shape)
    order = np.random.default_rng([seed, 2]).permutation(size).reshape(shape)
    return jnp.asarray((order + 0.2 + 0.1 * (seed % 7)) * (3.0 / size) - 1.5, dtype)


def ints(seed: int, shape: Shape, limit: int = 10, dtype: str = "int32") -> jax.Array:
    """Whole numbers from 0 to ``limit`` - 1."""
    return jnp.asarray(np.random.default_rng([seed, 3]).integers(0, limit, shape), dtype)


def permutation(seed: int, size: int) -> jax.Array:
    """The numbers 0 to ``size`` - 1 in a random order."""
    return jnp.asarray(np.random.default_rng([seed, 4]).permutation(size), "int32")


def bools(seed: int, shape: Shape) -> jax.Array:
    """Fair coins."""
    return jnp.asarray(np.random.default_rng([seed, 5]).integers(0, 2, shape), "bool")


def key(seed: int) -> jax.Array:
    """A typed random key."""
    return jax.random.key(seed)


@jax.custom_vjp
def own_vjp(x: Any) -> Any:
    """A sine with a gradient of its own."""
    return jnp.sin(x)


own_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.tanh(x),))


@jax.custom_jvp
def own_jvp(x: Any) -> Any:
    """A sine with a derivative of its own."""
    return jnp.sin(x)


@own_jvp.defjvp
def _own_jvp(primals: Any, tangents: Any) -> Any:
    return jnp.sin(primals[0]), jnp.cos(primals[0]) * tangents[0] + 0.1 * tangents[0] * primals[0]
