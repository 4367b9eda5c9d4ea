"""Bytes sent instead of seconds: Tofu's measure of a plan (section 5), without latency and links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from .network import Collective, wire_bytes

BYTE_S = 1e-12
"""The seconds that one byte counts as in the search's tables."""


@dataclass(frozen=True, slots=True)
class WireBytes:
    """Prices collectives over factors of these sizes and names by what one device sends, in the ring convention."""

    sizes: tuple[int, ...]
    names: tuple[str, ...] = ()

    def lines(self, kind: str, over: Sequence[int]) -> NDArray[np.float64]:
        """[1, 2]: no latency, and `BYTE_S` for every byte sent."""
        n = math.prod(self.sizes[f] for f in over)
        return np.array([[0.0, wire_bytes(cast(Collective, kind), n, 1.0) * BYTE_S]])
