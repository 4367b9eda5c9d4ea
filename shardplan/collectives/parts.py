"""Parts of one level that layouts do not keep apart.

A level of eight devices may be one factor, or parts of 2, 2 and 2. Two neighbouring parts that a layout uses side by side, or not
at all, are one factor to it. So a resharding is priced over the fewest parts in which both of its layouts can be written: a
plan that treats a level as a whole costs the same however the level is taken apart.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardplan.collectives.layouts import LayoutSpace
from shardplan.ir import Factor

Seams = tuple[int, ...]
"""Places between two neighbouring parts of one level: i stands between factors i and i + 1."""


def seams(factors: Sequence[Factor]) -> Seams:
    """All places at which two factors could be one.

    >>> seams([Factor("node", 2, 0), Factor("gpu0", 2, 1, 4), Factor("gpu1", 4, 1, 1)])
    (1,)
    """
    pairs = enumerate(itertools.pairwise(factors))
    return tuple(i for i, (a, b) in pairs if a.level == b.level and a.stride == b.stride * b.size)


@functools.lru_cache(maxsize=256)
def runs(count: int, closed: frozenset[int]) -> tuple[tuple[int, ...], ...]:
    """The factors as runs, each of which is one factor once the ``closed`` seams are gone.

    >>> runs(4, frozenset({1}))
    ((0,), (1, 2), (3,))
    """
    result: list[tuple[int, ...]] = []
    for f in range(count):
        if f - 1 in closed:
            result[-1] = (*result[-1], f)
        else:
            result.append((f,))
    return tuple(result)


def open_seams(space: LayoutSpace, at: Seams) -> NDArray[np.int64]:
    """[S]: the seams that each layout keeps open, as bits: bit k for ``at[k]``."""
    result = np.zeros(len(space), np.int64)
    for k, i in enumerate(at):
        a, b = space.roles[:, i], space.roles[:, i + 1]
        split = (a >= 0) & (a < space.rank)
        together = (a == b) & (~split | (space.places[:, i] + 1 == space.places[:, i + 1]))
        result |= (~together).astype(np.int64) << k
    return result


def in_runs(space: LayoutSpace, over: LayoutSpace, of: Sequence[tuple[int, ...]]) -> NDArray[np.int64]:
    """[S]: each layout in the space ``over`` whose factors are these runs; -1 where a run's factors do not lie side by side."""
    first = [run[0] for run in of]
    roles, places = space.roles[:, first], np.zeros((len(space), len(of)), np.int64)
    for g, a in enumerate(first):
        for h, b in enumerate(first):
            same = (roles[:, g] == roles[:, h]) & (roles[:, g] >= 0) & (roles[:, g] < space.rank)
            places[:, g] += same & (space.places[:, b] < space.places[:, a]) & (g != h)
    buffer = roles == space.rank
    for g in range(len(of)):
        places[:, g] += (buffer[:, :g].sum(axis=1)) * buffer[:, g]
    closed = tuple(f for run in of for f in run[:-1])
    result = over.numbers(roles, places)
    return np.where(open_seams(space, closed) == 0, result, -1)
