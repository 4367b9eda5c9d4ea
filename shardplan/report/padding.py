"""Dims that do not divide, and the sizes that would."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_TILE = 128
"""Matrix units work on tiles of this many elements: a large dim is padded to a multiple of it too."""
_LARGE = 1024


@dataclass(frozen=True, slots=True)
class Uneven:
    """A dim that not every axis divides: ``axes`` do not, ``padded`` is the next size that all devices divide."""

    dim: int
    size: int
    axes: tuple[str, ...]
    padded: int


def uneven(shape: Sequence[int], axes: Mapping[str, int]) -> tuple[Uneven, ...]:
    """The dims that some axis does not divide although they have an element for every device.

    >>> uneven((768, 50257), {"node": 2, "gpu": 4})
    (Uneven(dim=1, size=50257, axes=('node', 'gpu'), padded=50304),)
    """
    found: list[Uneven] = []
    for dim, n in enumerate(shape):
        bad = tuple(name for name, k in axes.items() if n % k)
        if bad and n >= math.prod(axes.values()):
            found.append(Uneven(dim, n, bad, padded(n, math.prod(axes.values()))))
    return tuple(found)


def padded(size: int, devices: int) -> int:
    """The next size that ``devices`` divide, and tiles too where the dim is large."""
    unit = math.lcm(devices, _TILE) if size >= _LARGE else devices
    return -(-size // unit) * unit


def priced(size: int) -> bool:
    """Whether padding a dim of this size can be priced: smaller numbers stand in a program for other things too."""
    return size >= _TILE
