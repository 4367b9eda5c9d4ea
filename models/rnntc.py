"""Text classification by four LSTM layers in plain JAX, unrolled: the last output of the last layer goes to a softmax layer.

That of FlexFlow's section 8 (Jia, Zaharia and Aiken 2018), on movie reviews of 18,765 words (Kim 2014):
`train_step(hidden=1024, steps=40, vocabulary=18765, classes=2, batch=64 * devices)`.
"""

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
from models._options import COUNT, DTYPE, POSITIVE, Options, option, takes
from models._train import main
from models.losses import cross_entropy

__all__ = ["text_batches", "train_step"]

_MODULES = 10
"""The most modules that its own batches tell apart."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RNNTCOptions(Options):
    """steps is the length of the text. dtype is computed in, parameters stay float32."""

    layers: int = option(4, COUNT)
    hidden: int = option(64, COUNT)
    steps: int = option(4, COUNT)
    batch: int = option(16, COUNT)
    vocabulary: int = option(128, COUNT)
    classes: int = option(16, COUNT)
    dtype: str = option("float32", DTYPE)
    optimizer: str = option("adam", OPTIMIZER)
    learning_rate: float = option(1e-2, POSITIVE)

    @property
    def modules(self) -> int:
        return min(self.classes, _MODULES)


@takes(RNNTCOptions)
def train_step(options: RNNTCOptions, *, concrete: bool = False, seed: int = 0):
    """(step, (state, batch)): `state` {"params", "optimizer"}, `batch` {"tokens" [batch, steps], "label" [batch]}, int32.

    >>> step, (state, batch) = train_step(hidden=32)
    >>> state["params"]["layer_3"]["input"].shape
    (32, 4, 32)
    """

    def loss_of(params, batch):
        return cross_entropy(apply(options, params, batch["tokens"]), batch["label"])

    return optax_step(
        functools.partial(init_params, options),
        loss_of,
        make_optimizer(options.optimizer, options.learning_rate),
        {
            "tokens": Tokens((options.batch, options.steps), options.vocabulary),
            "label": Tokens((options.batch,), options.modules),
        },
        concrete=concrete,
        seed=seed,
    )


@takes(RNNTCOptions)
def text_batches(options: RNNTCOptions, *, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Endless excerpts of modules and which they are from, for the factory called with the same options."""
    return data.module_batches(
        sequence=options.steps, batch=options.batch, modules=options.modules, seed=seed, vocabulary=options.vocabulary
    )


def init_params(options: RNNTCOptions, key: jax.Array) -> dict[str, Any]:
    """An embedding of the vocabulary, the LSTM layers, and a head of the classes."""
    hidden, scale = options.hidden, 1 / math.sqrt(options.hidden)
    keys = [jax.random.fold_in(key, i) for i in range(options.layers + 2)]
    return {
        "embedding": jax.random.normal(keys[-1], (options.vocabulary, hidden)) * scale,
        "head": jax.random.normal(keys[-2], (hidden, options.classes)) * scale,
        **{f"layer_{i}": init_lstm(keys[i], hidden) for i in range(options.layers)},
    }


def apply(options: RNNTCOptions, params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """tokens [batch, steps] -> logits [batch, classes]."""
    params = jax.tree.map(lambda leaf: leaf.astype(options.dtype), params)
    layers = [params[f"layer_{i}"] for i in range(options.layers)]
    carries = zero_carries(options.layers, options.batch, options.hidden, options.dtype)
    embedded = jnp.take(params["embedding"], tokens, axis=0)
    _, outputs = unroll(functools.partial(advance, layers), carries, embedded)
    return outputs[-1] @ params["head"]


if __name__ == "__main__":
    main(train_step, text_batches)
