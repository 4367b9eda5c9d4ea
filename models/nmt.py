"""Translation by an encoder and a decoder of LSTM layers in plain JAX, unrolled, with attention on top of the last decoder layer.

Wu et al. 2016 in small; the attention is the additive one of Bahdanau et al. 2014, and each time step of the decoder has its own
softmax layer. That of FlexFlow's section 8 (Jia, Zaharia and Aiken 2018), which does not say its vocabulary, with Wu's:
`train_step(layers=2, hidden=1024, steps=40, vocabulary=32000, batch=64 * devices)`.
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

_START = 0
"""The decoder's token before its first: a character that the text does not have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NMTOptions(Options):
    """layers are those of the encoder and of the decoder each, steps the length of the text and of its translation. dtype is
    computed in, parameters stay float32."""

    layers: int = option(2, COUNT)
    hidden: int = option(64, COUNT)
    steps: int = option(4, COUNT)
    batch: int = option(16, COUNT)
    vocabulary: int = option(128, COUNT)
    dtype: str = option("float32", DTYPE)
    optimizer: str = option("adam", OPTIMIZER)
    learning_rate: float = option(1e-2, POSITIVE)


@takes(NMTOptions)
def train_step(options: NMTOptions, *, concrete: bool = False, seed: int = 0):
    """(step, (state, batch)): `state` {"params", "optimizer"}, `batch` {"source", "tokens", "targets"}, int32 [batch, steps].

    >>> step, (state, batch) = train_step(hidden=32)
    >>> sorted(state["params"])
    ['attention', 'decoder', 'encoder', 'head', 'source', 'target']
    """

    def loss_of(params, batch):
        return cross_entropy(apply(options, params, batch["source"], batch["tokens"]), batch["targets"])

    tokens = Tokens((options.batch, options.steps), options.vocabulary)
    return optax_step(
        functools.partial(init_params, options),
        loss_of,
        make_optimizer(options.optimizer, options.learning_rate),
        {"source": tokens, "tokens": tokens, "targets": tokens},
        concrete=concrete,
        seed=seed,
    )


@takes(NMTOptions)
def text_batches(options: NMTOptions, *, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches of source text, to be translated into itself backwards, for the factory called with the same options."""
    for batch in data.char_batches(sequence=options.steps, batch=options.batch, seed=seed, vocabulary=options.vocabulary):
        targets = batch["tokens"][:, ::-1]
        tokens = np.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=_START)
        yield {"source": batch["tokens"], "tokens": tokens, "targets": targets}


def init_params(options: NMTOptions, key: jax.Array) -> dict[str, Any]:
    """An embedding for either language, the LSTM layers of either side, the attention, and a head of the vocabulary."""
    hidden, vocabulary, scale = options.hidden, options.vocabulary, 1 / math.sqrt(options.hidden)
    keys = iter(jax.random.split(key, 2 * options.layers + 7))

    def normal(*shape):
        return jax.random.normal(next(keys), shape) * scale

    return {
        "source": normal(vocabulary, hidden),
        "target": normal(vocabulary, hidden),
        "encoder": [init_lstm(next(keys), hidden) for _ in range(options.layers)],
        "decoder": [init_lstm(next(keys), hidden) for _ in range(options.layers)],
        "attention": {
            "key": normal(hidden, hidden),
            "query": normal(hidden, hidden),
            "score": normal(hidden),
            "combine": normal(2, hidden, hidden),
        },
        "head": normal(hidden, vocabulary),
    }


def apply(options: NMTOptions, params: dict[str, Any], source: jax.Array, tokens: jax.Array) -> jax.Array:
    """source, tokens [batch, steps] -> logits [batch, steps, vocabulary]. The decoder starts from the encoder's last carries."""
    params = jax.tree.map(lambda leaf: leaf.astype(options.dtype), params)
    attention = params["attention"]
    with jax.named_scope("encoder"):
        start = zero_carries(options.layers, options.batch, options.hidden, options.dtype)
        embedded = jnp.take(params["source"], source, axis=0)
        carries, outputs = unroll(functools.partial(advance, params["encoder"]), start, embedded)
        memory = jnp.stack(outputs, axis=1)
        keys = memory @ attention["key"]

    def decode(carries, x):
        carries, output = advance(params["decoder"], carries, x)
        return carries, attend(attention, output, keys, memory) @ params["head"]

    with jax.named_scope("decoder"):
        _, logits = unroll(decode, carries, jnp.take(params["target"], tokens, axis=0))
        return jnp.stack(logits, axis=1)


def attend(attention: dict[str, jax.Array], output: jax.Array, keys: jax.Array, memory: jax.Array) -> jax.Array:
    """output [batch, hidden], keys and memory [batch, steps, hidden] -> [batch, hidden], the output joined by its context."""
    with jax.named_scope("attention"):
        query = output @ attention["query"]
        scores = jnp.einsum("bsh,h->bs", jnp.tanh(keys + query[:, None]), attention["score"])
        weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(output.dtype)
        context = jnp.einsum("bs,bsh->bh", weights, memory)
        return jnp.tanh(output @ attention["combine"][0] + context @ attention["combine"][1])


if __name__ == "__main__":
    main(train_step, text_batches)
