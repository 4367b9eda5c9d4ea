"""Configurations: how an operator is cut, and which devices compute its parts (FlexFlow, section 4).

A configuration has a degree for each loop of the operator. Its parts are numbered row-major over the loops, the first loop
slowest; part k runs on ``devices[k]``. Parts are equal. Any devices are legal, in any order, and several parts may share a
device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardplan.placement.operators import Operator


@dataclass(frozen=True, slots=True)
class Configuration:
    """The degrees along an operator's loops, and the device of each part."""

    degrees: tuple[int, ...]
    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        assert math.prod(self.degrees) == len(self.devices), "a device for each part"

    @property
    def used(self) -> tuple[int, ...]:
        """The devices that it uses, each once, in the order of their first parts."""
        return tuple(dict.fromkeys(self.devices))


Strategy = tuple[Configuration, ...]
"""A configuration for each operator."""


Group = tuple[int, ...]
"""Devices that share some operators, ascending."""


def divisors(n: int, most: int) -> list[int]:
    """The divisors of n up to ``most``.

    >>> divisors(12, 6)
    [1, 2, 3, 4, 6]
    """
    return [k for k in range(1, min(n, most) + 1) if n % k == 0]


def degrees_of(operator: Operator, most: int) -> tuple[tuple[int, ...], ...]:
    """All degrees of an operator's loops with at most ``most`` parts, the uncut one first."""
    return _degrees(tuple(loop.extent for loop in operator.loops), most)


@lru_cache(maxsize=1 << 12)
def _degrees(extents: tuple[int, ...], most: int) -> tuple[tuple[int, ...], ...]:
    return tuple(_products(extents, most))


def _products(extents: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    if not extents:
        yield ()
        return
    for k in divisors(extents[0], most):
        for rest in _products(extents[1:], most // k):
            yield (k, *rest)


@lru_cache(maxsize=1 << 16)
def coordinates(degrees: tuple[int, ...]) -> NDArray[np.int64]:
    """[parts, loops]: the place of each part along each loop."""
    parts = math.prod(degrees)
    if not degrees:
        return np.zeros((parts, 0), np.int64)
    return np.stack(np.unravel_index(np.arange(parts), degrees), axis=1).astype(np.int64)


def single(operator: Operator, device: int) -> Configuration:
    """The operator whole on one device."""
    return Configuration((1,) * len(operator.loops), (device,))


def partitions_of(shape: Sequence[int], size: int) -> tuple[tuple[Group, ...], ...]:
    """The ways to part all devices into groups of one size that follow the levels.

    >>> partitions_of((2, 2), 2)
    (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    """
    groups = groups_of(shape, size)
    count = math.prod(shape) // size
    return tuple(groups[n : n + count] for n in range(0, len(groups), count))


def groups_of(shape: Sequence[int], size: int) -> tuple[tuple[int, ...], ...]:
    """The groups of so many devices that follow the levels of a cluster of this shape: in each level, all, some or one.

    >>> groups_of((2, 2), 2)
    ((0, 1), (2, 3), (0, 2), (1, 3))
    """
    return _groups(tuple(shape), size)


@lru_cache(maxsize=1 << 10)
def _groups(shape: tuple[int, ...], size: int) -> tuple[tuple[int, ...], ...]:
    grid = np.arange(math.prod(shape)).reshape(shape)
    found: dict[tuple[int, ...], None] = {}
    for takes in itertools.product(*(divisors(n, n) for n in shape)):
        if math.prod(takes) != size:
            continue
        for starts in itertools.product(*(range(0, n, k) for n, k in zip(shape, takes, strict=True))):
            cut = tuple(slice(s, s + k) for s, k in zip(starts, takes, strict=True))
            found[tuple(grid[cut].ravel().tolist())] = None
    return tuple(found)


@lru_cache(maxsize=1 << 10)
def present_groups(shape: tuple[int, ...], size: int, absent: frozenset[int]) -> tuple[tuple[int, ...], ...]:
    """The groups of `groups_of` without absent devices."""
    return tuple(g for g in groups_of(shape, size) if absent.isdisjoint(g))


def random_configuration(
    operator: Operator, shape: Sequence[int], draw: np.random.Generator, absent: frozenset[int] = frozenset()
) -> Configuration:
    """A random configuration: degrees, then devices that follow the levels, or in one of four draws any devices in any order.

    It uses no device of ``absent``.
    """
    present = np.array([d for d in range(math.prod(shape)) if d not in absent])
    choices = degrees_of(operator, len(present))
    degrees = choices[int(draw.integers(len(choices)))]
    parts = math.prod(degrees)
    groups = present_groups(tuple(shape), parts, absent)
    if groups and draw.random() < 0.75:
        return Configuration(degrees, groups[int(draw.integers(len(groups)))])
    return Configuration(degrees, tuple(draw.permutation(present)[:parts].tolist()))


def configuration_within(operator: Operator, shape: Sequence[int], group: Group, draw: np.random.Generator) -> Configuration:
    """A random configuration over a whole group, or over as many of its devices as the loops allow; one in four in any order."""
    choices = widest_degrees(operator, len(group))
    degrees = choices[int(draw.integers(len(choices)))]
    parts = math.prod(degrees)
    inner = _inner_groups(tuple(shape), parts, group)
    if inner and draw.random() < 0.75:
        return Configuration(degrees, inner[int(draw.integers(len(inner)))])
    return Configuration(degrees, tuple(np.array(group)[draw.permutation(len(group))[:parts]].tolist()))


def widest_degrees(operator: Operator, most: int) -> tuple[tuple[int, ...], ...]:
    """The degrees with the most parts, at most ``most``."""
    return _widest(tuple(loop.extent for loop in operator.loops), most)


@lru_cache(maxsize=1 << 12)
def _widest(extents: tuple[int, ...], most: int) -> tuple[tuple[int, ...], ...]:
    choices = _degrees(extents, most)
    parts = max(map(math.prod, choices))
    return tuple(d for d in choices if math.prod(d) == parts)


@lru_cache(maxsize=1 << 12)
def _inner_groups(shape: tuple[int, ...], size: int, group: Group) -> tuple[Group, ...]:
    """The groups of devices of a group that follow the levels."""
    return (group,) if size == len(group) else tuple(g for g in groups_of(shape, size) if set(g) <= set(group))
