"""Two independent towers of dense layers in plain JAX, which meet in the dot products of a contrastive loss.

As in retrieval (Yi et al. 2019): each pair of a batch has to tell its partner from those of the other pairs, in both directions
(Radford et al. 2021, Figure 3). The towers share nothing until then: they may run beside each other on different devices.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from models import data, mlp
from models._arguments import Floats
from models._optax_step import OPTIMIZER, make_optimizer, optax_step
from models._options import COUNT, DTYPE, POSITIVE, Options, option, require, takes
from models._train import main
from models.losses import cross_entropy

__all__ = ["digit_batches", "train_step"]

_HALF_DIGIT = 32
_LEAST_NORM = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoTowerOptions(Options):
    """layers and width are those of each tower, inputs -> width -> ... -> width -> embedding. Cosines are divided by temperature.
    dtype is computed in, parameters stay float32."""

    layers: int = option(3, COUNT)
    width: int = option(64, COUNT)
    embedding: int = option(32, COUNT)
    batch: int = option(64, COUNT)
    inputs: int = option(_HALF_DIGIT, COUNT)
    temperature: float = option(0.1, POSITIVE)
    dtype: str = option("float32", DTYPE)
    optimizer: str = option("adam", OPTIMIZER)
    learning_rate: float = option(3e-3, POSITIVE)

    @property
    def tower(self) -> mlp.MLPOptions:
        return mlp.MLPOptions(layers=self.layers, width=self.width, inputs=self.inputs, classes=self.embedding)


@takes(TwoTowerOptions)
def train_step(options: TwoTowerOptions, *, concrete: bool = False, seed: int = 0):
    """(step, (state, batch)): `state` {"params", "optimizer"}, `batch` {"left", "right"}, [batch, inputs], a pair in each row.

    >>> step, (state, batch) = train_step(width=128)
    >>> state["params"]["left"]["layer_1"]["kernel"].shape
    (128, 128)
    """

    def init_params(key):
        left, right = jax.random.split(key)
        return {"left": mlp.init_params(options.tower, left), "right": mlp.init_params(options.tower, right)}

    def loss_of(params, batch):
        left, right = (embed(options, params[side], batch[side], side) for side in ("left", "right"))
        return contrast(left @ right.T / options.temperature)

    inputs = Floats((options.batch, options.inputs))
    return optax_step(
        init_params,
        loss_of,
        make_optimizer(options.optimizer, options.learning_rate),
        {"left": inputs, "right": inputs},
        concrete=concrete,
        seed=seed,
    )


@takes(TwoTowerOptions)
def digit_batches(options: TwoTowerOptions, *, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches of digits cut in two, for the factory called with the same options, which have to suit 32 pixels a half."""
    require(options.inputs == _HALF_DIGIT, f"inputs={options.inputs}: half a digit has {_HALF_DIGIT} pixels")
    for batch in data.digit_batches(batch=options.batch, seed=seed):
        left, right = np.split(batch["image"][..., 0], 2, axis=2)
        yield {"left": left.reshape(options.batch, -1), "right": right.reshape(options.batch, -1)}


def embed(options: TwoTowerOptions, params: dict[str, dict[str, jax.Array]], x: jax.Array, side: str) -> jax.Array:
    """inputs [batch, inputs] -> unit vectors [batch, embedding], in float32."""
    with jax.named_scope(side):
        x = mlp.apply(params, x, options.dtype).astype(jnp.float32)
        return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _LEAST_NORM)


def contrast(similarity: jax.Array) -> jax.Array:
    """Mean loss of finding each row's partner among the columns, and each column's among the rows. similarity [batch, batch]."""
    partner = jnp.arange(similarity.shape[0])
    return (cross_entropy(similarity, partner) + cross_entropy(similarity.T, partner)) / 2


if __name__ == "__main__":
    main(train_step, digit_batches)
