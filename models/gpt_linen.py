"""The GPT of `models.gpt` in flax linen: a TrainState trained by optax's AdamW, the same options and the same layout."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from models._accumulate import value_and_grad
from models._arguments import make_batch, make_state
from models._fused_attention import flash
from models._gpt_options import GPTOptions, causal_mask, text_batches
from models._options import REMAT_POLICIES, takes
from models._stack import bounded
from models._train import main
from models.losses import cross_entropy

__all__ = ["GPT", "text_batches", "train_step"]

_INIT = nn.initializers.normal(0.02)


@takes(GPTOptions)
def train_step(options: GPTOptions, *, concrete: bool = False, seed: int = 0):
    """(step, (state, batch)): `state` a TrainState, `batch` {"tokens", "targets"}, int32 [batch, sequence].

    >>> step, (state, batch) = train_step(layers=1)
    >>> state.params["block_0"]["attention"]["qkv"]["kernel"].shape
    (64, 3, 8, 8)
    """
    model, optimizer = _static_parts(options)

    def init(key):
        parameters = GPT(dataclasses.replace(options, boundary=None)).init(key, jnp.zeros((1, options.sequence), jnp.int32))[
            "params"
        ]
        # an array, not the int 0 of create: its type is then the same after every step
        return TrainState.create(apply_fn=model.apply, params=parameters, tx=optimizer).replace(step=jnp.zeros((), jnp.int32))

    def step(state, batch):
        key = jax.random.fold_in(jax.random.key(seed), state.step) if options.dropout else None
        loss, gradients = _value_and_grad(state, batch, key, options.accumulate)
        return state.apply_gradients(grads=gradients), loss

    state = make_state(init, concrete=concrete, seed=seed)
    return step, (state, make_batch(options.draws, concrete=concrete, seed=seed))


class GPT(nn.Module):
    """tokens [batch, sequence] -> logits [batch, sequence, vocabulary]. With `scan`, the blocks' parameters are stacked."""

    options: GPTOptions

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
        """With `train`, dropout is on and takes its keys from the rngs' "dropout"."""
        options = self.options
        embedding = nn.Embed(options.vocabulary, options.width, embedding_init=_INIT, dtype=options.dtype, name="embedding")
        position = self.param("position", _INIT, (options.sequence, options.width))
        x = embedding(tokens) + position.astype(options.dtype)
        x = nn.Dropout(options.dropout, deterministic=not train)(x)
        x = _blocks(options, bounded(x, options.boundary), train)
        x = nn.LayerNorm(dtype=options.dtype, name="norm")(x)
        if options.tied:
            return embedding.attend(x)
        return nn.Dense(options.vocabulary, use_bias=False, kernel_init=_INIT, dtype=options.dtype, name="head")(x)


class Block(nn.Module):
    """x [batch, sequence, width] -> the same, after attention and MLP, each on its normalised residual."""

    options: GPTOptions
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        """The second argument and result are what nn.scan wants of its body."""
        drop = functools.partial(nn.Dropout, self.options.dropout, deterministic=not self.train)
        norm = functools.partial(nn.LayerNorm, dtype=self.options.dtype)
        x = x + drop()(Attention(self.options, self.train, name="attention")(norm(name="norm_attention")(x)))
        x = x + drop()(MLP(self.options, name="mlp")(norm(name="norm_mlp")(x)))
        return bounded(x, self.options.boundary), None


class Attention(nn.Module):
    """Causal self-attention. x [batch, sequence, width] -> the same."""

    options: GPTOptions
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        options = self.options
        qkv = nn.DenseGeneral((3, options.heads, options.head_size), kernel_init=_INIT, dtype=options.dtype, name="qkv")
        out = nn.DenseGeneral(options.width, axis=(-2, -1), kernel_init=_residual_init(options), dtype=options.dtype, name="out")
        q, k, v = jnp.unstack(qkv(x), axis=-3)  # each [batch, sequence, heads, head]
        if options.attention == "flash":
            return out(flash(q, k, v, options.head_size**-0.5, True))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q * options.head_size**-0.5, k).astype(jnp.float32)
        scores = jnp.where(causal_mask(x.shape[1]), scores, jnp.finfo(jnp.float32).min)
        weights = nn.softmax(scores).astype(options.dtype)
        weights = nn.Dropout(options.dropout, deterministic=not self.train)(weights)
        return out(jnp.einsum("bhqk,bkhd->bqhd", weights, v))


class MLP(nn.Module):
    """x [batch, sequence, width] -> the same, through 4 x width."""

    options: GPTOptions

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width, dtype = self.options.width, self.options.dtype
        x = nn.gelu(nn.Dense(4 * width, kernel_init=_INIT, dtype=dtype, name="up")(x))
        return nn.Dense(width, kernel_init=_residual_init(self.options), dtype=dtype, name="down")(x)


def _blocks(options: GPTOptions, x: jax.Array, train: bool) -> jax.Array:
    # inside a scan there is no later copy of the forward pass for XLA to merge with
    keep = REMAT_POLICIES.get(options.remat)
    block = nn.remat(Block, prevent_cse=not options.scan, policy=keep) if options.remat else Block
    if not options.scan:
        for layer in range(options.layers):
            x, _ = block(options, train, name=f"block_{layer}")(x)
        return x
    stacked = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=options.layers)
    return stacked(options, train, name="blocks")(x, None)[0]


def _value_and_grad(state: TrainState, batch: dict, key: jax.Array | None, count: int):
    def loss_of(parameters, batch, key):
        rngs = {} if key is None else {"dropout": key}
        return cross_entropy(state.apply_fn({"params": parameters}, batch["tokens"], train=True, rngs=rngs), batch["targets"])

    return value_and_grad(loss_of, state.params, batch, count=count, key=key)


def _residual_init(options: GPTOptions):
    # GPT-2 section 2.3: what adds to the residual stream starts smaller the more layers add
    return nn.initializers.normal(0.02 / math.sqrt(2 * options.layers))


@functools.cache
def _static_parts(options: GPTOptions) -> tuple[GPT, optax.GradientTransformation]:
    # a TrainState compares these by identity: made once, the states of two calls with equal options have equal trees
    return GPT(options), optax.adamw(options.learning_rate)


if __name__ == "__main__":
    main(train_step, text_batches)
