"""A GPT (pre-LayerNorm, learned positions) in flax nnx, trained by AdamW.

Laid out so that Megatron's tensor parallelism needs two all-reduces forward and two backward in each block: one fused
projection [width, 3, heads, head] whose heads can be split, and the MLP's two kernels, column and row.
"""

import functools
import math

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from models._accumulate import value_and_grad
from models._arguments import make_batch, make_state
from models._fused_attention import flash
from models._gpt_options import GPTOptions, causal_mask, text_batches
from models._options import takes
from models._stack import fold, make_blocks, run_blocks
from models._train import main
from models.losses import cross_entropy

__all__ = ["GPT", "text_batches", "train_step"]

_INIT = nnx.initializers.normal(0.02)


@takes(GPTOptions)
def train_step(options: GPTOptions, *, concrete: bool = False, seed: int = 0):
    """(step, (state, batch)): `state` is that of (model, optimizer), `batch` {"tokens", "targets"}, int32 [batch, sequence].

    >>> step, (state, batch) = train_step(layers=1)
    >>> state[0]["blocks"][0]["attention"]["qkv"]["kernel"].shape
    (64, 3, 8, 8)
    """

    def init(key):
        model = GPT(options, key)
        return nnx.split((model, nnx.Optimizer(model, optax.adamw(options.learning_rate), wrt=nnx.Param)))

    def step(state, batch):
        model, optimizer = nnx.merge(graphdef, state)
        key = jax.random.fold_in(jax.random.key(seed), optimizer.step[...]) if options.dropout else None
        loss, gradients = _value_and_grad(model, batch, key, options.accumulate)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    graphdef, state = make_state(init, concrete=concrete, seed=seed)
    return step, (state, make_batch(options.draws, concrete=concrete, seed=seed))


class GPT(nnx.Module):
    """tokens [batch, sequence] -> logits [batch, sequence, vocabulary]. With `scan`, the blocks' parameters are stacked."""

    def __init__(self, options: GPTOptions, key: jax.Array):
        self.options = options
        rngs = nnx.Rngs(jax.random.fold_in(key, options.layers))
        self.embedding = nnx.Embed(options.vocabulary, options.width, embedding_init=_INIT, dtype=options.dtype, rngs=rngs)
        self.position = nnx.Param(_INIT(rngs.params(), (options.sequence, options.width)))
        make = functools.partial(Block, options)
        self.blocks = make_blocks(make, key, layers=options.layers, scan=options.scan)
        self.norm = nnx.LayerNorm(options.width, dtype=options.dtype, rngs=rngs)
        if not options.tied:
            self.head = nnx.Linear(
                options.width, options.vocabulary, use_bias=False, kernel_init=_INIT, dtype=options.dtype, rngs=rngs
            )

    def __call__(self, tokens: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """`key` is for dropout, None without it."""
        x = self.embedding(tokens) + self.position[...].astype(self.options.dtype)
        x = _dropout(self.options, x, fold(key, self.options.layers))
        x = self.norm(
            run_blocks(self.blocks, x, scan=self.options.scan, remat=self.options.remat, key=key, boundary=self.options.boundary)
        )
        with jax.named_scope("head"):
            return self.embedding.attend(x) if self.options.tied else self.head(x)


class Block(nnx.Module):
    """x [batch, sequence, width] -> the same, after attention and MLP, each on its normalised residual."""

    def __init__(self, options: GPTOptions, rngs: nnx.Rngs):
        self.options = options
        self.norm_attention = nnx.LayerNorm(options.width, dtype=options.dtype, rngs=rngs)
        self.attention = Attention(options, rngs)
        self.norm_mlp = nnx.LayerNorm(options.width, dtype=options.dtype, rngs=rngs)
        self.mlp = MLP(options, rngs)

    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        x = x + _dropout(self.options, self.attention(self.norm_attention(x), fold(key, 0)), fold(key, 1))
        return x + _dropout(self.options, self.mlp(self.norm_mlp(x)), fold(key, 2))


class Attention(nnx.Module):
    """Causal self-attention. x [batch, sequence, width] -> the same."""

    def __init__(self, options: GPTOptions, rngs: nnx.Rngs):
        self.options = options
        heads, dtype = (options.heads, options.head_size), options.dtype
        self.qkv = nnx.LinearGeneral(options.width, (3, *heads), kernel_init=_INIT, dtype=dtype, rngs=rngs)
        self.out = nnx.LinearGeneral(
            heads, options.width, axis=(-2, -1), kernel_init=_residual_init(options), dtype=dtype, rngs=rngs
        )

    @jax.named_scope("attention")
    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        q, k, v = jnp.unstack(self.qkv(x), axis=-3)  # each [batch, sequence, heads, head]
        if self.options.attention == "flash":
            return self.out(flash(q, k, v, self.options.head_size**-0.5, True))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q * self.options.head_size**-0.5, k).astype(jnp.float32)
        scores = jnp.where(causal_mask(x.shape[1]), scores, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores).astype(self.options.dtype)
        return self.out(jnp.einsum("bhqk,bkhd->bqhd", _dropout(self.options, weights, key), v))


class MLP(nnx.Module):
    """x [batch, sequence, width] -> the same, through 4 x width."""

    def __init__(self, options: GPTOptions, rngs: nnx.Rngs):
        width, dtype = options.width, options.dtype
        self.up = nnx.Linear(width, 4 * width, kernel_init=_INIT, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, kernel_init=_residual_init(options), dtype=dtype, rngs=rngs)

    @jax.named_scope("mlp")
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x)))


def _value_and_grad(model: GPT, batch: dict, key: jax.Array | None, count: int):
    graphdef, parameters = nnx.split(model, nnx.Param)

    def loss_of(parameters, batch, key):
        model = nnx.merge(graphdef, parameters)
        return cross_entropy(model(batch["tokens"], key), batch["targets"])

    return value_and_grad(loss_of, parameters, batch, count=count, key=key)


def _residual_init(options: GPTOptions):
    # GPT-2 section 2.3: what adds to the residual stream starts smaller the more layers add
    return nnx.initializers.normal(0.02 / math.sqrt(2 * options.layers))


def _dropout(options: GPTOptions, x: jax.Array, key: jax.Array | None) -> jax.Array:
    if key is None:
        return x
    kept = jax.random.bernoulli(key, 1 - options.dropout, x.shape)
    return jnp.where(kept, x / (1 - options.dropout), jnp.zeros_like(x))


if __name__ == "__main__":
    main(train_step, text_batches)
