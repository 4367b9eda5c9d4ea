"""Llama 3 in flax nnx: RMSNorm, rotary positions, grouped-query attention, SwiGLU; trained by AdamW."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from models import data
from models._accumulate import value_and_grad
from models._arguments import Tokens, make_batch, make_state
from models._attention import attend, attend_blockwise, attend_in_kernel
from models._fused_attention import ATTENTION, check
from models._options import (
    BOUNDARY,
    COUNT,
    COUNT_OR_NONE,
    DTYPE,
    POSITIVE,
    REMAT,
    SWITCH,
    Options,
    one_of,
    option,
    require,
    takes,
)
from models._stack import make_blocks, run_blocks
from models._train import main
from models.losses import cross_entropy

__all__ = ["Attention", "DecoderOptions", "Llama", "text_batches", "train_step"]

_INIT = nnx.initializers.normal(0.02)
_ROPE_BASE = 500_000.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderOptions(Options):
    """A size names the shapes; each may be given in its place. key_heads are the heads of keys and values, each read by
    heads / key_heads of the queries; inner is the MLP's width. dtype is computed in, parameters stay float32. With a block,
    attention is computed so many queries and keys at a time: its memory then grows with the sequence, not with its square.
    attention is "xla" for plain ops, or "flash" for one kernel that does so by itself. accumulate is the number of microbatches
    that a batch is taken in."""

    sizes: ClassVar[dict[str, dict[str, int]]]

    layers: int = option(None, COUNT_OR_NONE)
    width: int = option(None, COUNT_OR_NONE)
    heads: int = option(None, COUNT_OR_NONE)
    key_heads: int = option(None, COUNT_OR_NONE)
    inner: int = option(None, COUNT_OR_NONE)
    vocabulary: int = option(None, COUNT_OR_NONE)
    sequence: int = option(32, COUNT)
    batch: int = option(16, COUNT)
    dtype: str = option("float32", DTYPE)
    scan: bool = option(False, SWITCH)
    remat: bool | str = option(False, REMAT)
    accumulate: int = option(1, COUNT)
    block: int = option(None, COUNT_OR_NONE)
    attention: str = option("xla", ATTENTION)
    learning_rate: float = option(1e-3, POSITIVE)
    boundary: tuple | None = option(None, BOUNDARY)
    size: str = option("tiny", one_of("tiny"))

    def __post_init__(self):
        super().__post_init__()
        for name, value in self.sizes[self.size].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        require(self.width % self.heads == 0, f"heads={self.heads} does not divide width={self.width}")
        require(self.batch % self.accumulate == 0, f"accumulate={self.accumulate} does not divide batch={self.batch}")
        require(self.heads % self.key_heads == 0, f"key_heads={self.key_heads} does not divide heads={self.heads}")
        require(
            self.block is None or self.sequence % self.block == 0, f"block={self.block} does not divide sequence={self.sequence}"
        )
        check(self.attention, sequence=self.sequence)
        require(self.attention == "xla" or self.block is None, f"block={self.block}: attention={self.attention!r} has its own")
        require(
            self.head_size % 2 == 0, f"heads={self.heads}: width / heads = {self.head_size} is to be even, for rotary positions"
        )

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.width // self.heads

    @property
    def draws(self) -> dict[str, Tokens]:
        """The batch: tokens, and the targets that follow them."""
        tokens = Tokens((self.batch, self.sequence), self.vocabulary)
        return {"tokens": tokens, "targets": tokens}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaOptions(DecoderOptions):
    """Sizes 8b, 70b and 405b are those of Llama 3."""

    sizes: ClassVar = {
        "tiny": {"layers": 2, "width": 64, "heads": 16, "key_heads": 8, "inner": 192, "vocabulary": 256},
        "8b": {"layers": 32, "width": 4096, "heads": 32, "key_heads": 8, "inner": 14336, "vocabulary": 128256},
        "70b": {"layers": 80, "width": 8192, "heads": 64, "key_heads": 8, "inner": 28672, "vocabulary": 128256},
        "405b": {"layers": 126, "width": 16384, "heads": 128, "key_heads": 8, "inner": 53248, "vocabulary": 128256},
    }
    size: str = option("tiny", one_of(*sizes))


@takes(LlamaOptions)
def train_step(options: LlamaOptions, *, concrete: bool = False, seed: int = 0):
    """(step, (state, batch)): `state` is that of (model, optimizer), `batch` {"tokens", "targets"}, int32 [batch, sequence].

    >>> step, (state, batch) = train_step(size="70b", scan=True)
    >>> state[0]["blocks"]["attention"]["query"]["kernel"].shape
    (80, 8192, 8, 8, 128)
    """

    def init(key):
        model = Llama(options, key)
        return nnx.split((model, nnx.Optimizer(model, optax.adamw(options.learning_rate), wrt=nnx.Param)))

    def step(state, batch):
        model, optimizer = nnx.merge(graphdef, state)
        structure, parameters = nnx.split(model, nnx.Param)

        def loss_of(parameters, batch, _):
            model = nnx.merge(structure, parameters)
            return cross_entropy(model(batch["tokens"]), batch["targets"])

        loss, gradients = value_and_grad(loss_of, parameters, batch, count=options.accumulate)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    graphdef, state = make_state(init, concrete=concrete, seed=seed)
    return step, (state, make_batch(options.draws, concrete=concrete, seed=seed))


@takes(LlamaOptions)
def text_batches(options: LlamaOptions, *, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches of source text for the factory called with the same options."""
    return data.char_batches(sequence=options.sequence, batch=options.batch, seed=seed, vocabulary=options.vocabulary)


class Llama(nnx.Module):
    """tokens [batch, sequence] -> logits [batch, sequence, vocabulary]. With `scan`, the blocks' parameters are stacked."""

    def __init__(self, options: LlamaOptions, key: jax.Array):
        self.options = options
        rngs = nnx.Rngs(jax.random.fold_in(key, options.layers))
        self.embedding = nnx.Embed(options.vocabulary, options.width, embedding_init=_INIT, dtype=options.dtype, rngs=rngs)
        make = functools.partial(Block, options)
        self.blocks = make_blocks(make, key, layers=options.layers, scan=options.scan)
        self.norm = nnx.RMSNorm(options.width, dtype=options.dtype, rngs=rngs)
        self.head = dense(options, options.width, options.vocabulary, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Positions enter in the attention alone."""
        x = run_blocks(
            self.blocks, self.embedding(tokens), scan=self.options.scan, remat=self.options.remat, boundary=self.options.boundary
        )
        with jax.named_scope("head"):
            return self.head(self.norm(x))


class Block(nnx.Module):
    """x [batch, sequence, width] -> the same, after attention and MLP, each on its normalised residual."""

    def __init__(self, options: LlamaOptions, rngs: nnx.Rngs):
        self.norm_attention = nnx.RMSNorm(options.width, dtype=options.dtype, rngs=rngs)
        self.attention = Attention(options, rngs)
        self.norm_mlp = nnx.RMSNorm(options.width, dtype=options.dtype, rngs=rngs)
        self.mlp = MLP(options, rngs)

    def __call__(self, x: jax.Array, _: None = None) -> jax.Array:
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class Attention(nnx.Module):
    """Causal self-attention, each head of the keys read by a group of the queries'. x [batch, sequence, width] -> the same."""

    def __init__(self, options: DecoderOptions, rngs: nnx.Rngs):
        self.options = options
        groups = (options.key_heads, options.heads // options.key_heads, options.head_size)
        self.query = dense(options, options.width, groups, rngs)
        self.key = dense(options, options.width, (options.key_heads, options.head_size), rngs)
        self.value = dense(options, options.width, (options.key_heads, options.head_size), rngs)
        self.out = dense(options, groups, options.width, rngs)

    @jax.named_scope("attention")
    def __call__(self, x: jax.Array) -> jax.Array:
        """Scores and softmax are float32 whatever is computed in."""
        q, k, v = self.query(x), self.key(x), self.value(x)  # [b, s, k, g, h], [b, s, k, h], [b, s, k, h]
        q, k = rotate(q) * self.options.head_size**-0.5, rotate(k)
        block = self.options.block
        if self.options.attention == "flash":
            return self.out(attend_in_kernel(q, k, v))
        return self.out(attend(q, k, v) if block is None else attend_blockwise(q, k, v, block=block))


class MLP(nnx.Module):
    """SwiGLU. x [batch, sequence, width] -> the same."""

    def __init__(self, options: LlamaOptions, rngs: nnx.Rngs):
        self.gate = dense(options, options.width, options.inner, rngs)
        self.up = dense(options, options.width, options.inner, rngs)
        self.down = dense(options, options.inner, options.width, rngs)

    @jax.named_scope("mlp")
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions (Su et al. 2021): dims i and i + head / 2 turned by position x base^(-2i / head). [b, s, ..., head]"""
    half = x.shape[-1] // 2
    frequencies = _ROPE_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequencies
    angles = angles.reshape(x.shape[1], *[1] * (x.ndim - 3), half)
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def dense(options: DecoderOptions, into: Any, out: Any, rngs: nnx.Rngs) -> nnx.LinearGeneral:
    """A projection without bias from the last dims, of sizes `into`, to `out`."""
    axis = tuple(range(-len(into), 0)) if isinstance(into, tuple) else -1
    return nnx.LinearGeneral(into, out, axis=axis, use_bias=False, kernel_init=_INIT, dtype=options.dtype, rngs=rngs)


if __name__ == "__main__":
    main(train_step, text_batches)
