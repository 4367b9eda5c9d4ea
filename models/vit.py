"""A vision transformer (Dosovitskiy et al. 2021, pooled by the mean) in flax linen, with linen's own attention."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from models import data
from models._accumulate import value_and_grad
from models._arguments import Floats, Tokens, make_batch, make_state
from models._fused_attention import ATTENTION, check, flash
from models._options import (
    BOUNDARY,
    COUNT,
    COUNT_OR_NONE,
    DTYPE,
    FRACTION,
    POSITIVE,
    REMAT,
    REMAT_POLICIES,
    SWITCH,
    Options,
    option,
    require,
    takes,
)
from models._stack import bounded
from models._train import main
from models.losses import cross_entropy

__all__ = ["ViT", "digit_batches", "train_step"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTOptions(Options):
    """patch is the side of the squares that an image is cut into, inner the MLP's width (None: four times width).
    accumulate is the number of microbatches that a batch is taken in. dtype is computed in, parameters stay float32. attention is
    "xla" for plain ops, or "flash" for one kernel without the scores in memory."""

    layers: int = option(2, COUNT)
    width: int = option(64, COUNT)
    heads: int = option(8, COUNT)
    inner: int | None = option(None, COUNT_OR_NONE)
    image: int = option(32, COUNT)
    patch: int = option(8, COUNT)
    batch: int = option(16, COUNT)
    classes: int = option(16, COUNT)
    dtype: str = option("float32", DTYPE)
    scan: bool = option(False, SWITCH)
    remat: bool | str = option(False, REMAT)
    accumulate: int = option(1, COUNT)
    dropout: float = option(0.0, FRACTION)
    attention: str = option("xla", ATTENTION)
    learning_rate: float = option(1e-3, POSITIVE)
    boundary: tuple | None = option(None, BOUNDARY)

    def __post_init__(self):
        super().__post_init__()
        require(self.width % self.heads == 0, f"heads={self.heads} does not divide width={self.width}")
        require(self.batch % self.accumulate == 0, f"accumulate={self.accumulate} does not divide batch={self.batch}")
        require(self.image % self.patch == 0, f"patch={self.patch} does not divide image={self.image}")
        require(
            self.attention == "xla" or not self.dropout, f"attention={self.attention!r} has no dropout, dropout={self.dropout}"
        )
        check(self.attention, sequence=(self.image // self.patch) ** 2)


@takes(ViTOptions)
def train_step(options: ViTOptions, *, concrete: bool = False, seed: int = 0):
    """(step, (state, batch)): `state` a TrainState, `batch` {"image" [batch, image, image, 3], "label" [batch]}.

    >>> step, (state, batch) = train_step(layers=1)
    >>> state.params["block_0"]["attention"]["query"]["kernel"].shape
    (64, 8, 8)
    """
    model, optimizer = _static_parts(options)
    picture = (options.image, options.image, 3)

    def init(key):
        parameters = ViT(dataclasses.replace(options, boundary=None)).init(key, jnp.zeros((1, *picture)))["params"]
        # an array, not the int 0 of create: its type is then the same after every step
        return TrainState.create(apply_fn=model.apply, params=parameters, tx=optimizer).replace(step=jnp.zeros((), jnp.int32))

    def step(state, batch):
        key = jax.random.fold_in(jax.random.key(seed), state.step) if options.dropout else None

        def loss_of(params, batch, key):
            rngs = {} if key is None else {"dropout": key}
            return cross_entropy(state.apply_fn({"params": params}, batch["image"], train=True, rngs=rngs), batch["label"])

        loss, gradients = value_and_grad(loss_of, state.params, batch, count=options.accumulate, key=key)
        return state.apply_gradients(grads=gradients), loss

    draws = {"image": Floats((options.batch, *picture)), "label": Tokens((options.batch,), min(options.classes, 10))}
    state = make_state(init, concrete=concrete, seed=seed)
    return step, (state, make_batch(draws, concrete=concrete, seed=seed))


@takes(ViTOptions)
def digit_batches(options: ViTOptions, *, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches of digits, enlarged to the image size, for the factory called with the same options."""
    require(options.classes >= 10, f"classes={options.classes}: the digits have 10 classes")
    return data.digit_batches(image=options.image, channels=3, batch=options.batch, seed=seed)


class ViT(nn.Module):
    """images [batch, image, image, 3] -> logits [batch, classes]. With `scan`, the blocks' parameters are stacked."""

    options: ViTOptions

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """With `train`, dropout is on and takes its keys from the rngs' "dropout"."""
        options, side = self.options, self.options.patch
        patches = nn.Conv(options.width, (side, side), strides=side, padding="VALID", dtype=options.dtype, name="patches")
        x = patches(x.astype(options.dtype))
        x = x.reshape(x.shape[0], -1, options.width)
        position = self.param("position", nn.initializers.normal(0.02), x.shape[1:])
        x = nn.Dropout(options.dropout, deterministic=not train)(x + position.astype(options.dtype))
        x = _blocks(options, bounded(x, options.boundary), train)
        x = jnp.mean(nn.LayerNorm(dtype=options.dtype, name="norm")(x), axis=1)
        return nn.Dense(options.classes, dtype=options.dtype, name="head")(x)


class Block(nn.Module):
    """x [batch, patches, width] -> the same, after attention and MLP, each on its normalised residual."""

    options: ViTOptions
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        """The second argument and result are what nn.scan wants of its body."""
        options = self.options
        drop = functools.partial(nn.Dropout, options.dropout, deterministic=not self.train)
        norm = functools.partial(nn.LayerNorm, dtype=options.dtype)
        dense = functools.partial(nn.Dense, dtype=options.dtype)
        attention = nn.MultiHeadDotProductAttention(
            options.heads,
            dtype=options.dtype,
            dropout_rate=options.dropout,
            deterministic=not self.train,
            broadcast_dropout=False,
            attention_fn=_flash if options.attention == "flash" else nn.dot_product_attention,
            name="attention",
        )
        x = x + drop()(attention(norm(name="norm_attention")(x)))
        y = nn.gelu(dense(options.inner or 4 * options.width, name="up")(norm(name="norm_mlp")(x)))
        return bounded(x + drop()(dense(options.width, name="down")(y)), options.boundary), None


def _flash(query: jax.Array, key: jax.Array, value: jax.Array, **_: Any) -> jax.Array:
    """Each patch reads all others: linen gives a mask and dropout too, which this model has not."""
    return flash(query, key, value, query.shape[-1] ** -0.5, False)


def _blocks(options: ViTOptions, x: jax.Array, train: bool) -> jax.Array:
    # inside a scan there is no later copy of the forward pass for XLA to merge with
    keep = REMAT_POLICIES.get(options.remat)
    block = nn.remat(Block, prevent_cse=not options.scan, policy=keep) if options.remat else Block
    if not options.scan:
        for layer in range(options.layers):
            x, _ = block(options, train, name=f"block_{layer}")(x)
        return x
    stacked = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=options.layers)
    return stacked(options, train, name="blocks")(x, None)[0]


@functools.cache
def _static_parts(options: ViTOptions) -> tuple[ViT, optax.GradientTransformation]:
    # a TrainState compares these by identity: made once, the states of two calls with equal options have equal trees
    return ViT(options), optax.adamw(options.learning_rate)


if __name__ == "__main__":
    main(train_step, digit_batches)
