"""Wide ResNet (bottleneck blocks, batch norm) in flax linen: ResNet-50, 101 or 152 with every convolution `width` times wider.

He et al. 2016 for the blocks, with the stride on the 3x3; widened as in Zagoruyko and Komodakis 2016; Tofu's section 7 benchmark.
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
from models._options import COUNT, DTYPE, POSITIVE, SWITCH, Options, Rule, one_of, option, takes
from models._train import main

__all__ = ["WResNet", "digit_batches", "train_step"]

BLOCKS = {14: (1, 1, 1, 1), 26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}

STAGES = Rule(
    "a tuple of positive integers, blocks of each stage, or None",
    lambda v: v is None or (isinstance(v, (tuple, list)) and len(v) > 0 and all(COUNT.holds(n) for n in v)),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WResNetOptions(Options):
    """width is the widening factor, channels those of the first convolution before widening. blocks, a count for each
    stage, overrides depth. middle widens the 3x3 convolutions alone. A silu has no kink: of a million relus, one may be so near
    it that the order of a sum decides its gradient. dtype is computed in, parameters and batch statistics stay float32."""

    depth: int = option(14, one_of(*BLOCKS))
    width: int = option(1, COUNT)
    image: int = option(32, COUNT)
    batch: int = option(16, COUNT)
    blocks: tuple[int, ...] | None = option(None, STAGES)
    channels: int = option(64, COUNT)
    middle: int = option(1, COUNT)
    classes: int = option(16, COUNT)
    activation: str = option("relu", one_of("relu", "silu"))
    dtype: str = option("float32", DTYPE)
    remat: bool = option(False, SWITCH)
    optimizer: str = option("sgd", OPTIMIZER)
    learning_rate: float = option(3e-3, POSITIVE)

    def __post_init__(self):
        super().__post_init__()
        if self.blocks is not None:
            object.__setattr__(self, "blocks", tuple(self.blocks))

    @property
    def stages(self) -> tuple[int, ...]:
        return BLOCKS[self.depth] if self.blocks is None else self.blocks


@takes(WResNetOptions)
def train_step(options: WResNetOptions, *, concrete: bool = False, seed: int = 0):
    """(step, (state, batch)): `state` a TrainState with batch_stats, `batch` {"image" [batch, image, image, 3], "label" [batch]}.

    >>> step, (state, batch) = train_step(width=2)
    >>> state.params["stem"]["kernel"].shape
    (7, 7, 3, 128)
    """
    model, optimizer = _static_parts(options)
    picture = (options.batch, options.image, options.image, 3)
    return classifier_step(model, optimizer, image=picture, classes=options.classes, concrete=concrete, seed=seed)


@takes(WResNetOptions)
def digit_batches(options: WResNetOptions, *, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches of digits, enlarged to the image size, for the factory called with the same options."""
    return digits_for(image=options.image, channels=3, batch=options.batch, classes=options.classes, seed=seed)


class WResNet(nn.Module):
    """images [batch, image, image, 3] -> logits [batch, classes]. Each stage but the first halves the image."""

    options: WResNetOptions

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Statistics are those of the whole batch, also where it is split over devices."""
        options = self.options
        channels = options.channels * options.width
        x = x.astype(options.dtype)
        x = _conv(options)(channels, (7, 7), strides=2, name="stem")(x)
        x = _activate(options)(_norm(options)(name="stem_norm")(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        block = nn.remat(Bottleneck) if options.remat else Bottleneck
        for stage, count in enumerate(options.stages):
            for number in range(count):
                stride = 2 if stage > 0 and number == 0 else 1
                x = block(options, channels * 2**stage, stride, name=f"stage_{stage}_block_{number}")(x)
        x = jnp.mean(x, axis=(1, 2))
        return nn.Dense(options.classes, dtype=options.dtype, name="head")(x)


class Bottleneck(nn.Module):
    """x [batch, h, w, c] -> [batch, h / stride, w / stride, 4 x channels]: 1x1, 3x3 and 1x1 convolutions beside a shortcut."""

    options: WResNetOptions
    channels: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv, norm, activate = _conv(self.options), _norm(self.options), _activate(self.options)
        y = activate(norm(name="norm_in")(conv(self.channels, (1, 1), name="conv_in")(x)))
        y = activate(
            norm(name="norm_mid")(conv(self.options.middle * self.channels, (3, 3), strides=self.stride, name="conv_mid")(y))
        )
        y = norm(name="norm_out")(conv(4 * self.channels, (1, 1), name="conv_out")(y))
        if x.shape != y.shape:
            x = norm(name="norm_shortcut")(conv(4 * self.channels, (1, 1), strides=self.stride, name="shortcut")(x))
        return activate(x + y)


def _conv(options: WResNetOptions):
    init = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
    return functools.partial(nn.Conv, use_bias=False, kernel_init=init, dtype=options.dtype)


def _activate(options: WResNetOptions):
    return {"relu": nn.relu, "silu": nn.silu}[options.activation]


def _norm(options: WResNetOptions):
    return functools.partial(nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=options.dtype)


@functools.cache
def _static_parts(options: WResNetOptions) -> tuple[WResNet, optax.GradientTransformation]:
    # a TrainState compares these by identity: made once, the states of two calls with equal options have equal trees
    return WResNet(options), make_optimizer(options.optimizer, options.learning_rate)


if __name__ == "__main__":
    main(train_step, digit_batches)
