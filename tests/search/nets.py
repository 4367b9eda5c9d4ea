"""Steps whose layouts meet all at once: every layer reads all before it, or one op has many operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

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


def pieces(count: int) -> Step:
    """One table that is kept as so many pieces, each of its own height."""

    def loss(tables: list[jax.Array], x: jax.Array) -> jax.Array:
        return jnp.mean((x @ jnp.concatenate(tables, 0).T) ** 2)

    return _descend(loss), ([_array(8 * (1 + k % 7), 64) for k in range(count)], _array(256, 64))


def residual(*widths: int, batch: int = 1024, width: int = 192) -> Step:
    """Residual layers, of which the state has moments too."""

    def loss(layers: list[tuple[jax.Array, jax.Array]], x: jax.Array, y: jax.Array) -> jax.Array:
        for a, b in layers:
            x = x + jnp.tanh(x @ a) @ b
        return jnp.mean((x - y) ** 2)

    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        layers, moments = state
        value, found = jax.value_and_grad(loss)(layers, x, y)
        updates, moments = optax.adam(1e-3).update(found, moments, layers)
        return (optax.apply_updates(layers, updates), moments), value

    layers = [(_array(width, w), _array(w, width)) for w in widths]
    return step, ((layers, jax.eval_shape(optax.adam(1e-3).init, layers)), _array(batch, width), _array(batch, width))
