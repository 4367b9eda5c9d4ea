"""Bytes sent instead of seconds: Tofu's measure of a plan (section 5), without latency and links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..ir import Collective, Factor
from ..mesh.cluster import Cluster

BYTE_S = 1e-12
"""The seconds that one byte counts as in the search's tables."""


def priced_bytes(kind: Collective, n: int, operand_bytes: float) -> float:
    """The bytes that a collective among n devices is priced by: the operand's of one device, for an all-gather the result's."""
    return n * operand_bytes if kind == Collective.ALL_GATHER else operand_bytes


def wire_bytes(kind: Collective, n: int, nbytes: float) -> float:
    """Bytes that one of n devices sends, by the ring convention; ``nbytes`` as `priced_bytes` has them.

    >>> [wire_bytes(kind, 4, 100.0) for kind in (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.PERMUTE)]
    [150.0, 75.0, 100.0]
    """
    if n <= 1:
        return 0.0
    if kind.hlo == Collective.PERMUTE:
        return float(nbytes)
    rounds = 2 if kind == Collective.ALL_REDUCE else 1
    return rounds * (n - 1) / n * nbytes  # reduce and broadcast: n - 1 messages shared by n devices


@dataclass(frozen=True, slots=True)
class WireBytes:
    """Prices collectives over these factors of a cluster by what one device sends, in the ring convention."""

    cluster: Cluster
    factors: tuple[Factor, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the factors."""
        return tuple(f.name for f in self.factors)

    def over(self, factors: Sequence[Factor]) -> WireBytes:
        """The same prices over other factors of the cluster."""
        return WireBytes(self.cluster, tuple(factors))

    def lines(self, kind: Collective, over: Sequence[int]) -> NDArray[np.float64]:
        """[1, 2]: no latency, and `BYTE_S` for every byte sent."""
        n = math.prod(self.factors[f].size for f in over)
        return np.array([[0.0, wire_bytes(kind, n, 1.0) * BYTE_S]])
