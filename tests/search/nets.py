"""Steps whose layouts meet all at once: every layer reads all before it, or one op has many operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Step = tuple[Callable[..., Any], tuple[Any, ...]]


def _array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _descend(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(parameters: Any, *batch: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, jax.grad(loss)(parameters, *batch))

    return step


def all_to_all(layers: int, *, batch: int = 4096, width: int = 512) -> Step:
    """Each layer adds what every layer before it says through a weight of their own."""

    def loss(weights: list[list[jax.Array]], x: jax.Array) -> jax.Array:
        values = [x]
        for row in weights:
            values.append(jax.nn.relu(sum((v @ w for v, w in zip(values, row, strict=True)), start=jnp.zeros(()))))
        return values[-1].mean()

    weights = [[_array(width, width) for _ in range(i + 1)] for i in range(layers)]
    return _descend(loss), (weights, _array(batch, width))


def tables(count: int, *, batch: int = 4096) -> Step:
    """Embeddings of as many columns, each of its own width, concatenated: one op with so many operands."""

    def loss(parameters: Any, ids: jax.Array, x: jax.Array) -> jax.Array:
        found = [t[ids[:, i]] for i, t in enumerate(parameters["tables"])]
        h = jnp.concatenate([x, *found], -1)
        for w in parameters["weights"]:
            h = jax.nn.relu(h @ w)
        return h.mean()

    widths = [8 * (1 + i % 7) + 8 * (i // 7) for i in range(count)]
    parameters = {
        "tables": [_array(10_000 * (1 + i), w) for i, w in enumerate(widths)],
        "weights": [_array(sum(widths) + 16, 512), _array(512, 512)],
    }
    return _descend(loss), (parameters, _array(batch, count, dtype=jnp.int32), _array(batch, 16))
