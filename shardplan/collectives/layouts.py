"""The layouts of a tensor and the single collectives between them: the graph in which reshardings are paths.

A *buffer* dim, which no stored layout has, stands for the flattened and padded tensor: any tensor can be reduce-scattered over
it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardplan.ir import Layout

State = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]
Name = tuple[str, tuple[int, ...]]
"""A collective's kind and the factors that it runs over."""


@dataclass(frozen=True, slots=True, eq=False)
class Edges:
    """Collectives between states, in ascending order of (source, target); all arrays are [E].

    ``which`` is a collective's place in ``names``, ``of[name]`` are the edges of a collective; ``fraction`` is the part of the
    tensor's bytes that an edge moves.
    """

    source: NDArray[np.int64]
    target: NDArray[np.int64]
    which: NDArray[np.int64]
    fraction: NDArray[np.float64]
    names: tuple[Name, ...]
    of: Mapping[Name, NDArray[np.int64]]


class LayoutSpace:
    """All layouts of a tensor of one rank over factors of given sizes, and the single collectives between them."""

    def __init__(self, sizes: Sequence[int], rank: int) -> None:
        self.sizes = tuple(sizes)
        self.rank = rank
        self.states: tuple[State, ...] = tuple(sorted(set(_states(len(self.sizes), rank))))
        self.index: dict[State, int] = {s: i for i, s in enumerate(self.states)}
        self._layouts: dict[int, Layout] = {}
        self._renamed: dict[tuple[int, ...], NDArray[np.int64]] = {}
        self.local = 1.0 / self.splits.prod(axis=1)

    @cached_property
    def splits(self) -> NDArray[np.int64]:
        """[S, rank + 1]: into how many parts each state splits each dim (the buffer last)."""
        sizes = np.array(self.sizes, np.int64)
        return np.stack([np.where(self.roles == d, sizes, 1).prod(axis=1) for d in range(self.rank + 1)], axis=1)

    def of(self, layout: Layout) -> int:
        """The state of a layout."""
        return self.index[(*layout.dims, ()), tuple(sorted(layout.partial))]

    def layout(self, state: int) -> Layout:
        """The layout of a state (its buffer dim shows as one dim more)."""
        found = self._layouts.get(state)
        if found is None:
            dims, partial = self.states[state]
            found = self._layouts[state] = Layout(dims if dims[-1] else dims[:-1], partial)
        return found

    def of_roles(self, roles: NDArray[np.int64]) -> NDArray[np.int64]:
        """[N]: the states in which the factors have these roles [N, factors]: a dim, -1 for none, -2 for partial."""
        return self._by_roles[(roles + 2) @ (self.rank + 2) ** np.arange(len(self.sizes) - 1, -1, -1)]

    @cached_property
    def roles(self) -> NDArray[np.int64]:
        """[S, factors]: the dim that each factor splits, -1 for none, -2 for partial (the buffer is the last dim)."""
        found: list[list[int]] = []
        for dims, partial in self.states:
            row = [-1] * len(self.sizes)
            for d, fs in enumerate(dims):
                for f in fs:
                    row[f] = d
            for f in partial:
                row[f] = -2
            found.append(row)
        return np.array(found, np.int64).reshape(len(found), len(self.sizes))

    def alike(self, groups: Sequence[Sequence[int]]) -> NDArray[np.bool_]:
        """[S]: whether in a state the factors of each group split the same dim, or none, or are all partial."""
        return np.all([self.roles[:, f] == self.roles[:, g[0]] for g in groups for f in g], axis=0)

    @cached_property
    def _by_roles(self) -> NDArray[np.int64]:
        """[(rank + 2) ** factors]: the state of every combination of roles, the first factor's the major digit."""
        grid = itertools.product(range(-2, self.rank), repeat=len(self.sizes))
        return np.array([self.index[_state_of(roles, self.rank)] for roles in grid], np.int64)

    @cached_property
    def stored(self) -> tuple[int, ...]:
        """The states that a tensor may be stored in: nothing partial, no buffer, each dim's factors slowest first."""
        return tuple(
            i
            for i, (dims, partial) in enumerate(self.states)
            if not partial and not dims[-1] and all(d == tuple(sorted(d)) for d in dims)
        )

    @cached_property
    def deferred(self) -> tuple[int, ...]:
        """Those of a tensor that may stay partial too: the stored ones, and partial ones likewise."""
        late = (
            i
            for i, (dims, partial) in enumerate(self.states)
            if partial and not dims[-1] and all(d == tuple(sorted(d)) for d in dims)
        )
        return (*self.stored, *late)

    def edge(self, before: int, after: int) -> tuple[tuple[str, tuple[int, ...]], float]:
        """The collective of an edge and the bytes that it moves, as a fraction of the tensor's."""
        edges = self.edges
        at = int(np.flatnonzero((edges.source == before) & (edges.target == after))[0])
        return edges.names[int(edges.which[at])], float(edges.fraction[at])

    @cached_property
    def edges(self) -> Edges:
        """The collectives between states; of several between the same two, the one over the fewest factors.

        Those from states that differ in the names of dims alone are found once.
        """
        led = [self.leader(s, (0,) * self.rank) for s in range(len(self.states))]
        numbers: dict[Name, int] = {}
        rows: list[tuple[int, int, float]] = []  # (target, which, fraction) of each edge from a leader
        spans: dict[int, range] = {}
        for leader in dict.fromkeys(leader for leader, _ in led):
            found = self._edges_from(leader).items()
            spans[leader] = range(len(rows), len(rows) + len(found))
            rows += [(target, numbers.setdefault(name, len(numbers)), fraction) for target, (fraction, name) in found]
        source = np.repeat(np.arange(len(led)), [len(spans[leader]) for leader, _ in led])
        every = np.array(rows, np.float64).reshape(-1, 3)[[row for leader, _ in led for row in spans[leader]]]
        target, which, fraction = every[:, 0].astype(np.int64), every[:, 1].astype(np.int64), every[:, 2]
        called = np.array([(-2, -1, *names, self.rank) for _, names in led], np.int64)  # each leader's roles in each state
        target = self._coded(called[source[:, None], self.roles[target] + 2], self._places[target])
        order = np.lexsort((target, source))
        which = which[order]
        of = {name: np.flatnonzero(which == c) for name, c in numbers.items() if name[0] != "slice"}
        return Edges(source[order], target[order], which, fraction[order], tuple(numbers), of)

    def _edges_from(self, i: int) -> dict[int, tuple[float, Name]]:
        """For each state that one collective leads to from this one: the part of the tensor that is moved, which collective."""
        best: dict[int, tuple[float, Name]] = {}
        for kind, over, target in _moves(self.states[i], self.rank, self.sizes):
            j = self.index.get(target)
            if j is None or j == i:
                continue
            fraction = float(self.local[j]) if kind == "all_gather" else 0.0 if kind == "slice" else float(self.local[i])
            old = best.get(j)
            if old is None or (len(over), fraction) < (len(old[1][1]), old[0]):
                best[j] = fraction, (kind, over)
        return best

    # -- dims by other names ---------------------------------------------------------------------------------------

    def leader(self, state: int, classes: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """(the state that stands for all those which differ from this one in the names of dims alone, the name in this one of
        each of its dims). ``classes[d]``: dims of equal numbers may change names.
        """
        dims, partial = self.states[state]
        names = list(range(self.rank))
        for c in sorted(set(classes)):
            own = [d for d in range(self.rank) if classes[d] == c]
            for d, name in zip(own, sorted(own, key=lambda e: dims[e], reverse=True), strict=True):
                names[d] = name
        return self.index[(*(dims[d] for d in names), dims[-1]), partial], tuple(names)

    def renamed(self, names: tuple[int, ...]) -> NDArray[np.int64]:
        """[S]: what each state becomes when its dim d is called ``names[d]``."""
        found = self._renamed.get(names)
        if found is None:
            new = np.array((-2, -1, *names, self.rank), np.int64)
            found = self._coded(new[self.roles + 2], self._places)
            found.setflags(write=False)
            self._renamed[names] = found
        return found

    @cached_property
    def _places(self) -> NDArray[np.int64]:
        """[S, factors]: the place of each factor among those of its dim."""
        found = np.zeros((len(self.states), len(self.sizes)), np.int64)
        for s, (dims, _) in enumerate(self.states):
            for fs in dims:
                for place, f in enumerate(fs):
                    found[s, f] = place
        return found

    @cached_property
    def _codes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(numbers that tell states apart by roles and places, in ascending order, their states)."""
        codes = self._code(self.roles, self._places)
        order = np.argsort(codes)
        return codes[order], order

    def _code(self, roles: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        count = len(self.sizes)
        return ((roles + 2) * count + places) @ ((self.rank + 3) * count) ** np.arange(count, dtype=np.int64)

    def _coded(self, roles: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """[...]: the states with these roles and places, [..., factors]."""
        codes, states = self._codes
        return states[np.searchsorted(codes, self._code(roles, places))]


def _state_of(roles: Sequence[int], rank: int) -> State:
    dims = tuple(tuple(f for f, r in enumerate(roles) if r == d) for d in range(rank + 1))
    return dims, tuple(f for f, r in enumerate(roles) if r == -2)


def _states(factors: int, rank: int) -> Iterator[State]:
    # roles: -2 partial, -1 replicated, a dim, the buffer (rank)
    ordered = factors <= 3
    for roles in itertools.product(range(-2, rank + 1), repeat=factors):
        partial = tuple(f for f, r in enumerate(roles) if r == -2)
        buckets = [tuple(f for f, r in enumerate(roles) if r == d) for d in range(rank + 1)]
        orders = [list(itertools.permutations(b)) if ordered and d < rank else [b] for d, b in enumerate(buckets)]
        for dims in itertools.product(*orders):
            yield dims, partial


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


def _moves(state: State, rank: int, sizes: Sequence[int]) -> Iterator[Move]:
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
