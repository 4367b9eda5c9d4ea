"""The models of Tofu's section 7, and their plans on one GPU and on eight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import shardplan
from models import rnn, wresnet
from shardplan.errors import MemoryLimitError

CLUSTER = "ec2-p2.8xlarge"
GPUS = 8
STEPS = (2, 2, 2)
"""The steps of Tofu's recursion over eight workers."""
UNBOUNDED = 10**15
"""A memory limit that nothing reaches, in bytes: the Ideal's GPU."""


@dataclass(frozen=True, slots=True, order=True)
class Model:
    """A model of Figure 8 (``kind`` WResNet: ``size`` is the widening) or of Figure 9 (RNN: ``size`` is hidden / 1024)."""

    kind: str
    depth: int
    size: int

    @property
    def name(self) -> str:
        """As in the paper: WResNet-50-4, RNN-6-4K."""
        return f"{self.kind}-{self.depth}-{self.size}{'K' if self.recurrent else ''}"

    @property
    def recurrent(self) -> bool:
        """Whether it is one of the RNNs."""
        return self.kind == "RNN"

    @property
    def ideal_batch(self) -> int:
        """The batch of the Ideal (section 7.2)."""
        return 512 if self.recurrent else 128

    def step(self, batch: int) -> tuple[Any, Any]:
        """A training step with momentum, the one history of Table 2, and its arguments."""
        if self.recurrent:
            return rnn.train_step(layers=self.depth, hidden=1024 * self.size, batch=batch, optimizer="sgd")
        return wresnet.train_step(depth=self.depth, width=self.size, image=224, batch=batch, classes=1000)


MODELS = (
    *(Model("WResNet", depth, width) for depth in (50, 101, 152) for width in (4, 6, 8, 10)),
    *(Model("RNN", layers, hidden) for layers in (6, 8, 10) for hidden in (4, 6, 8)),
)
"""Every model of Figures 8 and 9."""
SOME = ("WResNet-50-4", "WResNet-152-10", "RNN-6-4K", "RNN-10-4K", "RNN-10-8K")
"""The smallest and the largest of each figure, and the deepest RNN of Table 3."""


def largest_batch(fits: Callable[[int], bool], most: int) -> int | None:
    """The largest power of two up to ``most`` that fits; None where not even one sample does. Larger batches take more memory.

    >>> largest_batch(lambda batch: batch <= 40, 512)
    32
    """
    low, high = 0, most.bit_length() - 1
    if fits(2**high):
        return 2**high
    if not fits(1):
        return None
    while high - low > 1:  # 2**low fits, 2**high does not
        middle = (low + high) // 2
        low, high = (middle, high) if fits(2**middle) else (low, middle)
    return 2**low


@cache
def cluster() -> shardplan.Cluster:
    """Tofu's testbed."""
    return shardplan.Cluster.load(CLUSTER)


def memory_bytes() -> int:
    """The memory of a K80."""
    return cluster().device.memory_bytes


@cache
def on_one_gpu(model: Model, batch: int) -> Any:
    """The plan of a cluster of one GPU with infinite memory."""
    whole = cluster()
    one = replace(whole, levels=(replace(whole.levels[-1], size=1),))
    step, args = model.step(batch)
    return shardplan.plan(step, *args, cluster=one, donate_argnums=0, memory_limit=UNBOUNDED, time_model="sum")


@cache
def on_eight_gpus(model: Model, batch: int, objective: str) -> Any | None:
    """The plan over eight GPUs in Tofu's three steps; None where none fits."""
    step, args = model.step(batch)
    try:
        return shardplan.plan(
            step,
            *args,
            cluster=cluster(),
            donate_argnums=0,
            objective=objective,
            memory_limit=memory_bytes(),
            factors={"gpu": STEPS},
            time_model="sum",
        )
    except MemoryLimitError:
        return None
