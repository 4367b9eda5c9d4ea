"""Three small steps for each of which some mixture of the ways that people shard is better than any of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Case = tuple[Callable[..., Any], tuple[Any, Any]]


def _array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _descent(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(weights: dict[str, jax.Array], batch: Any) -> tuple[dict[str, jax.Array], jax.Array]:
        value, gradients = jax.value_and_grad(loss)(weights, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    return step


def huge_embedding() -> Case:
    """A table of 200 MB, looked up by 4096 examples: neither it nor its gradient must travel; the examples should be split."""

    def loss(w: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        return jnp.sum((w["table"][tokens] @ w["out"]) ** 2)

    return _descent(loss), ({"table": _array(400_000, 128), "out": _array(128, 512)}, _array(4096, dtype=jnp.int32))


def convolution_and_dense() -> Case:
    """Frozen filters over large images, then a large matrix over few features: data parallel, then tensor parallel."""

    def loss(w: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        layout = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(batch["images"], batch["filters"], (1, 1), "VALID", dimension_numbers=layout)
        return jnp.sum((jnp.max(y, (1, 2)) @ w["dense"]) ** 2)

    given = {"images": _array(64, 64, 64, 16), "filters": _array(3, 3, 16, 64)}
    return _descent(loss), ({"dense": _array(64, 262_144)}, given)


def two_branches() -> Case:
    """One branch has many examples and a small matrix, the other few and a large one: each is split its own way."""

    def loss(w: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.sum((batch["many"] @ w["small"]) ** 2) + jnp.sum((batch["few"] @ w["large"]) ** 2)

    weights = {"small": _array(64, 128), "large": _array(4096, 16384)}
    return _descent(loss), (weights, {"many": _array(1_048_576, 64), "few": _array(64, 4096)})


CASES = {"huge embedding": huge_embedding, "convolution and dense": convolution_and_dense, "two branches": two_branches}
