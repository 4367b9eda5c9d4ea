"""The arguments of a step: abstract by default, so that a model of any size can be described; real when asked for."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Tokens:
    """int32 values in [0, high)."""

    shape: tuple[int, ...]
    high: int
    dtype = np.int32

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        return rng.integers(self.high, size=self.shape, dtype=self.dtype)


@dataclasses.dataclass(frozen=True)
class Floats:
    """float32 values in [0, 1), as pixels are."""

    shape: tuple[int, ...]
    dtype = np.float32

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        return rng.random(size=self.shape, dtype=self.dtype)


def make_state(init: Callable[[jax.Array], Any], *, concrete: bool, seed: int) -> Any:
    """`init(key)`, only its shapes unless `concrete`; static parts of the result (a graphdef, a TrainState's functions) stay."""

    def seeded(seed):
        return init(jax.random.key(seed))

    # the seed is an argument under jit: as a constant, XLA would fold the whole initialisation at compile time
    return jax.jit(seeded)(seed) if concrete else jax.eval_shape(seeded, seed)


def make_batch(draws: Mapping[str, Tokens | Floats], *, concrete: bool, seed: int) -> dict[str, Any]:
    """The batch that `draws` describes, name by name."""
    if not concrete:
        return {name: jax.ShapeDtypeStruct(draw.shape, draw.dtype) for name, draw in draws.items()}
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(draw.draw(rng)) for name, draw in draws.items()}
