"""A U-Net that learns to denoise, as in diffusion models (Ho et al. 2020, without attention), in flax linen."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from models import data
from models._arguments import Floats, make_batch, make_state
from models._options import COUNT, DTYPE, POSITIVE, SWITCH, Options, option, require, takes
from models._train import main

__all__ = ["UNet", "digit_batches", "train_step"]

_MAX_GROUPS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class UNetOptions(Options):
    """levels of resolution, each half the one above with twice its channels, and blocks on either side of each.
    dtype is computed in, parameters stay float32."""

    levels: int = option(3, COUNT)
    channels: int = option(16, COUNT)
    blocks: int = option(1, COUNT)
    image: int = option(16, COUNT)
    batch: int = option(16, COUNT)
    dtype: str = option("float32", DTYPE)
    remat: bool = option(False, SWITCH)
    learning_rate: float = option(2e-3, POSITIVE)

    def __post_init__(self):
        super().__post_init__()
        halvings = 2 ** (self.levels - 1)
        require(self.image % halvings == 0, f"image={self.image} is not divisible by {halvings}, as levels={self.levels} wants")
        require(self.channels % 2 == 0, f"channels={self.channels} is to be even, for sines and cosines")


@takes(UNetOptions)
def train_step(options: UNetOptions, *, concrete: bool = False, seed: int = 0):
    """(step, (state, batch)): `state` a TrainState, `batch` {"noisy", "noise" [batch, image, image, 1], "level" [batch]}.

    >>> step, (state, batch) = train_step(channels=8)
    >>> state.params["down_1_0"]["conv_in"]["kernel"].shape
    (3, 3, 16, 16)
    """
    model, optimizer = _static_parts(options)
    picture = (options.image, options.image, 1)

    def init(key):
        parameters = model.init(key, jnp.zeros((1, *picture)), jnp.zeros(1))["params"]
        # an array, not the int 0 of create: its type is then the same after every step
        return TrainState.create(apply_fn=model.apply, params=parameters, tx=optimizer).replace(step=jnp.zeros((), jnp.int32))

    def step(state, batch):
        def loss_of(params):
            predicted = state.apply_fn({"params": params}, batch["noisy"], batch["level"])
            return jnp.mean(jnp.square(predicted.astype(jnp.float32) - batch["noise"]))

        loss, gradients = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=gradients), loss

    pictures = Floats((options.batch, *picture))
    draws = {"noisy": pictures, "noise": pictures, "level": Floats((options.batch,))}
    state = make_state(init, concrete=concrete, seed=seed)
    return step, (state, make_batch(draws, concrete=concrete, seed=seed))


@takes(UNetOptions)
def digit_batches(options: UNetOptions, *, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches of digits under noise of a random level in [0, 1), for the factory called with the same options."""
    rng = np.random.default_rng(seed)
    for batch in data.digit_batches(image=options.image, batch=options.batch, seed=seed):
        noise = rng.standard_normal(batch["image"].shape, dtype=np.float32)
        level = rng.random(options.batch, dtype=np.float32)
        mix = level[:, None, None, None] * (np.pi / 2)
        noisy = np.cos(mix) * (2 * batch["image"] - 1) + np.sin(mix) * noise
        yield {"noisy": noisy.astype(np.float32), "noise": noise, "level": level}


class UNet(nn.Module):
    """noisy [batch, image, image, 1] and its level [batch] -> the noise, predicted. What goes down joins what comes up."""

    options: UNetOptions

    @nn.compact
    def __call__(self, x: jax.Array, level: jax.Array) -> jax.Array:
        """Convolutions with a stride go down, transposed ones up."""
        options = self.options
        block = nn.remat(Block) if options.remat else Block
        conv = _conv(options)
        widths = [options.channels * 2**i for i in range(options.levels)]
        embedded = Level(options, name="level")(level)
        x = conv(options.channels, (3, 3), name="stem")(x.astype(options.dtype))
        skips = []
        for i, width in enumerate(widths):
            x = conv(width, (3, 3), strides=2, name=f"halve_{i}")(x) if i else x
            for j in range(options.blocks):
                x = block(options, width, name=f"down_{i}_{j}")(x, embedded)
                skips.append(x)
        for i, width in reversed(list(enumerate(widths))):
            for j in range(options.blocks):
                x = block(options, width, name=f"up_{i}_{j}")(jnp.concatenate([x, skips.pop()], axis=-1), embedded)
            double = functools.partial(nn.ConvTranspose, kernel_size=(4, 4), strides=(2, 2), dtype=options.dtype)
            x = double(widths[i - 1], name=f"double_{i}")(x) if i else x
        x = nn.silu(_norm(options, x.shape[-1])(name="norm")(x))
        return conv(1, (3, 3), name="head")(x)


class Level(nn.Module):
    """The level of the noise [batch] -> an embedding [batch, 4 x channels], from sines and cosines of it."""

    options: UNetOptions

    @nn.compact
    def __call__(self, level: jax.Array) -> jax.Array:
        options = self.options
        frequencies = 2.0 ** jnp.arange(options.channels // 2, dtype=jnp.float32)
        angles = level[:, None] * jnp.minimum(frequencies, 1024.0)
        x = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1).astype(options.dtype)
        x = nn.silu(nn.Dense(4 * options.channels, dtype=options.dtype, name="up")(x))
        return nn.silu(nn.Dense(4 * options.channels, dtype=options.dtype, name="out")(x))


class Block(nn.Module):
    """x [batch, h, w, c] -> [batch, h, w, width]: two normalised 3x3 convolutions, the level between them, beside a shortcut."""

    options: UNetOptions
    width: int

    @nn.compact
    def __call__(self, x: jax.Array, embedded: jax.Array) -> jax.Array:
        options, conv = self.options, _conv(self.options)
        y = nn.silu(_norm(options, x.shape[-1])(name="norm_in")(x))
        y = conv(self.width, (3, 3), name="conv_in")(y)
        y = y + nn.Dense(self.width, dtype=options.dtype, name="level")(embedded)[:, None, None, :]
        y = nn.silu(_norm(options, self.width)(name="norm_out")(y))
        y = conv(self.width, (3, 3), name="conv_out")(y)
        return y + (x if x.shape == y.shape else conv(self.width, (1, 1), name="shortcut")(x))


def _conv(options: UNetOptions):
    return functools.partial(nn.Conv, dtype=options.dtype)


def _norm(options: UNetOptions, channels: int):
    groups = max(n for n in range(1, _MAX_GROUPS + 1) if channels % n == 0)
    return functools.partial(nn.GroupNorm, num_groups=groups, dtype=options.dtype)


@functools.cache
def _static_parts(options: UNetOptions) -> tuple[UNet, optax.GradientTransformation]:
    # a TrainState compares these by identity: made once, the states of two calls with equal options have equal trees
    return UNet(options), optax.adam(options.learning_rate)


if __name__ == "__main__":
    main(train_step, digit_batches)
