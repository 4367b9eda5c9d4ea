"""The collectives that a calibration measures, over each level of links that has several children and over all of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

from shardplan.calibrate.measured_kernels import KernelArgument
from shardplan.ir import Collective, Factor
from shardplan.mesh.machine import Machine

CPU_BYTES = (1 << 10, 1 << 16, 1 << 20, 1 << 22)
ACCELERATOR_BYTES = (1 << 10, 1 << 18, 1 << 22, 1 << 26)
KINDS: tuple[Collective, ...] = (
    Collective.ALL_REDUCE,
    Collective.ALL_GATHER,
    Collective.REDUCE_SCATTER,
    Collective.ALL_TO_ALL,
    Collective.SHIFT,
)


@dataclass(frozen=True, slots=True)
class TimedCollective:
    """A collective of float32 over some factors; ``nbytes`` as `shardplan.cost.network` counts them."""

    kind: Collective
    over: tuple[int, ...]
    nbytes: int
    level_names: tuple[str, ...]
    ways: int

    @property
    def family(self) -> str:
        """The name of its group in reports."""
        return self.kind.short

    @property
    def name(self) -> str:
        """A name for reports."""
        return f"{self.family} of {self.nbytes} bytes over {'+'.join(self.level_names)}"

    @property
    def argument(self) -> KernelArgument:
        """The operand on one device."""
        own = self.nbytes // self.ways if self.kind == Collective.ALL_GATHER else self.nbytes
        return KernelArgument((own // 4,), "float32")

    def function(self, axes: Sequence[str]) -> Callable[[Any], Any]:
        """The collective over these mesh axes, for use inside a `shard_map`."""
        names = tuple(axes)
        match self.kind:
            case Collective.ALL_REDUCE:
                return lambda x: lax.psum(x, names)
            case Collective.ALL_GATHER:
                return lambda x: lax.all_gather(x, names, tiled=True)
            case Collective.REDUCE_SCATTER:
                return lambda x: lax.psum_scatter(x, names, tiled=True)
            case Collective.ALL_TO_ALL:
                return lambda x: lax.all_to_all(x, names, 0, 0, tiled=True)
            case _:
                return lambda x: lax.ppermute(x, names, [(i, i + 1) for i in range(self.ways - 1)])


def transfers(cluster: Machine, factors: Sequence[Factor]) -> tuple[TimedCollective, ...]:
    """All collectives of a calibration: every kind and size over every level, and over all levels together."""
    groups: list[tuple[int, ...]] = [(i,) for i in range(len(factors))]
    if len(factors) > 1:
        groups.append(tuple(range(len(factors))))
    amounts = CPU_BYTES if cluster.device.platform == "cpu" else ACCELERATOR_BYTES
    return tuple(
        transfer(cluster, factors, kind, over, nbytes) for over, kind, nbytes in itertools.product(groups, KINDS, amounts)
    )


def transfer(
    cluster: Machine, factors: Sequence[Factor], kind: Collective, over: tuple[int, ...], nbytes: int
) -> TimedCollective:
    """A collective, its bytes rounded up so that every device has the same number of elements."""
    ways = math.prod(factors[i].size for i in over)
    unit = 4 * ways
    names = tuple(cluster.levels[factors[i].level].name for i in over)
    return TimedCollective(kind, over, -(-nbytes // unit) * unit, names, ways)
