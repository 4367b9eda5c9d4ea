"""A train step over parameters in a plain tree: loss, gradients, and optax for the update."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from models._arguments import Floats, Tokens, make_batch, make_state
from models._options import one_of

OPTIMIZER = one_of("adam", "sgd")


def make_optimizer(name: str, learning_rate: float) -> optax.GradientTransformation:
    """sgd is with momentum."""
    optimizers = {"adam": optax.adam, "sgd": functools.partial(optax.sgd, momentum=0.9)}
    return optimizers[name](learning_rate)


def optax_step(
    init_params: Callable[[jax.Array], Any],
    loss_of: Callable[[Any, dict[str, jax.Array]], jax.Array],
    optimizer: optax.GradientTransformation,
    draws: Mapping[str, Tokens | Floats],
    *,
    concrete: bool,
    seed: int,
) -> tuple[Callable, tuple[Any, dict[str, Any]]]:
    """(step, (state, batch)) of a scalar loss_of(params, batch): `state` {"params", "optimizer"}, `batch` that of `draws`."""

    def init(key):
        params = init_params(key)
        return {"params": params, "optimizer": optimizer.init(params)}

    def step(state, batch):
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, moments = optimizer.update(gradients, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": moments}, loss

    state = make_state(init, concrete=concrete, seed=seed)
    return step, (state, make_batch(draws, concrete=concrete, seed=seed))
