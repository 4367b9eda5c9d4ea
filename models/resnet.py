"""ResNet (He et al. 2016, bottleneck blocks): the wide ResNet without widening.

ResNet-101 of FlexFlow's section 8 (Jia, Zaharia and Aiken 2018):
`train_step(depth=101, channels=64, image=224, classes=1000, batch=64 * devices)`.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from models import wresnet
from models._optax_step import OPTIMIZER
from models._options import COUNT, DTYPE, POSITIVE, SWITCH, Options, one_of, option, takes
from models._train import main

__all__ = ["digit_batches", "train_step"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetOptions(Options):
    """channels are those of the first convolution. blocks, a count for each stage, overrides depth. dtype is computed in,
    parameters and batch statistics stay float32."""

    depth: int = option(14, one_of(*wresnet.BLOCKS))
    image: int = option(32, COUNT)
    batch: int = option(16, COUNT)
    blocks: tuple[int, ...] | None = option(None, wresnet.STAGES)
    channels: int = option(16, COUNT)
    classes: int = option(16, COUNT)
    activation: str = option("relu", one_of("relu", "silu"))
    dtype: str = option("float32", DTYPE)
    remat: bool = option(False, SWITCH)
    optimizer: str = option("sgd", OPTIMIZER)
    learning_rate: float = option(3e-3, POSITIVE)


@takes(ResNetOptions)
def train_step(options: ResNetOptions, *, concrete: bool = False, seed: int = 0):
    """(step, (state, batch)): `state` a TrainState with batch_stats, `batch` {"image" [batch, image, image, 3], "label" [batch]}.

    >>> step, (state, batch) = train_step(depth=101, channels=64, image=224, classes=1000)
    >>> state.params["stage_2_block_22"]["conv_mid"]["kernel"].shape
    (3, 3, 256, 256)
    """
    return wresnet.train_step(**dataclasses.asdict(options), concrete=concrete, seed=seed)


@takes(ResNetOptions)
def digit_batches(options: ResNetOptions, *, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches of digits, enlarged to the image size, for the factory called with the same options."""
    return wresnet.digit_batches(**dataclasses.asdict(options), seed=seed)


if __name__ == "__main__":
    main(train_step, digit_batches)
