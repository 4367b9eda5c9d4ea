"""A train step on nnx objects, as users write it."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx


def train(model: nnx.Module, optimizer: nnx.Optimizer[Any], x: jax.Array) -> jax.Array:
    """The loss of a model that learns to give ``x`` back; updates model and optimizer in place."""
    value, grads = nnx.value_and_grad(lambda m: ((m(x) - x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return value
