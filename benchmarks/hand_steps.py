"""Train steps as others write them, in plain flax linen, optax and JAX: `by_hand.py` plans them, and shards them by hand.

Each factory returns ``(step, (state, batch))`` with shapes for arguments. They share nothing with `models/`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec

Step = tuple[Callable[..., Any], tuple[Any, ...]]
Boundary = PartitionSpec | None
"""Where activations [batch, sequence, width] lie between blocks, over the axes of the mesh that is set."""


def constrained(x: jax.Array, boundary: Boundary) -> jax.Array:
    """Activations between blocks, constrained to their boundary if there is one."""
    return x if boundary is None else jax.lax.with_sharding_constraint(x, boundary)


class Attention(nn.Module):
    """Multi-head attention; with ``memory`` it reads the encoder's output."""

    heads: int
    dtype: Any
    causal: bool

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array | None = None) -> jax.Array:
        """[batch, sequence, width] -> the same."""
        width, source = x.shape[-1], x if memory is None else memory
        shape = (self.heads, width // self.heads)
        q = nn.DenseGeneral(shape, dtype=self.dtype, name="query")(x)
        k = nn.DenseGeneral(shape, dtype=self.dtype, name="key")(source)
        v = nn.DenseGeneral(shape, dtype=self.dtype, name="value")(source)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=self.causal)
        return nn.DenseGeneral(width, axis=(-2, -1), dtype=self.dtype, name="out")(mixed)


class Block(nn.Module):
    """Pre-norm attention, optionally attention on an encoder's output, and an MLP."""

    heads: int
    dtype: Any
    dropout: float = 0.0
    causal: bool = True
    boundary: Boundary = None

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array | None, train: bool) -> jax.Array:
        """[batch, sequence, width] -> the same."""

        def dropped(y: jax.Array) -> jax.Array:
            return nn.Dropout(self.dropout, deterministic=not train)(y)

        x = x + dropped(Attention(self.heads, self.dtype, self.causal, name="attention")(nn.LayerNorm(dtype=self.dtype)(x)))
        if memory is not None:
            y = nn.LayerNorm(dtype=self.dtype)(x)
            x = x + dropped(Attention(self.heads, self.dtype, False, name="cross")(y, memory))
        y = nn.Dense(4 * x.shape[-1], dtype=self.dtype, name="up")(nn.LayerNorm(dtype=self.dtype)(x))
        x = x + dropped(nn.Dense(x.shape[-1], dtype=self.dtype, name="down")(nn.gelu(y)))
        return constrained(x, self.boundary)


class Decoder(nn.Module):
    """A GPT: tokens [batch, sequence] -> logits [batch, sequence, vocabulary]; with ``memory`` the decoder of a T5."""

    vocabulary: int
    layers: int
    width: int
    heads: int
    dtype: Any = jnp.bfloat16
    tied: bool = True
    remat: bool = False
    dropout: float = 0.0
    boundary: Boundary = None

    @nn.compact
    def __call__(self, tokens: jax.Array, memory: jax.Array | None = None, train: bool = True) -> jax.Array:
        """The logits of every position."""
        embedding = nn.Embed(self.vocabulary, self.width, dtype=self.dtype, name="embedding")
        position = self.param("position", nn.initializers.normal(0.02), (tokens.shape[1], self.width))
        x = constrained(embedding(tokens) + position.astype(self.dtype), self.boundary)
        block = nn.remat(Block, static_argnums=(3,)) if self.remat else Block
        for i in range(self.layers):
            x = block(self.heads, self.dtype, self.dropout, True, self.boundary, name=f"block_{i}")(x, memory, train)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return embedding.attend(x) if self.tied else nn.Dense(self.vocabulary, use_bias=False, dtype=self.dtype, name="head")(x)


class EncoderDecoder(nn.Module):
    """A T5: an encoder of source tokens, a decoder of target tokens."""

    vocabulary: int
    layers: int
    width: int
    heads: int
    dtype: Any = jnp.bfloat16
    boundary: Boundary = None

    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        """The logits of every position of the target."""
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype, name="source")(source)
        x = constrained(x, self.boundary)
        for i in range(self.layers):
            x = Block(self.heads, self.dtype, 0.0, False, self.boundary, name=f"encoder_{i}")(x, None, True)
        decoder = Decoder(self.vocabulary, self.layers, self.width, self.heads, self.dtype, boundary=self.boundary)
        return decoder(target, nn.LayerNorm(dtype=self.dtype)(x))


def gpt(
    *,
    layers: int,
    width: int,
    heads: int,
    vocabulary: int,
    batch: int,
    sequence: int,
    dtype: str = "bfloat16",
    tied: bool = True,
    remat: bool = False,
    dropout: float = 0.0,
    smoothing: float = 0.0,
    accumulate: int = 1,
    optimizer: str = "adamw",
    boundary: Boundary = None,
) -> Step:
    """A GPT under optax's cross-entropy with integer labels, or with smoothed ones."""
    model = Decoder(vocabulary, layers, width, heads, jnp.dtype(dtype), tied, remat, dropout, boundary)
    tx = optax.adamw(3e-4, weight_decay=0.1) if optimizer == "adamw" else optax.contrib.muon(3e-4)
    example = jnp.zeros((1, sequence), jnp.int32)
    state = _state(lambda key: model.clone(boundary=None).init(key, example, train=False), tx, model.apply)

    def loss_of(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, batch["tokens"], rngs={"dropout": key})
        if not smoothing:
            return cross_entropy(logits, batch["targets"])
        labels = optax.smooth_labels(jax.nn.one_hot(batch["targets"], vocabulary), smoothing)
        return optax.softmax_cross_entropy(logits.astype(jnp.float32), labels).mean()

    def step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        key = jax.random.fold_in(jax.random.key(0), state.step)
        loss, grads = accumulated(functools.partial(loss_of, key=key), state.params, batch, accumulate)
        return state.apply_gradients(grads=grads), loss

    shape = jax.ShapeDtypeStruct((batch, sequence), jnp.int32)
    return step, (state, {"tokens": shape, "targets": shape})


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over all positions, in float32. Logits are [batch, sequence, vocabulary], labels [batch, sequence]."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def accumulated(loss_of: Callable[[Any, Any], jax.Array], params: Any, batch: Any, count: int) -> tuple[jax.Array, Any]:
    """The loss and the gradients of a batch [examples, ...], as means over ``count`` microbatches.

    Microbatch i holds the examples i, i + count, ...: a batch that is split over devices gives microbatches that are split alike,
    and no example moves.
    """
    if count == 1:
        return jax.value_and_grad(loss_of)(params, batch)
    parts = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 1, 0), batch)

    def body(carry: Any, part: Any) -> tuple[Any, None]:
        loss, grads = jax.value_and_grad(loss_of)(params, part)
        return (carry[0] + loss / count, jax.tree.map(lambda a, g: a + g / count, carry[1], grads)), None

    start = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    return jax.lax.scan(body, start, parts)[0]


def seq2seq(
    *, layers: int, width: int, heads: int, vocabulary: int, batch: int, sequence: int, boundary: Boundary = None
) -> Step:
    """An encoder-decoder under optax's cross-entropy with integer labels."""
    model = EncoderDecoder(vocabulary, layers, width, heads, boundary=boundary)
    tokens = jnp.zeros((1, sequence), jnp.int32)
    state = _state(lambda key: model.clone(boundary=None).init(key, tokens, tokens), optax.adamw(1e-3), model.apply)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        def loss_of(params: Any) -> jax.Array:
            logits: Any = model.apply({"params": params}, batch["source"], batch["target"])
            return cross_entropy(logits, batch["labels"])

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), loss

    shape = jax.ShapeDtypeStruct((batch, sequence), jnp.int32)
    return step, (state, {"source": shape, "target": shape, "labels": shape})


def lora(
    *,
    layers: int,
    width: int,
    heads: int,
    vocabulary: int,
    batch: int,
    sequence: int,
    rank: int = 16,
    boundary: Boundary = None,
) -> Step:
    """A GPT whose bfloat16 weights are frozen; the kernels of its MLPs have adapters of low rank, which alone are trained."""
    model = Decoder(vocabulary, layers, width, heads, remat=True, boundary=boundary)
    frozen = jax.eval_shape(model.clone(boundary=None).init, jax.random.key(0), jnp.zeros((1, sequence), jnp.int32))["params"]
    frozen = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), frozen)
    shapes = {f"block_{i}/{name}": frozen[f"block_{i}"][name]["kernel"].shape for i in range(layers) for name in ("up", "down")}
    adapters = {
        name: {"a": jax.ShapeDtypeStruct((n, rank), jnp.float32), "b": jax.ShapeDtypeStruct((rank, m), jnp.float32)}
        for name, (n, m) in shapes.items()
    }
    tx = optax.adamw(1e-4)
    state = {"frozen": frozen, "adapters": adapters, "moments": jax.eval_shape(tx.init, adapters)}

    def merged(frozen: Any, adapters: Any) -> Any:
        """The weights with what the adapters add: a kernel [n, m] plus ``a`` [n, rank] @ ``b`` [rank, m]."""
        weights = {name: dict(block) if isinstance(block, dict) else block for name, block in frozen.items()}
        for name, pair in adapters.items():
            block, layer = name.split("/")
            change = (pair["a"] @ pair["b"]).astype(jnp.bfloat16)
            weights[block][layer] = {**weights[block][layer], "kernel": weights[block][layer]["kernel"] + change}
        return weights

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        def loss_of(adapters: Any) -> jax.Array:
            logits: Any = model.apply({"params": merged(state["frozen"], adapters)}, batch["tokens"])
            return cross_entropy(logits, batch["targets"])

        loss, grads = jax.value_and_grad(loss_of)(state["adapters"])
        updates, moments = tx.update(grads, state["moments"], state["adapters"])
        return {**state, "adapters": optax.apply_updates(state["adapters"], updates), "moments": moments}, loss

    shape = jax.ShapeDtypeStruct((batch, sequence), jnp.int32)
    return step, (state, {"tokens": shape, "targets": shape})


def _state(init: Callable[[jax.Array], Any], tx: Any, apply: Any) -> Any:
    """The shapes of a `TrainState`."""
    return jax.eval_shape(lambda key: TrainState.create(apply_fn=apply, params=init(key)["params"], tx=tx), jax.random.key(0))


STEPS: dict[str, Callable[..., Step]] = {"gpt": gpt, "seq2seq": seq2seq, "lora": lora}
