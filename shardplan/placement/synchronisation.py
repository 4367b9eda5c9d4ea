"""The groups of devices that hold copies of a weight's gradient, and the bytes that each reduces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from shardplan.placement.configurations import Configuration, coordinates
from shardplan.placement.operators import Labels, Weight

Groups = tuple[tuple[int, int], ...]
"""(bit mask of devices, bytes) of each group of two devices or more, sorted."""


def sync_groups(weight: Weight, users: Sequence[Configuration]) -> Groups:
    """The groups that reduce the gradient of a weight, under the configurations of the operators that read it.

    The weight is taken apart into cells that no user cuts. All devices that hold a cell form a group; cells of one group are
    reduced together.
    """
    masks = holders(weight.shape, weight.labels, users)
    return _groups(math.prod(weight.shape) * weight.itemsize, masks)


def holders(shape: tuple[int, ...], labels: Sequence[Labels], users: Sequence[Configuration]) -> tuple[int, ...]:
    """The mask of the devices that hold each cell of a weight; its cells are equal."""
    held = {(_ways(own, c.degrees), _holders(own, c)) for own, c in zip(labels, users, strict=True)}
    return _cells(len(shape), tuple(sorted(held)))


def _ways(labels: Sequence[int], degrees: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if n < 0 else degrees[n] for n in labels)


@lru_cache(maxsize=1 << 14)
def _holders(labels: tuple[int, ...], chosen: Configuration) -> tuple[int, ...]:
    """The mask of the devices that hold each shard of the weight, row-major over its dims."""
    own = [n for n in labels if n >= 0]
    at = coordinates(chosen.degrees)[:, own]
    sizes = [chosen.degrees[n] for n in own]
    shard = np.ravel_multi_index(tuple(at.T), sizes) if own else np.zeros(len(at), np.int64)
    masks = [0] * math.prod(sizes)
    for s, device in zip(np.asarray(shard).tolist(), chosen.devices, strict=True):
        masks[s] |= 1 << device
    return tuple(masks)


@lru_cache(maxsize=1 << 14)
def _cells(rank: int, held: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]) -> tuple[int, ...]:
    cells = tuple(math.lcm(*column) for column in zip(*(ways for ways, _ in held), strict=True))
    count = math.prod(cells)
    at = np.stack(np.unravel_index(np.arange(count), cells)) if cells else np.zeros((0, 1), np.int64)
    masks = [0] * count
    for ways, holders in held:
        shards = np.zeros(count, np.int64)
        for row, cut, fine in zip(at, ways, cells, strict=True):
            shards = shards * cut + row // (fine // cut)
        for cell, shard in enumerate(shards.tolist()):
            masks[cell] |= holders[shard]
    return tuple(masks)


@lru_cache(maxsize=1 << 14)
def _groups(nbytes: int, masks: tuple[int, ...]) -> Groups:
    return tuple((mask, nbytes * masks.count(mask) // len(masks)) for mask in sorted(set(masks)) if mask & (mask - 1))
