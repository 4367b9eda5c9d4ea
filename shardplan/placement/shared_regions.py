"""Which parts of two operators share a region of a tensor, and how many bytes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardplan.placement.configurations import coordinates
from shardplan.placement.operators import Edge, Labels

Ints = NDArray[np.int64]
Degrees = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pairs:
    """The parts of the producer (``source``) and of the consumer (``target``) that share ``nbytes`` [m], sorted by source.

    ``back`` [m] sorts them by target.
    """

    source: Ints
    target: Ints
    nbytes: Ints
    back: Ints


def shared_bytes(edge: Edge, produced: Degrees, read: Degrees) -> Ints:
    """[parts of the producer, parts of the consumer]: bytes of a tensor that one has and the other reads."""
    return _shared(edge.shape, edge.itemsize, edge.produced, edge.read, produced, read)


def sharing_pairs(edge: Edge, produced: Degrees, read: Degrees) -> Pairs:
    """The parts that share bytes of a tensor."""
    return _pairs(edge.shape, edge.itemsize, edge.produced, edge.read, produced, read)


# Unrolled steps have equal tensors between different operators, so these do not ask for the operators.
@lru_cache(maxsize=1 << 14)
def _shared(shape: tuple[int, ...], itemsize: int, made: Labels, wanted: Labels, produced: Degrees, read: Degrees) -> Ints:
    rows, columns = len(coordinates(produced)), len(coordinates(read))
    elements = np.ones((rows, columns), np.int64)
    for size, own, other in zip(shape, made, wanted, strict=True):
        if own < 0 and other < 0:
            elements *= size
            continue
        (a, at), (b, to) = _along(own, produced), _along(other, read)
        elements *= _overlaps(size, a, b)[at][:, to]
    return elements * itemsize


@lru_cache(maxsize=1 << 14)
def _pairs(shape: tuple[int, ...], itemsize: int, made: Labels, wanted: Labels, produced: Degrees, read: Degrees) -> Pairs:
    nbytes = _shared(shape, itemsize, made, wanted, produced, read)
    source, target = np.nonzero(nbytes)
    return Pairs(source, target, nbytes[source, target], np.argsort(target, kind="stable"))


def _along(label: int, degrees: Degrees) -> tuple[int, Ints]:
    """(the parts of a dim, the part of the dim that each part of the operator has)."""
    if label < 0:
        return 1, np.zeros(math.prod(degrees), np.int64)
    return degrees[label], coordinates(degrees)[:, label]


@lru_cache(maxsize=1 << 12)
def _overlaps(size: int, a: int, b: int) -> Ints:
    """[a, b]: the elements of a dim that part i of a and part j of b share."""
    first, second = (np.arange(n + 1) * size // n for n in (a, b))
    low = np.maximum(first[:-1, None], second[None, :-1])
    high = np.minimum(first[1:, None], second[None, 1:])
    return np.maximum(high - low, 0)


@lru_cache(maxsize=1 << 14)
def copies_of(labels: Labels, degrees: Degrees) -> Ints:
    """[regions, copies]: the parts of an operator that hold each region of a tensor."""
    own = sorted({n for n in labels if n >= 0 and degrees[n] > 1})
    at = coordinates(degrees)[:, own]
    region = np.zeros(len(at), np.int64)
    for column, n in enumerate(own):
        region = region * degrees[n] + at[:, column]
    order = np.argsort(region, kind="stable")
    return order.reshape(math.prod(degrees[n] for n in own), -1)
