"""Single collectives from one layout to another: what the edges of a layout graph are.

Which collectives lead from a layout does not depend on the names of its dims, nor on how many more dims there are that nothing
splits: they are found once for each *leader*, in which the dims that are split come first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

State = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]
Name = tuple[str, tuple[int, ...]]
"""A collective's kind and the factors that it runs over."""

BUFFER = -3
"""The role of a factor that splits the buffer, where it is not known how many dims there are."""

ORDERED = 3
"""Of up to so many factors any order in a dim is a layout; of more only the ascending one."""

_KINDS = ("slice", "all_gather", "all_to_all", "permute", "all_reduce", "reduce_scatter")


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """The collectives from one leader; a row each.

    ``roles`` [M, factors] and ``places`` [M, factors] say for the layout that a collective leads to which dim each factor splits
    (-1 none, -2 partial, `BUFFER`), and its place among those of its dim. ``fresh``: among these dims is one that the leader does
    not split, the first such; it stands for each of them. ``codes`` are of `name_of`, ``fraction`` is the part of the tensor's
    bytes that is moved.
    """

    roles: NDArray[np.int64]
    places: NDArray[np.int64]
    fresh: NDArray[np.bool_]
    codes: NDArray[np.int64]
    fraction: NDArray[np.float64]


def name_of(code: int, factors: int) -> Name:
    """The collective of a number."""
    kind, over = divmod(code, 1 << factors)
    return _KINDS[kind], tuple(f for f in range(factors) if over >> f & 1)


@lru_cache(maxsize=1 << 14)
def moves_from(sizes: tuple[int, ...], leader: State) -> Moves:
    """The collectives from a leader, of whose dims only those that are split are given, and the buffer.

    Of several to the same layout the one over the fewest factors, of these the one that moves the least.
    """
    (*split, buffer), partial = leader
    rank, state = len(split) + 1, ((*split, (), buffer), partial)
    own = _part(state, sizes)
    best: dict[State, tuple[int, float, str, tuple[int, ...]]] = {}
    for kind, over, target in every_move(state, rank, sizes):
        if len(sizes) > ORDERED and any(d != tuple(sorted(d)) for d in target[0]):
            continue
        fraction = _part(target, sizes) if kind == "all_gather" else 0.0 if kind == "slice" else own
        if target != state and (target not in best or (len(over), fraction) < best[target][:2]):
            best[target] = len(over), fraction, kind, over
    roles: list[list[int]] = []
    places: list[list[int]] = []
    for dims, left in best:
        row, place = [-1] * len(sizes), [0] * len(sizes)
        for d, factors in enumerate(dims):
            for at, f in enumerate(factors):
                row[f], place[f] = d if d < rank else BUFFER, at
        for f in left:
            row[f] = -2
        roles.append(row)
        places.append(place)
    shape = len(best), len(sizes)
    codes = [(_KINDS.index(kind) << len(sizes)) + sum(1 << f for f in over) for _, _, kind, over in best.values()]
    return Moves(
        np.array(roles, np.int64).reshape(shape),
        np.array(places, np.int64).reshape(shape),
        np.array([rank - 1 in row for row in roles], np.bool_),
        np.array(codes, np.int64),
        np.array([part for _, part, _, _ in best.values()]),
    )


def _part(state: State, sizes: Sequence[int]) -> float:
    """The part of a tensor that one device holds."""
    return 1.0 / math.prod(sizes[f] for factors in state[0] for f in factors)


def _subsets(items: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for n in range(1, len(items) + 1):
        yield from itertools.combinations(items, n)


Move = tuple[str, tuple[int, ...], State]
"""A collective: its kind, the factors that it runs over, and the state that it leads to."""


def _put(state: State, changes: dict[int, tuple[int, ...]], left: tuple[int, ...] | None = None) -> State:
    dims, partial = list(state[0]), state[1]
    for d, factors in changes.items():
        dims[d] = factors
    return tuple(dims), partial if left is None else left


def every_move(state: State, rank: int, sizes: Sequence[int]) -> Iterator[Move]:
    """Every single collective from a state."""
    dims, partial = state
    used = {f for d in dims for f in d} | set(partial)
    free = [f for f in range(len(sizes)) if f not in used]
    for d, fs in enumerate(dims):
        yield from _leaving(state, d, rank)
        if d < rank:
            for f in free:
                yield "slice", (), _put(state, {d: (*fs, f)})
            yield from _permuted(state, d, rank, free, sizes)
    for over in _subsets(partial):
        left = tuple(f for f in partial if f not in over)
        yield "all_reduce", over, _put(state, {}, left)
        for d in range(rank + 1):
            if d < rank or not dims[d]:
                yield "reduce_scatter", over, _put(state, {d: dims[d] + over}, left)


def _leaving(state: State, d: int, rank: int) -> Iterator[Move]:
    """The minormost factors of a dim gathered, or moved to another dim."""
    dims, _ = state
    for n in range(1, len(dims[d]) + 1):
        kept, gone = dims[d][:-n], dims[d][-n:]
        yield "all_gather", tuple(sorted(gone)), _put(state, {d: kept})
        if d < rank:
            for e in range(rank):
                if e != d:
                    yield "all_to_all", tuple(sorted(gone)), _put(state, {d: kept, e: dims[e] + gone})


def _permuted(state: State, d: int, rank: int, free: Sequence[int], sizes: Sequence[int]) -> Iterator[Move]:
    """Other devices hold the same blocks: factors of a dim in another order, or exchanged for ones of the same size."""
    dims, _ = state
    fs = dims[d]
    for order in itertools.permutations(fs):
        if order != fs:
            yield "permute", tuple(sorted(fs)), _put(state, {d: order})
    for i, f in enumerate(fs):
        mine = (fs[:i], fs[i + 1 :])
        for g in free:
            if sizes[f] == sizes[g]:
                yield "permute", tuple(sorted((f, g))), _put(state, {d: (*mine[0], g, *mine[1])})
        for e in range(d + 1, rank):
            for j, g in enumerate(dims[e]):
                if sizes[f] == sizes[g]:
                    change = {d: (*mine[0], g, *mine[1]), e: (*dims[e][:j], f, *dims[e][j + 1 :])}
                    yield "permute", tuple(sorted((f, g))), _put(state, change)
