"""A small language model and its train step, as a project of its own has them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

VOCABULARY, WIDTH, SEQUENCE, BATCH = 512, 128, 64, 32
OPTIMIZER = optax.adamw(1e-3)


class Block(nnx.Module):
    """Causal attention and an MLP, each added to the residual stream."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The residual stream behind the block."""
        x = x + self.attention(x, mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(jax.nn.gelu(self.up(x)))


class Model(nnx.Module):
    """Two blocks between an embedding and its transpose."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The logits of the next token."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embedding.attend(x)


def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
    """One train step: the next state, and the loss."""
    graphdef, params, moments = state

    def loss(params: Any) -> jax.Array:
        logits = nnx.merge(graphdef, params)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, grads = jax.value_and_grad(loss)(params)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return (graphdef, optax.apply_updates(params, updates), moments), value


def train_step() -> tuple[Any, tuple[Any, jax.Array]]:
    """The step and its arguments, which are real arrays: a TARGET of shardplan's commands."""
    graphdef, params = nnx.split(Model(nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(1), (BATCH, SEQUENCE + 1), 0, VOCABULARY, jnp.int32)
    return step, ((graphdef, params, OPTIMIZER.init(params)), tokens)
