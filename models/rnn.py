"""A language model of stacked LSTMs in plain JAX, its time steps unrolled (as in Tofu's section 7) or scanned."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models import data
from models._arguments import Tokens, make_batch, make_state
from models._options import COUNT, DTYPE, POSITIVE, SWITCH, Options, one_of, option, takes
from models._train import main
from models.losses import cross_entropy

__all__ = ["text_batches", "train_step"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RNNOptions(Options):
    """steps is the length of the text, scan runs over it. dtype is computed in, parameters stay float32. sgd is with momentum:
    the one history of a weight in Tofu's Table 2."""

    layers: int = option(2, COUNT)
    hidden: int = option(64, COUNT)
    steps: int = option(20, COUNT)
    batch: int = option(16, COUNT)
    vocabulary: int = option(128, COUNT)
    dtype: str = option("float32", DTYPE)
    scan: bool = option(False, SWITCH)
    optimizer: str = option("adam", one_of("adam", "sgd"))
    learning_rate: float = option(1e-2, POSITIVE)


@takes(RNNOptions)
def train_step(options: RNNOptions, *, concrete: bool = False, seed: int = 0):
    """(step, (state, batch)): `state` {"params", "optimizer"}, `batch` {"tokens", "targets"}, int32 [batch, steps].

    >>> step, (state, batch) = train_step(hidden=32)
    >>> state["params"]["layer_0"]["recurrent"].shape  # the gates are a dim of their own, so that hidden can be split
    (32, 4, 32)
    """
    optimizers = {"adam": optax.adam, "sgd": functools.partial(optax.sgd, momentum=0.9)}
    optimizer = optimizers[options.optimizer](options.learning_rate)

    def init(key):
        params = init_params(options, key)
        return {"params": params, "optimizer": optimizer.init(params)}

    def loss_of(params, batch):
        return cross_entropy(apply(options, params, batch["tokens"]), batch["targets"])

    def step(state, batch):
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, moments = optimizer.update(gradients, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": moments}, loss

    tokens = Tokens((options.batch, options.steps), options.vocabulary)
    state = make_state(init, concrete=concrete, seed=seed)
    return step, (state, make_batch({"tokens": tokens, "targets": tokens}, concrete=concrete, seed=seed))


@takes(RNNOptions)
def text_batches(options: RNNOptions, *, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches of source text for the factory called with the same options."""
    return data.char_batches(sequence=options.steps, batch=options.batch, seed=seed, vocabulary=options.vocabulary)


def init_params(options: RNNOptions, key: jax.Array) -> dict[str, Any]:
    """Kernels [hidden, gate, hidden], the gates input, forget, cell, output; the forget gates start open."""
    hidden, scale = options.hidden, 1 / math.sqrt(options.hidden)

    def layer(key):
        into, recurrent = (jax.random.normal(k, (hidden, 4, hidden)) * scale for k in jax.random.split(key))
        return {"input": into, "recurrent": recurrent, "bias": jnp.zeros((4, hidden)).at[1].set(1.0)}

    keys = [jax.random.fold_in(key, i) for i in range(options.layers + 2)]
    return {
        "embedding": jax.random.normal(keys[-1], (options.vocabulary, hidden)) * scale,
        "head": jax.random.normal(keys[-2], (hidden, options.vocabulary)) * scale,
        **{f"layer_{i}": layer(keys[i]) for i in range(options.layers)},
    }


def apply(options: RNNOptions, params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """tokens [batch, steps] -> logits [batch, steps, vocabulary]."""
    params = jax.tree.map(lambda leaf: leaf.astype(options.dtype), params)
    layers = [params[f"layer_{i}"] for i in range(options.layers)]
    zeros = jnp.zeros((options.batch, options.hidden), options.dtype)
    carries = [(zeros, zeros)] * options.layers

    def advance(carries, x):
        new = []
        for layer, carry in zip(layers, carries, strict=True):
            x, cell = lstm(layer, carry, x)
            new.append((x, cell))
        return new, x

    embedded = jnp.take(params["embedding"], tokens, axis=0)
    if options.scan:
        _, outputs = jax.lax.scan(advance, carries, jnp.moveaxis(embedded, 1, 0))
        return jnp.moveaxis(outputs, 0, 1) @ params["head"]
    outputs = []
    for time, x in enumerate(jnp.unstack(embedded, axis=1)):
        with jax.named_scope(f"time_{time}"):
            carries, output = advance(carries, x)
        outputs.append(output)
    return jnp.stack(outputs, axis=1) @ params["head"]


def lstm(layer: dict[str, jax.Array], carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One time step. carry (output, cell) and x, all [batch, hidden] -> the new (output, cell)."""
    output, cell = carry
    gates = jnp.einsum("bi,igo->bgo", x, layer["input"]) + jnp.einsum("bi,igo->bgo", output, layer["recurrent"])
    into, forget, candidate, out = jnp.unstack(gates + layer["bias"], axis=1)
    cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(into) * jnp.tanh(candidate)
    return jax.nn.sigmoid(out) * jnp.tanh(cell), cell


if __name__ == "__main__":
    main(train_step, text_batches)
