"""Inception-v3 (Szegedy et al. 2016) in flax linen: modules of parallel branches that are concatenated, batch norm everywhere.

Without the auxiliary head. That of FlexFlow's section 8 (Jia, Zaharia and Aiken 2018):
`train_step(channels=32, blocks=(3, 4, 2), image=299, classes=1000, batch=64 * devices)`.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from models._classifier import classifier_step, digits_for
from models._optax_step import OPTIMIZER, make_optimizer
from models._options import COUNT, DTYPE, POSITIVE, Options, Rule, one_of, option, require, takes
from models._train import main

__all__ = ["Inception", "digit_batches", "train_step"]

_LEAST_IMAGE = 75
"""The last pool of a smaller one would have no output."""
_FULL_CHANNELS = 32
"""Channels of the first convolution in the paper, to which all others in this file relate."""
_POOLED = (32, 64, 64)
"""Channels behind the pool of each module of 5x5 convolutions; more modules have those of the last."""
_SEVENS = (128, 160, 160, 192)
"""Channels between the 7x7 convolutions of each module of them; more modules have those of the last."""

_MODULES = Rule(
    "a tuple of three positive integers, modules of each kind",
    lambda v: isinstance(v, (tuple, list)) and len(v) == 3 and all(COUNT.holds(n) for n in v),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InceptionOptions(Options):
    """channels are those of the first convolution, and all others in proportion. blocks are the numbers of modules with 5x5,
    with 7x7 and with split 3x3 convolutions. A silu has no kink: of a million relus, one may be so near it that the order of
    a sum decides its gradient. dtype is computed in, parameters and batch statistics stay float32."""

    channels: int = option(4, COUNT)
    blocks: tuple[int, ...] = option((1, 1, 1), _MODULES)
    image: int = option(75, COUNT)
    batch: int = option(16, COUNT)
    classes: int = option(16, COUNT)
    activation: str = option("relu", one_of("relu", "silu"))
    dtype: str = option("float32", DTYPE)
    optimizer: str = option("sgd", OPTIMIZER)
    learning_rate: float = option(1e-2, POSITIVE)

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "blocks", tuple(self.blocks))
        require(self.channels % 2 == 0, f"channels={self.channels} is to be even, for widths that are multiples of a half")
        require(self.image >= _LEAST_IMAGE, f"image={self.image} is too small for its pools: {_LEAST_IMAGE} is the least")


@takes(InceptionOptions)
def train_step(options: InceptionOptions, *, concrete: bool = False, seed: int = 0):
    """(step, (state, batch)): `state` a TrainState with batch_stats, `batch` {"image" [batch, image, image, 3], "label" [batch]}.

    >>> step, (state, batch) = train_step()
    >>> sorted(state.params["fives_0"])
    ['five', 'five_in', 'one', 'pooled', 'three_in', 'three_mid', 'three_out']
    """
    model, optimizer = _static_parts(options)
    picture = (options.batch, options.image, options.image, 3)
    return classifier_step(model, optimizer, image=picture, classes=options.classes, concrete=concrete, seed=seed)


@takes(InceptionOptions)
def digit_batches(options: InceptionOptions, *, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches of digits, enlarged to the image size, for the factory called with the same options."""
    return digits_for(image=options.image, channels=3, batch=options.batch, classes=options.classes, seed=seed)


class Inception(nn.Module):
    """images [batch, image, image, 3] -> logits [batch, classes]. Table 1 of the paper."""

    options: InceptionOptions

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Statistics are those of the whole batch, also where it is split over devices."""
        options = self.options
        fives, sevens, splits = options.blocks
        x = Stem(options, name="stem")(x.astype(options.dtype))
        for number in range(fives):
            x = Fives(options, _POOLED[min(number, len(_POOLED) - 1)], name=f"fives_{number}")(x)
        x = ReduceToSevens(options, name="reduce_to_sevens")(x)
        for number in range(sevens):
            x = Sevens(options, _SEVENS[min(number, len(_SEVENS) - 1)], name=f"sevens_{number}")(x)
        x = ReduceToSplits(options, name="reduce_to_splits")(x)
        for number in range(splits):
            x = Splits(options, name=f"splits_{number}")(x)
        x = jnp.mean(x, axis=(1, 2))
        return nn.Dense(options.classes, dtype=options.dtype, name="head")(x)


class Conv(nn.Module):
    """x [batch, h, w, c] -> [batch, h', w', width]: convolution, batch norm, activation. width is that of the paper."""

    options: InceptionOptions
    width: int
    kernel: tuple[int, int]
    strides: int = 1
    padding: str = "SAME"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        options = self.options
        features = self.width * options.channels // _FULL_CHANNELS
        init = nn.initializers.variance_scaling(2.0, "fan_in", "normal")
        conv = nn.Conv(features, self.kernel, self.strides, self.padding, use_bias=False, kernel_init=init, dtype=options.dtype)
        x = nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=options.dtype)(conv(x))
        return {"relu": nn.relu, "silu": nn.silu}[options.activation](x)


class Stem(nn.Module):
    """images [batch, h, w, 3] -> [batch, h / 8, w / 8, 192]: five convolutions and two pools."""

    options: InceptionOptions

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(Conv, self.options)
        x = conv(32, (3, 3), 2, "VALID", name="halve")(x)
        x = conv(32, (3, 3), padding="VALID", name="three")(x)
        x = _reduce(conv(64, (3, 3), name="three_wide")(x))
        x = conv(80, (1, 1), name="one")(x)
        return _reduce(conv(192, (3, 3), padding="VALID", name="out")(x))


class Fives(nn.Module):
    """x [batch, h, w, c] -> [batch, h, w, 224 + pooled]: branches of 1x1, of 5x5, of two 3x3 and of a pool (Figure 5)."""

    options: InceptionOptions
    pooled: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(Conv, self.options)
        one = conv(64, (1, 1), name="one")(x)
        five = conv(64, (5, 5), name="five")(conv(48, (1, 1), name="five_in")(x))
        three = conv(96, (3, 3), name="three_mid")(conv(64, (1, 1), name="three_in")(x))
        three = conv(96, (3, 3), name="three_out")(three)
        pooled = conv(self.pooled, (1, 1), name="pooled")(_mean(x))
        return jnp.concatenate([one, five, three, pooled], axis=-1)


class ReduceToSevens(nn.Module):
    """x [batch, h, w, c] -> [batch, h / 2, w / 2, 480 + c]: branches of 3x3, of two 3x3 and of a pool (Figure 10)."""

    options: InceptionOptions

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(Conv, self.options)
        one = conv(384, (3, 3), 2, "VALID", name="one")(x)
        two = conv(96, (3, 3), name="two_mid")(conv(64, (1, 1), name="two_in")(x))
        two = conv(96, (3, 3), 2, "VALID", name="two_out")(two)
        return jnp.concatenate([one, two, _reduce(x)], axis=-1)


class Sevens(nn.Module):
    """x [batch, h, w, c] -> [batch, h, w, 768]: branches of 1x1, of 7x7 in factors once and twice, and of a pool (Figure 6)."""

    options: InceptionOptions
    between: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv, between = functools.partial(Conv, self.options), self.between
        one = conv(192, (1, 1), name="one")(x)
        once = conv(between, (1, 7), name="once_across")(conv(between, (1, 1), name="once_in")(x))
        once = conv(192, (7, 1), name="once_down")(once)
        twice = conv(between, (7, 1), name="twice_down_0")(conv(between, (1, 1), name="twice_in")(x))
        twice = conv(between, (1, 7), name="twice_across_0")(twice)
        twice = conv(between, (7, 1), name="twice_down_1")(twice)
        twice = conv(192, (1, 7), name="twice_across_1")(twice)
        pooled = conv(192, (1, 1), name="pooled")(_mean(x))
        return jnp.concatenate([one, once, twice, pooled], axis=-1)


class ReduceToSplits(nn.Module):
    """x [batch, h, w, c] -> [batch, h / 2, w / 2, 512 + c]: branches of 3x3, of 7x7 in factors with 3x3, and of a pool."""

    options: InceptionOptions

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(Conv, self.options)
        three = conv(320, (3, 3), 2, "VALID", name="three")(conv(192, (1, 1), name="three_in")(x))
        seven = conv(192, (1, 7), name="seven_across")(conv(192, (1, 1), name="seven_in")(x))
        seven = conv(192, (7, 1), name="seven_down")(seven)
        seven = conv(192, (3, 3), 2, "VALID", name="seven_out")(seven)
        return jnp.concatenate([three, seven, _reduce(x)], axis=-1)


class Splits(nn.Module):
    """x [batch, h, w, c] -> [batch, h, w, 2048]: branches of 1x1, of 3x3 that split in two, and of a pool (Figure 7)."""

    options: InceptionOptions

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(Conv, self.options)
        one = conv(320, (1, 1), name="one")(x)
        once = conv(384, (1, 1), name="once_in")(x)
        once = [conv(384, (1, 3), name="once_across")(once), conv(384, (3, 1), name="once_down")(once)]
        twice = conv(384, (3, 3), name="twice_mid")(conv(448, (1, 1), name="twice_in")(x))
        twice = [conv(384, (1, 3), name="twice_across")(twice), conv(384, (3, 1), name="twice_down")(twice)]
        pooled = conv(192, (1, 1), name="pooled")(_mean(x))
        return jnp.concatenate([one, *once, *twice, pooled], axis=-1)


def _reduce(x: jax.Array) -> jax.Array:
    return nn.max_pool(x, (3, 3), strides=(2, 2))


def _mean(x: jax.Array) -> jax.Array:
    return nn.avg_pool(x, (3, 3), padding="SAME")


@functools.cache
def _static_parts(options: InceptionOptions) -> tuple[Inception, optax.GradientTransformation]:
    # a TrainState compares these by identity: made once, the states of two calls with equal options have equal trees
    return Inception(options), make_optimizer(options.optimizer, options.learning_rate)


if __name__ == "__main__":
    main(train_step, digit_batches)
