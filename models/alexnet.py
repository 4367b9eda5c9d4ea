"""AlexNet in flax linen: five convolutions, three pools and three dense layers.

Krizhevsky et al. 2012, in one column and without response normalisation (Krizhevsky 2014), as FlexFlow's section 8 has it
(Jia, Zaharia and Aiken 2018): `train_step(channels=64, dense=4096, image=224, classes=1000, batch=256 * devices)`.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import numpy as np
import optax
from flax import linen as nn

from models._classifier import classifier_step, digits_for
from models._optax_step import OPTIMIZER, make_optimizer
from models._options import COUNT, DTYPE, FRACTION, POSITIVE, Options, option, require, takes
from models._train import main

__all__ = ["AlexNet", "digit_batches", "train_step"]

_LEAST_IMAGE = 63
"""The last pool of a smaller one would have no output."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlexNetOptions(Options):
    """channels are those of the first convolution, dense the width of the first two dense layers. dtype is computed in,
    parameters stay float32."""

    channels: int = option(16, COUNT)
    dense: int = option(128, COUNT)
    image: int = option(64, COUNT)
    batch: int = option(16, COUNT)
    classes: int = option(16, COUNT)
    dropout: float = option(0.0, FRACTION)
    dtype: str = option("float32", DTYPE)
    optimizer: str = option("sgd", OPTIMIZER)
    learning_rate: float = option(1e-2, POSITIVE)

    def __post_init__(self):
        super().__post_init__()
        require(self.image >= _LEAST_IMAGE, f"image={self.image} is too small for three pools: {_LEAST_IMAGE} is the least")


@takes(AlexNetOptions)
def train_step(options: AlexNetOptions, *, concrete: bool = False, seed: int = 0):
    """(step, (state, batch)): `state` a TrainState, `batch` {"image" [batch, image, image, 3], "label" [batch]}.

    >>> step, (state, batch) = train_step(dense=64)
    >>> state.params["conv_0"]["kernel"].shape
    (11, 11, 3, 16)
    """
    model, optimizer = _static_parts(options)
    picture = (options.batch, options.image, options.image, 3)
    return classifier_step(
        model, optimizer, image=picture, classes=options.classes, dropout=options.dropout, concrete=concrete, seed=seed
    )


@takes(AlexNetOptions)
def digit_batches(options: AlexNetOptions, *, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches of digits, enlarged to the image size, for the factory called with the same options."""
    return digits_for(image=options.image, channels=3, batch=options.batch, classes=options.classes, seed=seed)


class AlexNet(nn.Module):
    """images [batch, image, image, 3] -> logits [batch, classes]."""

    options: AlexNetOptions

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Dropout is on where an rng for it is given, as in training."""
        options, channels = self.options, self.options.channels
        init = nn.initializers.he_normal()
        conv = functools.partial(nn.Conv, kernel_init=init, dtype=options.dtype)
        dense = functools.partial(nn.Dense, kernel_init=init, dtype=options.dtype)
        drop = functools.partial(nn.Dropout, options.dropout, deterministic=not self.has_rng("dropout"))
        x = x.astype(options.dtype)
        x = nn.relu(conv(channels, (11, 11), strides=4, padding=2, name="conv_0")(x))
        x = nn.relu(conv(3 * channels, (5, 5), padding=2, name="conv_1")(_pool(x)))
        x = nn.relu(conv(6 * channels, (3, 3), padding=1, name="conv_2")(_pool(x)))
        x = nn.relu(conv(4 * channels, (3, 3), padding=1, name="conv_3")(x))
        x = nn.relu(conv(4 * channels, (3, 3), padding=1, name="conv_4")(x))
        x = _pool(x).reshape(x.shape[0], -1)
        x = nn.relu(dense(options.dense, name="dense_0")(drop()(x)))
        x = nn.relu(dense(options.dense, name="dense_1")(drop()(x)))
        return dense(options.classes, name="head")(x)


def _pool(x: jax.Array) -> jax.Array:
    return nn.max_pool(x, (3, 3), strides=(2, 2))


@functools.cache
def _static_parts(options: AlexNetOptions) -> tuple[AlexNet, optax.GradientTransformation]:
    # a TrainState compares these by identity: made once, the states of two calls with equal options have equal trees
    return AlexNet(options), make_optimizer(options.optimizer, options.learning_rate)


if __name__ == "__main__":
    main(train_step, digit_batches)
