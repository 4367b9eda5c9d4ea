"""Dims that mesh axes do not divide, and the next sizes that they divide."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_TILE = 128
"""Matrix units work on tiles of this many elements: a large dim is padded to whole tiles too."""
_LARGE = 1024


@dataclass(frozen=True, slots=True)
class Uneven:
    """A dim that the mesh axes ``axes`` do not divide; ``padded`` is the next size that the number of devices divides."""

    dim: int
    size: int
    axes: tuple[str, ...]
    padded: int


def uneven(shape: Sequence[int], axes: Mapping[str, int]) -> tuple[Uneven, ...]:
    """The dims that some mesh axis does not divide although they have an element for every device.

    >>> uneven((768, 50257), {"node": 2, "gpu": 4})
    (Uneven(dim=1, size=50257, axes=('node', 'gpu'), padded=50304),)
    """
    uneven_dims: list[Uneven] = []
    for dim, n in enumerate(shape):
        indivisible_by = tuple(name for name, k in axes.items() if n % k)
        if indivisible_by and n >= math.prod(axes.values()):
            uneven_dims.append(Uneven(dim, n, indivisible_by, padded(n, math.prod(axes.values()))))
    return tuple(uneven_dims)


def padded(size: int, devices: int) -> int:
    """The next multiple of ``devices``; for a large dim, of the tile too."""
    unit = math.lcm(devices, _TILE) if size >= _LARGE else devices
    return -(-size // unit) * unit
