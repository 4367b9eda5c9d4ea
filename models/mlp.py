"""A multilayer perceptron in plain JAX: parameters in a dict, optax for the update, no module system."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from models import data
from models._arguments import Floats, Tokens
from models._optax_step import OPTIMIZER, make_optimizer, optax_step
from models._options import COUNT, DTYPE, POSITIVE, Options, option, require, takes
from models._train import main
from models.losses import cross_entropy

__all__ = ["digit_batches", "train_step"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLPOptions(Options):
    """layers counts the kernels: inputs -> width -> ... -> width -> classes. dtype is computed in, parameters stay float32."""

    layers: int = option(4, COUNT)
    width: int = option(64, COUNT)
    batch: int = option(64, COUNT)
    inputs: int = option(64, COUNT)
    classes: int = option(16, COUNT)
    dtype: str = option("float32", DTYPE)
    optimizer: str = option("adam", OPTIMIZER)
    learning_rate: float = option(1e-2, POSITIVE)

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.inputs, *[self.width] * (self.layers - 1), self.classes)


@takes(MLPOptions)
def train_step(options: MLPOptions, *, concrete: bool = False, seed: int = 0):
    """(step, (state, batch)): `state` {"params", "optimizer"}, `batch` {"inputs" [batch, inputs], "labels" [batch]}.

    >>> step, (state, batch) = train_step(width=32)
    >>> state["params"]["layer_1"]["kernel"].shape
    (32, 32)
    """

    def loss_of(params, batch):
        return cross_entropy(apply(params, batch["inputs"], options.dtype), batch["labels"])

    draws = {
        "inputs": Floats((options.batch, options.inputs)),
        "labels": Tokens((options.batch,), min(options.classes, 10)),
    }
    return optax_step(
        functools.partial(init_params, options),
        loss_of,
        make_optimizer(options.optimizer, options.learning_rate),
        draws,
        concrete=concrete,
        seed=seed,
    )


@takes(MLPOptions)
def digit_batches(options: MLPOptions, *, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches of digits for the factory called with the same options, which have to suit 8 x 8 pixels, 10 classes."""
    require(options.inputs == 64, f"inputs={options.inputs}: the digits have 64 pixels")
    require(options.classes >= 10, f"classes={options.classes}: the digits have 10 classes")
    for batch in data.digit_batches(batch=options.batch, seed=seed):
        yield {"inputs": batch["image"].reshape(options.batch, -1), "labels": batch["label"]}


def init_params(options: MLPOptions, key: jax.Array) -> dict[str, dict[str, jax.Array]]:
    """Kernels [in, out] of He's variance, biases zero."""
    sizes = options.sizes
    return {
        f"layer_{i}": {
            "kernel": jax.random.normal(jax.random.fold_in(key, i), (n, m)) * math.sqrt(2 / n),
            "bias": jnp.zeros(m),
        }
        for i, (n, m) in enumerate(itertools.pairwise(sizes))
    }


def apply(params: dict[str, dict[str, jax.Array]], x: jax.Array, dtype: str = "float32") -> jax.Array:
    """inputs [batch, inputs] -> logits [batch, classes]."""
    x = x.astype(dtype)
    for i in range(len(params)):
        layer = jax.tree.map(lambda leaf: leaf.astype(dtype), params[f"layer_{i}"])
        x = x @ layer["kernel"] + layer["bias"]
        x = jax.nn.relu(x) if i < len(params) - 1 else x
    return x


if __name__ == "__main__":
    main(train_step, digit_batches)
