"""Bytes sent instead of seconds: Tofu's measure of a plan (section 5), without latency and links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ..ir import Factor
from ..mesh.cluster import Cluster
from .network import Collective, wire_bytes

BYTE_S = 1e-12
"""The seconds that one byte counts as in the search's tables."""


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

    def lines(self, kind: str, over: Sequence[int]) -> NDArray[np.float64]:
        """[1, 2]: no latency, and `BYTE_S` for every byte sent."""
        n = math.prod(self.factors[f].size for f in over)
        return np.array([[0.0, wire_bytes(cast(Collective, kind), n, 1.0) * BYTE_S]])
