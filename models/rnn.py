"""A language model of stacked LSTMs in plain JAX, its time steps unrolled (as in Tofu's section 7) or scanned."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import data
from models._arguments import Tokens
from models._lstm import advance, init_lstm, unroll, zero_carries
from models._optax_step import OPTIMIZER, make_optimizer, optax_step
from models._options import COUNT, DTYPE, POSITIVE, SWITCH, Options, option, takes
from models._train import main
from models.losses import cross_entropy

__all__ = ["text_batches", "train_step"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RNNOptions(Options):
    """steps is the length of the text, scan runs over it. head_in_steps: each time step has its own product with the head,
    instead of one for all. dtype is computed in, parameters stay float32. sgd is with momentum: the one history of a weight in
    Tofu's Table 2."""

    layers: int = option(2, COUNT)
    hidden: int = option(64, COUNT)
    steps: int = option(20, COUNT)
    batch: int = option(16, COUNT)
    vocabulary: int = option(128, COUNT)
    dtype: str = option("float32", DTYPE)
    scan: bool = option(False, SWITCH)
    head_in_steps: bool = option(False, SWITCH)
    optimizer: str = option("adam", OPTIMIZER)
    learning_rate: float = option(1e-2, POSITIVE)


@takes(RNNOptions)
def train_step(options: RNNOptions, *, concrete: bool = False, seed: int = 0):
    """(step, (state, batch)): `state` {"params", "optimizer"}, `batch` {"tokens", "targets"}, int32 [batch, steps].

    >>> step, (state, batch) = train_step(hidden=32)
    >>> state["params"]["layer_0"]["recurrent"].shape  # the gates are a dim of their own, so that hidden can be split
    (32, 4, 32)
    """

    def loss_of(params, batch):
        return cross_entropy(apply(options, params, batch["tokens"]), batch["targets"])

    tokens = Tokens((options.batch, options.steps), options.vocabulary)
    return optax_step(
        functools.partial(init_params, options),
        loss_of,
        make_optimizer(options.optimizer, options.learning_rate),
        {"tokens": tokens, "targets": tokens},
        concrete=concrete,
        seed=seed,
    )


@takes(RNNOptions)
def text_batches(options: RNNOptions, *, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches of source text for the factory called with the same options."""
    return data.char_batches(sequence=options.steps, batch=options.batch, seed=seed, vocabulary=options.vocabulary)


def init_params(options: RNNOptions, key: jax.Array) -> dict[str, Any]:
    """An embedding and a head of the vocabulary around the LSTM layers."""
    hidden, scale = options.hidden, 1 / math.sqrt(options.hidden)
    keys = [jax.random.fold_in(key, i) for i in range(options.layers + 2)]
    return {
        "embedding": jax.random.normal(keys[-1], (options.vocabulary, hidden)) * scale,
        "head": jax.random.normal(keys[-2], (hidden, options.vocabulary)) * scale,
        **{f"layer_{i}": init_lstm(keys[i], hidden) for i in range(options.layers)},
    }


def apply(options: RNNOptions, params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """tokens [batch, steps] -> logits [batch, steps, vocabulary]."""
    params = jax.tree.map(lambda leaf: leaf.astype(options.dtype), params)
    layers = [params[f"layer_{i}"] for i in range(options.layers)]
    carries = zero_carries(options.layers, options.batch, options.hidden, options.dtype)

    def body(carries, x):
        carries, output = advance(layers, carries, x)
        return carries, output @ params["head"] if options.head_in_steps else output

    embedded = jnp.take(params["embedding"], tokens, axis=0)
    if options.scan:
        _, outputs = jax.lax.scan(body, carries, jnp.moveaxis(embedded, 1, 0))
        outputs = jnp.moveaxis(outputs, 0, 1)
    else:
        _, outputs = unroll(body, carries, embedded)
        outputs = jnp.stack(outputs, axis=1)
    return outputs if options.head_in_steps else outputs @ params["head"]


if __name__ == "__main__":
    main(train_step, text_batches)
