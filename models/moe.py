"""A mixture of experts in the shapes of Mixtral, in flax nnx: Llama's attention, and an MLP of experts for each token.

Tokens reach their experts by one-hot einsums into buffers of fixed capacity (GShard, section 2.2), so that splitting the
experts over devices turns the two einsums into all-to-alls.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from models import data
from models._accumulate import value_and_grad
from models._arguments import make_batch, make_state
from models._options import BOUNDARY, COUNT, POSITIVE, one_of, option, require, takes
from models._stack import make_blocks, run_blocks
from models._train import main
from models.llama import Attention, DecoderOptions, dense
from models.losses import cross_entropy

__all__ = ["MoE", "text_batches", "train_step"]

_INIT = nnx.initializers.normal(0.02)
_BALANCE_WEIGHT = 1e-2


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEOptions(DecoderOptions):
    """Each token takes its `top` of `experts`, each expert at most `capacity` times its even share of a sequence; a token
    beyond that passes by the residual alone. `dispatched` says where the tokens lie that experts take, [expert, batch, slot,
    width]. Size 8x7b is that of Mixtral."""

    sizes: ClassVar = {
        "tiny": {"layers": 2, "width": 64, "heads": 16, "key_heads": 8, "inner": 128, "vocabulary": 256},
        "8x7b": {"layers": 32, "width": 4096, "heads": 32, "key_heads": 8, "inner": 14336, "vocabulary": 32000},
    }
    size: str = option("tiny", one_of(*sizes))
    experts: int = option(8, COUNT)
    top: int = option(2, COUNT)
    capacity: float = option(2.0, POSITIVE)
    dispatched: tuple | None = option(None, BOUNDARY)

    def __post_init__(self):
        super().__post_init__()
        require(self.top <= self.experts, f"top={self.top} is more than experts={self.experts}")

    @property
    def slots(self) -> int:
        """Tokens of one sequence that an expert takes."""
        return min(self.sequence, math.ceil(self.capacity * self.top * self.sequence / self.experts))


@takes(MoEOptions)
def train_step(options: MoEOptions, *, concrete: bool = False, seed: int = 0):
    """(step, (state, batch)): `state` is that of (model, optimizer), `batch` {"tokens", "targets"}, int32 [batch, sequence].

    >>> step, (state, batch) = train_step(layers=1)
    >>> state[0]["blocks"][0]["moe"]["up"].shape
    (8, 64, 128)
    """

    def init(key):
        model = MoE(options, key)
        return nnx.split((model, nnx.Optimizer(model, optax.adamw(options.learning_rate), wrt=nnx.Param)))

    def step(state, batch):
        model, optimizer = nnx.merge(graphdef, state)
        structure, parameters = nnx.split(model, nnx.Param)

        def loss_of(parameters, batch, _):
            model = nnx.merge(structure, parameters)
            logits, imbalance = model(batch["tokens"])
            return cross_entropy(logits, batch["targets"]) + _BALANCE_WEIGHT * imbalance

        loss, gradients = value_and_grad(loss_of, parameters, batch, count=options.accumulate)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    graphdef, state = make_state(init, concrete=concrete, seed=seed)
    return step, (state, make_batch(options.draws, concrete=concrete, seed=seed))


@takes(MoEOptions)
def text_batches(options: MoEOptions, *, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches of source text for the factory called with the same options."""
    return data.char_batches(sequence=options.sequence, batch=options.batch, seed=seed, vocabulary=options.vocabulary)


class MoE(nnx.Module):
    """tokens [batch, sequence] -> logits [batch, sequence, vocabulary] and the mean imbalance of a layer's experts."""

    def __init__(self, options: MoEOptions, key: jax.Array):
        self.options = options
        rngs = nnx.Rngs(jax.random.fold_in(key, options.layers))
        self.embedding = nnx.Embed(options.vocabulary, options.width, embedding_init=_INIT, dtype=options.dtype, rngs=rngs)
        make = functools.partial(Block, options)
        self.blocks = make_blocks(make, key, layers=options.layers, scan=options.scan)
        self.norm = nnx.RMSNorm(options.width, dtype=options.dtype, rngs=rngs)
        self.head = dense(options, options.width, options.vocabulary, rngs)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The imbalance is carried through the blocks beside the residual."""
        start = self.embedding(tokens), jnp.zeros(())
        x, imbalance = run_blocks(
            self.blocks, start, scan=self.options.scan, remat=self.options.remat, boundary=self.options.boundary
        )
        with jax.named_scope("head"):
            return self.head(self.norm(x)), imbalance / self.options.layers


class Block(nnx.Module):
    """(x [batch, sequence, width], imbalance so far) -> the same, after attention and experts."""

    def __init__(self, options: MoEOptions, rngs: nnx.Rngs):
        self.norm_attention = nnx.RMSNorm(options.width, dtype=options.dtype, rngs=rngs)
        self.attention = Attention(options, rngs)
        self.norm_moe = nnx.RMSNorm(options.width, dtype=options.dtype, rngs=rngs)
        self.moe = Experts(options, rngs)

    def __call__(self, carry: tuple[jax.Array, jax.Array], _: None = None) -> tuple[jax.Array, jax.Array]:
        x, imbalance = carry
        x = x + self.attention(self.norm_attention(x))
        y, more = self.moe(self.norm_moe(x))
        return x + y, imbalance + more


class Experts(nnx.Module):
    """SwiGLU experts, kernels [expert, in, out]. x [batch, sequence, width] -> the same, and the imbalance, 1 at best."""

    def __init__(self, options: MoEOptions, rngs: nnx.Rngs):
        self.options = options
        into, out = (options.experts, options.width, options.inner), (options.experts, options.inner, options.width)
        self.router = nnx.Linear(options.width, options.experts, use_bias=False, kernel_init=_INIT, rngs=rngs)
        self.gate, self.up = nnx.Param(_INIT(rngs.params(), into)), nnx.Param(_INIT(rngs.params(), into))
        self.down = nnx.Param(_INIT(rngs.params(), out))

    @jax.named_scope("experts")
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        gate, up, down = (kernel[...].astype(self.options.dtype) for kernel in (self.gate, self.up, self.down))
        dispatch, combine, imbalance = route(self.router(x.astype(jnp.float32)), self.options.top, self.options.slots)
        inputs = self._placed(jnp.einsum("bsec,bsw->ebcw", dispatch.astype(x.dtype), x))
        hidden = jax.nn.silu(jnp.einsum("ebcw,ewi->ebci", inputs, gate)) * jnp.einsum("ebcw,ewi->ebci", inputs, up)
        outputs = self._placed(jnp.einsum("ebci,eiw->ebcw", hidden, down))
        return jnp.einsum("bsec,ebcw->bsw", combine.astype(x.dtype), outputs), imbalance

    def _placed(self, x: jax.Array) -> jax.Array:
        at = self.options.dispatched
        return x if at is None else jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec(*at))


def route(logits: jax.Array, top: int, slots: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Which slot of which expert each token fills, and with what weight its result counts.

    logits [batch, sequence, expert] float32 -> dispatch, combine [batch, sequence, expert, slot], and the imbalance of
    Switch Transformer's equation 4. Slots fill in the order of the tokens, all first choices before the second ones.
    """
    probabilities = jax.nn.softmax(logits)
    batch, sequence, experts = logits.shape
    _, choices = jax.lax.top_k(jax.lax.stop_gradient(logits), top)  # [b, s, k]
    chosen = jax.nn.one_hot(choices, experts, axis=-1)  # [b, s, k, e]
    in_order = jnp.moveaxis(chosen, 2, 1).reshape(batch, top * sequence, experts)
    earlier = jnp.cumsum(in_order, axis=1) - in_order
    slot = jnp.moveaxis(earlier.reshape(batch, top, sequence, experts), 1, 2)
    # a slot beyond the last has no one-hot: that token is dropped
    filled = chosen[..., None] * jax.nn.one_hot(slot.astype(jnp.int32), slots)  # [b, s, k, e, c]
    dispatch = jnp.sum(filled, axis=2)
    weights = probabilities * jnp.sum(chosen, axis=2)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    share = jnp.mean(chosen[:, :, 0], axis=(0, 1))
    imbalance = experts * jnp.sum(share * jnp.mean(probabilities, axis=(0, 1)))
    return dispatch, dispatch * weights[..., None], imbalance


if __name__ == "__main__":
    main(train_step, text_batches)
