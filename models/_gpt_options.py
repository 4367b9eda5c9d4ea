"""The options that both GPTs take, and what follows from them alone."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from models import data
from models._arguments import Tokens
from models._fused_attention import ATTENTION, check
from models._options import BOUNDARY, COUNT, DTYPE, FRACTION, POSITIVE, REMAT, SWITCH, Options, option, require, takes


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTOptions(Options):
    """dtype is what is computed in, parameters stay float32. dropout is the fraction dropped, accumulate the number of
    microbatches that a batch is taken in, tied makes the head the transposed embedding. remat "products" keeps the products with
    weights and computes the rest again. attention is "xla" for plain ops, or "flash" for one kernel without the scores in
    memory."""

    layers: int = option(2, COUNT)
    width: int = option(64, COUNT)
    heads: int = option(8, COUNT)
    vocabulary: int = option(256, COUNT)
    sequence: int = option(32, COUNT)
    batch: int = option(16, COUNT)
    dtype: str = option("float32", DTYPE)
    scan: bool = option(False, SWITCH)
    remat: bool | str = option(False, REMAT)
    dropout: float = option(0.0, FRACTION)
    tied: bool = option(False, SWITCH)
    attention: str = option("xla", ATTENTION)
    accumulate: int = option(1, COUNT)
    learning_rate: float = option(1e-3, POSITIVE)
    boundary: tuple | None = option(None, BOUNDARY)

    def __post_init__(self):
        super().__post_init__()
        require(self.width % self.heads == 0, f"heads={self.heads} does not divide width={self.width}")
        require(
            self.attention == "xla" or not self.dropout, f"attention={self.attention!r} has no dropout, dropout={self.dropout}"
        )
        check(self.attention, sequence=self.sequence)
        require(self.batch % self.accumulate == 0, f"accumulate={self.accumulate} does not divide batch={self.batch}")

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def draws(self) -> dict[str, Tokens]:
        shape = (self.batch, self.sequence)
        return {"tokens": Tokens(shape, self.vocabulary), "targets": Tokens(shape, self.vocabulary)}


@takes(GPTOptions)
def text_batches(options: GPTOptions, *, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches of source text for the factory called with the same options."""
    return data.char_batches(sequence=options.sequence, batch=options.batch, seed=seed, vocabulary=options.vocabulary)


def causal_mask(sequence: int) -> jax.Array:
    """True where a query (row) may read a key (column): keys that are not ahead of it. [sequence, sequence]"""
    query, key = (jax.lax.broadcasted_iota(jnp.int32, (sequence, sequence), dim) for dim in (0, 1))
    return query >= key
