"""Single collectives from one layout to another: the edges of a layout graph.

The collectives from a layout depend neither on the names of its dims nor on the number of unsplit dims. So they are enumerated
once for each *leader*, a layout whose split dims come first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardplan.collectives.step import StepKind
from shardplan.constants import CONSTANTS
from shardplan.ir import Collective

State = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]
Name = tuple[StepKind, tuple[int, ...]]
"""A collective's kind and its factors; of a permute, the factors that tell a block's place, in their order before, then after."""

BUFFER = -3
"""The role of a factor that splits the buffer, where the number of dims is not known."""


_KINDS = (Collective.SLICE, Collective.ALL_GATHER, Collective.ALL_TO_ALL, Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """The collectives from one leader, one row each.

    ``roles`` [M, factors] and ``places`` [M, factors] describe the target layout: the dim that each factor splits (-1 none, -2
    partial, `BUFFER`), and its place among the factors of that dim. ``fresh``: the target splits the leader's first unsplit dim,
    which stands for each unsplit dim. `name_of` reads ``codes``. ``fraction`` is the part of the tensor's bytes that is moved.
    """

    roles: NDArray[np.int64]
    places: NDArray[np.int64]
    fresh: NDArray[np.bool_]
    codes: NDArray[np.int64]
    fraction: NDArray[np.float64]


def name_of(code: int, factors: int) -> Name:
    """The collective of a code."""
    kind, over = divmod(code, 1 << factors)
    if kind >= len(_KINDS):
        return Collective.PERMUTE, _exchanges(factors)[code - (len(_KINDS) << factors)]
    return _KINDS[kind], tuple(f for f in range(factors) if over >> f & 1)


def _code_of(name: Name, factors: int) -> int:
    kind, over = name
    if kind == Collective.PERMUTE:
        return (len(_KINDS) << factors) + _exchanges(factors).index(over)
    return (_KINDS.index(kind) << factors) + sum(1 << f for f in over)


@lru_cache(maxsize=8)
def _exchanges(factors: int) -> tuple[tuple[int, ...], ...]:
    """Every two orders of some factors that begin and end with different ones, one after the other."""
    every = itertools.chain.from_iterable(itertools.combinations(range(factors), n) for n in range(2, factors + 1))
    pairs = itertools.chain.from_iterable(itertools.product(itertools.permutations(own), repeat=2) for own in every)
    return tuple((*a, *b) for a, b in pairs if a[0] != b[0] and a[-1] != b[-1])


def exchanged(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...]:
    """The factors of a permute that changes the order of a dim's factors: their orders, without what both have in common.

    >>> exchanged((0, 1, 2, 3), (0, 2, 1, 3))
    (1, 2, 2, 1)
    """
    while before[0] == after[0]:
        before, after = before[1:], after[1:]
    while before[-1] == after[-1]:
        before, after = before[:-1], after[:-1]
    return (*before, *after)


@lru_cache(maxsize=64)
def orders(levels: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The orders that the factors of a layout's dims may have: each is an order of all factors, and a dim's factors have their
    order in it.

    ``levels`` are the levels of the factors. Up to ``ordered_factors`` factors have any order. If there are more, the factors
    of a level keep their order and stay side by side, and up to ``ordered_factors`` levels have any order. So a level in parts
    can do what a whole level can.

    >>> orders((0, 0, 0, 1))
    ((0, 1, 2, 3), (3, 0, 1, 2))
    """
    every = range(len(levels))
    if len(levels) <= CONSTANTS.ordered_factors:
        return tuple(itertools.permutations(every))
    known = sorted(set(levels))
    arranged = itertools.permutations(known) if len(known) <= CONSTANTS.ordered_factors else [known]
    return tuple(tuple(f for level in order for f in every if levels[f] == level) for order in arranged)


@lru_cache(maxsize=1 << 14)
def moves_from(sizes: tuple[int, ...], leader: State, levels: tuple[int, ...]) -> Moves:
    """The collectives from a leader, which is given by its split dims and the buffer; ``levels`` as in `orders`.

    If several lead to the same layout, the one over the fewest factors is kept; among these, the one that moves the least.
    """
    (*split, buffer), partial = leader
    rank, state = len(split) + 1, ((*split, (), buffer), partial)
    held = _part(state, sizes)
    allowed = None if len(sizes) <= CONSTANTS.ordered_factors else _dims_in(orders(levels))
    best: dict[State, tuple[int, float, StepKind, tuple[int, ...]]] = {}
    for kind, over, target in every_move(state, rank, sizes):
        if allowed is not None and not any(one.issuperset(target[0]) for one in allowed):
            continue
        fraction = _part(target, sizes) if kind == Collective.ALL_GATHER else 0.0 if kind == Collective.SLICE else held
        count = len(set(over))
        if target != state and (target not in best or (count, fraction) < best[target][:2]):
            best[target] = count, fraction, kind, over
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
    codes = [_code_of((kind, over), len(sizes)) for _, _, kind, over in best.values()]
    return Moves(
        np.array(roles, np.int64).reshape(shape),
        np.array(places, np.int64).reshape(shape),
        np.array([rank - 1 in row for row in roles], np.bool_),
        np.array(codes, np.int64),
        np.array([part for _, part, _, _ in best.values()]),
    )


@lru_cache(maxsize=64)
def _dims_in(arranged: tuple[tuple[int, ...], ...]) -> tuple[frozenset[tuple[int, ...]], ...]:
    """For each of these orders, every choice of factors in it."""
    count = len(arranged[0])
    return tuple(frozenset(c for n in range(count + 1) for c in itertools.combinations(order, n)) for order in arranged)


def _part(state: State, sizes: Sequence[int]) -> float:
    """The part of a tensor that one device holds."""
    return 1.0 / math.prod(sizes[f] for factors in state[0] for f in factors)


def _subsets(items: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for n in range(1, len(items) + 1):
        yield from itertools.combinations(items, n)


Move = tuple[StepKind, tuple[int, ...], State]
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
        if d == rank or not dims[rank]:  # elements in a row are not put together by a dim
            yield from _leaving(state, d, rank)
        if d < rank:
            for f in free:
                yield Collective.SLICE, (), _put(state, {d: (*fs, f)})
            yield from _permuted(state, d, rank, free, sizes)
    for over in _subsets(partial):
        left = tuple(f for f in partial if f not in over)
        yield Collective.ALL_REDUCE, over, _put(state, {}, left)
        for d in range(rank + 1):
            if d < rank or not dims[d]:
                yield Collective.REDUCE_SCATTER, over, _put(state, {d: dims[d] + over}, left)


def _leaving(state: State, d: int, rank: int) -> Iterator[Move]:
    """All-gathers of a dim's minormost factors, and all-to-alls that move them to another dim."""
    dims, _ = state
    for n in range(1, len(dims[d]) + 1):
        kept, gone = dims[d][:-n], dims[d][-n:]
        yield Collective.ALL_GATHER, tuple(sorted(gone)), _put(state, {d: kept})
        if d < rank:
            for e in range(rank):
                if e != d:
                    yield Collective.ALL_TO_ALL, tuple(sorted(gone)), _put(state, {d: kept, e: dims[e] + gone})


def _swapped(f: int, g: int) -> tuple[int, ...]:
    """The factors of a permute that exchanges two factors of one size."""
    first, last = sorted((f, g))
    return first, last, last, first


def _permuted(state: State, d: int, rank: int, free: Sequence[int], sizes: Sequence[int]) -> Iterator[Move]:
    """Permutes, which move the same blocks to other devices: a dim's factors reordered, or exchanged for ones of equal size."""
    dims, _ = state
    fs = dims[d]
    for order in itertools.permutations(fs):
        if order != fs:
            yield Collective.PERMUTE, exchanged(fs, order), _put(state, {d: order})
    for i, f in enumerate(fs):
        around = (fs[:i], fs[i + 1 :])
        for g in free:
            if sizes[f] == sizes[g]:
                yield Collective.PERMUTE, _swapped(f, g), _put(state, {d: (*around[0], g, *around[1])})
        for e in range(d + 1, rank):
            for j, g in enumerate(dims[e]):
                if sizes[f] == sizes[g]:
                    change = {d: (*around[0], g, *around[1]), e: (*dims[e][:j], f, *dims[e][j + 1 :])}
                    yield Collective.PERMUTE, _swapped(f, g), _put(state, change)
