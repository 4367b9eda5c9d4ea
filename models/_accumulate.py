"""Loss and gradients of a batch that is taken in microbatches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Batch = dict[str, jax.Array]
Loss = Callable[[Any, Batch, jax.Array | None], jax.Array]


def value_and_grad(loss_of: Loss, parameters: Any, batch: Batch, *, count: int, key: jax.Array | None = None) -> tuple[Any, Any]:
    """(mean loss, gradients) of loss_of(parameters, batch, key), in `count` microbatches whose gradients are summed as they are.

    With a key, each microbatch has its own."""
    one = jax.value_and_grad(loss_of)
    if count == 1:
        return one(parameters, batch, key)

    def body(total, microbatch_and_number):
        microbatch, number = microbatch_and_number
        folded = None if key is None else jax.random.fold_in(key, number)
        return jax.tree.map(jnp.add, total, one(parameters, microbatch, folded)), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, parameters)
    numbers = None if key is None else jnp.arange(count)
    total, _ = jax.lax.scan(body, zeros, (microbatches(batch, count), numbers))
    return jax.tree.map(lambda x: x / count, total)


def microbatches(batch: Batch, count: int) -> Batch:
    """[batch, ...] -> [count, batch / count, ...], each microbatch taking every count-th example.

    Consecutive examples would put a batch that is split over devices on `count` instead: this way each device keeps its own.
    """

    def split(x):
        return jnp.moveaxis(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 1, 0)

    return jax.tree.map(split, batch)
