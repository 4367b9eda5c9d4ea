"""LeNet-5 (LeCun et al. 1998) in flax linen: two convolutions with pools, and three dense layers.

Its full size is the default. FlexFlow's section 8.3 (Jia, Zaharia and Aiken 2018) searches its optimum on four devices:
`train_step(batch=64 * devices)`.
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
from models._options import COUNT, DTYPE, POSITIVE, Options, option, require, takes
from models._train import main

__all__ = ["LeNet", "digit_batches", "train_step"]

_LEAST_IMAGE = 16
"""The last pool of a smaller one would have no output."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeNetOptions(Options):
    """dtype is computed in, parameters stay float32."""

    image: int = option(32, COUNT)
    batch: int = option(16, COUNT)
    classes: int = option(10, COUNT)
    dtype: str = option("float32", DTYPE)
    optimizer: str = option("sgd", OPTIMIZER)
    learning_rate: float = option(3e-2, POSITIVE)

    def __post_init__(self):
        super().__post_init__()
        require(self.image >= _LEAST_IMAGE, f"image={self.image} is too small for two pools: {_LEAST_IMAGE} is the least")


@takes(LeNetOptions)
def train_step(options: LeNetOptions, *, concrete: bool = False, seed: int = 0):
    """(step, (state, batch)): `state` a TrainState, `batch` {"image" [batch, image, image, 1], "label" [batch]}.

    >>> step, (state, batch) = train_step()
    >>> sum(leaf.size for leaf in jax.tree.leaves(state.params))
    61706
    """
    model, optimizer = _static_parts(options)
    picture = (options.batch, options.image, options.image, 1)
    return classifier_step(model, optimizer, image=picture, classes=options.classes, concrete=concrete, seed=seed)


@takes(LeNetOptions)
def digit_batches(options: LeNetOptions, *, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches of digits, enlarged to the image size, for the factory called with the same options."""
    return digits_for(image=options.image, channels=1, batch=options.batch, classes=options.classes, seed=seed)


class LeNet(nn.Module):
    """images [batch, image, image, 1] -> logits [batch, classes]."""

    options: LeNetOptions

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Pools take the mean, without coefficients of their own."""
        conv = functools.partial(nn.Conv, kernel_size=(5, 5), padding="VALID", dtype=self.options.dtype)
        dense = functools.partial(nn.Dense, dtype=self.options.dtype)
        x = x.astype(self.options.dtype)
        x = nn.avg_pool(nn.tanh(conv(6, name="conv_0")(x)), (2, 2), strides=(2, 2))
        x = nn.avg_pool(nn.tanh(conv(16, name="conv_1")(x)), (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        x = nn.tanh(dense(120, name="dense_0")(x))
        x = nn.tanh(dense(84, name="dense_1")(x))
        return dense(self.options.classes, name="head")(x)


@functools.cache
def _static_parts(options: LeNetOptions) -> tuple[LeNet, optax.GradientTransformation]:
    # a TrainState compares these by identity: made once, the states of two calls with equal options have equal trees
    return LeNet(options), make_optimizer(options.optimizer, options.learning_rate)


if __name__ == "__main__":
    main(train_step, digit_batches)
