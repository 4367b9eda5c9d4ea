"""A language model of two LSTM layers (Zaremba et al. 2014), unrolled, with a softmax layer in each time step.

That of FlexFlow's section 8 (Jia, Zaharia and Aiken 2018), on the Penn Treebank's 10,000 words:
`train_step(hidden=2048, steps=40, vocabulary=10000, batch=64 * devices)`; its section 8.3 searches the optimum of `steps=2`.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from models import rnn
from models._optax_step import OPTIMIZER
from models._options import COUNT, DTYPE, POSITIVE, Options, option, takes
from models._train import main

__all__ = ["text_batches", "train_step"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RNNLMOptions(Options):
    """steps is the length of the text. dtype is computed in, parameters stay float32."""

    layers: int = option(2, COUNT)
    hidden: int = option(64, COUNT)
    steps: int = option(4, COUNT)
    batch: int = option(16, COUNT)
    vocabulary: int = option(128, COUNT)
    dtype: str = option("float32", DTYPE)
    optimizer: str = option("adam", OPTIMIZER)
    learning_rate: float = option(1e-2, POSITIVE)


@takes(RNNLMOptions)
def train_step(options: RNNLMOptions, *, concrete: bool = False, seed: int = 0):
    """(step, (state, batch)): `state` {"params", "optimizer"}, `batch` {"tokens", "targets"}, int32 [batch, steps].

    >>> step, (state, batch) = train_step(hidden=32)
    >>> state["params"]["layer_1"]["input"].shape
    (32, 4, 32)
    """
    return rnn.train_step(**dataclasses.asdict(options), head_in_steps=True, concrete=concrete, seed=seed)


@takes(RNNLMOptions)
def text_batches(options: RNNLMOptions, *, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches of source text for the factory called with the same options."""
    return rnn.text_batches(**dataclasses.asdict(options), seed=seed)


if __name__ == "__main__":
    main(train_step, text_batches)
