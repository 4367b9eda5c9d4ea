"""Resharding: the best program of collectives that moves a tensor from one layout to another, priced whole.

All layouts of a tensor are the nodes of a graph and collectives its edges (all-gather, local slice, all-to-all, permute,
all-reduce, reduce-scatter over any set of factors); a program is a path, and the price of a pair of layouts is the shortest one.
So an all-reduce over a hierarchy is found as reduce-scatter, all-reduce, all-gather where that is cheaper (P2, section 3), and a
gather of a major factor as a permute and a gather. A *buffer* dim, which no stored layout has, stands for the flattened and
padded tensor: any tensor can be reduce-scattered over it.

An all-reduce and an all-gather may also be programs whose states between the steps no layout describes, such as a Reduce to
masters, an AllReduce among them and a Broadcast. So the price of these edges is the least of the collective's own and of the best
program's of `shardplan.collectives.envelope`, which the step then names.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import dijkstra

from shardplan.collectives.envelope import envelope
from shardplan.collectives.ranking import entries, names_of
from shardplan.collectives.states import Goal
from shardplan.cost.network import Collective, Network
from shardplan.ir import Layout

KINDS = ("slice", "all_gather", "all_to_all", "permute", "all_reduce", "reduce_scatter")

PADDING = 8
"""A dim may be padded inside the step by at most one part in this many."""

_SLICE_S = 1e-12  # a local slice moves nothing; the graph library reads an exact zero as no edge


@dataclass(frozen=True, slots=True)
class Step:
    """One collective of a resharding program: ``nbytes`` as `Network.lines` counts them, a slice has none.

    ``program`` is the reduction program that does what the collective says, in the paper's words over the cluster's levels;
    empty where it is the collective itself.
    """

    kind: str
    over: tuple[int, ...]
    nbytes: float
    before: Layout
    after: Layout
    seconds: float
    program: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Ways:
    """The alternatives for one collective: rows of (latency_s, seconds_per_byte) [A, 2], and the program of each.

    ``ranked`` are the same rows with as many picoseconds as a program has steps on top, by which equals are told apart.
    """

    lines: NDArray[np.float64]
    ranked: NDArray[np.float64]
    programs: tuple[str, ...]

    def best(self, nbytes: float) -> tuple[float, str]:
        """The seconds of the best alternative, and its program."""
        which = int(np.argmin(self.ranked[:, 0] + self.ranked[:, 1] * nbytes))
        return float(self.lines[which, 0] + self.lines[which, 1] * nbytes), self.programs[which]


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
        self.local = np.array([1.0 / self._product(f for d in dims for f in d) for dims, _ in self.states])

    def _product(self, factors: Iterator[int]) -> float:
        result = 1.0
        for f in factors:
            result *= self.sizes[f]
        return result

    @cached_property
    def splits(self) -> NDArray[np.int64]:
        """[S, rank + 1]: into how many parts each state splits each dim (the buffer last)."""
        return np.array([[int(self._product(iter(d))) for d in dims] for dims, _ in self.states], dtype=np.int64)

    def of(self, layout: Layout) -> int:
        """The state of a layout."""
        return self.index[(*layout.dims, ()), tuple(sorted(layout.partial))]

    def layout(self, state: int) -> Layout:
        """The layout of a state (its buffer dim shows as one dim more)."""
        dims, partial = self.states[state]
        return Layout(dims if dims[-1] else dims[:-1], partial)

    @cached_property
    def stored(self) -> tuple[int, ...]:
        """The states that a tensor may be stored in: nothing partial, no buffer, each dim's factors slowest first."""
        return tuple(
            i
            for i, (dims, partial) in enumerate(self.states)
            if not partial and not dims[-1] and all(d == tuple(sorted(d)) for d in dims)
        )

    def edge(self, before: int, after: int) -> tuple[tuple[str, tuple[int, ...]], float]:
        """The collective of an edge and the bytes that it moves, as a fraction of the tensor's."""
        edges = self.edges
        at = int(np.flatnonzero((edges.source == before) & (edges.target == after))[0])
        return edges.names[int(edges.which[at])], float(edges.fraction[at])

    @cached_property
    def edges(self) -> Edges:
        """The collectives between states; of several between the same two, the one over the fewest factors."""
        numbers: dict[Name, int] = {}
        names: list[Name] = []
        best: dict[tuple[int, int], tuple[int, float, int]] = {}
        for i, state in enumerate(self.states):
            for kind, over, target in _moves(state, self.rank, self.sizes):
                j = self.index.get(target)
                if j is None or j == i:
                    continue
                name = (kind, over)
                which = numbers.get(name)
                if which is None:
                    which = numbers[name] = len(names)
                    names.append(name)
                fraction = self.local[j] if kind == "all_gather" else 0.0 if kind == "slice" else self.local[i]
                found = (len(over), float(fraction), which)
                old = best.get((i, j))
                if old is None or found[:2] < old[:2]:
                    best[i, j] = found
        keys = sorted(best)
        source, target = np.array(keys, dtype=np.int64).reshape(-1, 2).T
        which = np.array([best[k][2] for k in keys], np.int64)
        of = {name: np.flatnonzero(which == c) for c, name in enumerate(names) if name[0] != "slice"}
        return Edges(source, target, which, np.array([best[k][1] for k in keys]), tuple(names), of)


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
    dims, partial = state
    return tuple(changes.get(d, fs) for d, fs in enumerate(dims)), partial if left is None else left


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


_Moves = tuple[int, bytes, float, bool]
"""What prices of moves depend on: rank, legal states, bytes of the whole tensor, direction."""


class Resharder:
    """Prices and programs of resharding on one network."""

    def __init__(self, network: Network, sizes: Sequence[int]) -> None:
        self.network = network
        self.sizes = tuple(sizes)
        self._spaces: dict[int, LayoutSpace] = {}
        self._ways: dict[Name, Ways] = {}
        self._masks: dict[tuple[int, ...], bytes] = {}
        self._rows: dict[tuple[int, bytes, float, bool, int], tuple[NDArray[np.float64], NDArray[np.int32]]] = {}
        self._sweeps: dict[_Moves, tuple[NDArray[np.float64], NDArray[np.int32]]] = {}
        self._graphs: dict[_Moves, csr_matrix] = {}

    def space(self, rank: int) -> LayoutSpace:
        """The layouts of tensors of a rank."""
        if rank not in self._spaces:
            self._spaces[rank] = LayoutSpace(self.sizes, rank)
        return self._spaces[rank]

    def legal(self, shape: Sequence[int], *, pad: bool) -> NDArray[np.bool_]:
        """[S]: the states whose split dims divide evenly, or (``pad``) waste at most an eighth in their padded last block."""
        splits = self.space(len(shape)).splits
        sizes = np.array([*shape, 0])
        if pad:
            return np.all((-(-sizes // splits) * splits - sizes) * PADDING <= sizes, axis=1)
        return np.all(sizes % splits == 0, axis=1)

    def seconds(self, kind: str, over: tuple[int, ...], nbytes: float) -> float:
        """One collective's time: the best of its algorithms and programs."""
        return _SLICE_S if kind == "slice" else self._way(kind, over).best(nbytes)[0]

    def _way(self, kind: str, over: tuple[int, ...]) -> Ways:
        key = (kind, over)
        if key not in self._ways:
            own = self.network.lines(cast(Collective, kind), over)
            steps, programs = [1] * len(own), [""] * len(own)
            lines = [own]
            if kind == "all_reduce" or (kind == "all_gather" and len(over) > 1):
                found = envelope(self.network, over, cast(Goal, kind))
                levels = names_of(self.network, entries(self.network, over))
                lines.append(found.lines)
                # what a path of edges says too is better said so: one step more
                steps += [len(program.steps) + 1 for program in found.programs]
                programs += [program.text(levels) for program in found.programs]
            rows = np.concatenate(lines)
            ranked = rows + np.stack([np.array(steps) * _SLICE_S, np.zeros(len(rows))], axis=1)
            self._ways[key] = Ways(rows, ranked, tuple(programs))
        return self._ways[key]

    def prices(self, shape: Sequence[int], nbytes: float, states: Sequence[int], *, into: bool = False) -> NDArray[np.float64]:
        """[len(states), S]: seconds from each of ``states`` to every state, or (``into``) from every state to each of them.

        Infinite where no program leads.
        """
        key = self._key(shape, nbytes, into)
        if len(self.sizes) > 2:
            return np.stack([self._row(key, s)[0] for s in states])
        return self._swept(key)[0][list(states)]

    def _key(self, shape: Sequence[int], nbytes: float, into: bool) -> _Moves:
        shape = tuple(shape)
        if shape not in self._masks:
            self._masks[shape] = self.legal(shape, pad=True).tobytes()
        return len(shape), self._masks[shape], nbytes, into

    def _row(self, key: _Moves, state: int) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        """[S], [S]: the seconds between one state and every other, and the state before each on the way."""
        if len(self.sizes) <= 2:
            distance, before = self._swept(key)
            return distance[state], before[state]
        row = self._rows.get((*key, state))
        if row is None:
            distance, before = dijkstra(self._graph(key), indices=np.array([state]), return_predecessors=True)
            row = self._rows[(*key, state)] = (distance[0], before[0])
        return row

    def _swept(self, key: _Moves) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        """`_row` for every state at once, which is cheap where there are few of them."""
        found = self._sweeps.get(key)
        if found is None:
            found = self._sweeps[key] = dijkstra(self._graph(key), return_predecessors=True)
        return found

    def _graph(self, key: _Moves) -> csr_matrix:
        if key not in self._graphs:
            rank, mask, nbytes, into = key
            graph = self._edges(self.space(rank), np.frombuffer(mask, np.bool_), nbytes)
            self._graphs[key] = graph.T.tocsr() if into else graph
        return self._graphs[key]

    def _edges(self, space: LayoutSpace, mask: NDArray[np.bool_], nbytes: float) -> csr_matrix:
        edges = space.edges
        cost = np.full(len(edges.source), _SLICE_S)
        for (kind, over), at in edges.of.items():
            rows = self._way(kind, over).ranked
            cost[at] = np.min(rows[:, 0] + rows[:, 1] * (edges.fraction[at, None] * nbytes), axis=1)
        keep = mask[edges.source] & mask[edges.target]
        n = len(space.states)
        starts = np.concatenate([[0], np.cumsum(np.bincount(edges.source[keep], minlength=n))])
        return csr_matrix((cost[keep], edges.target[keep], starts), shape=(n, n))

    def program(self, shape: Sequence[int], nbytes: float, before: int, after: int) -> tuple[Step, ...]:
        """The cheapest program from one state to another."""
        if before == after:
            return ()
        distance, previous = self._row(self._key(shape, nbytes, False), before)
        assert np.isfinite(distance[after]), "no program leads there"
        space = self.space(len(shape))
        path = [after]
        while path[-1] != before:
            path.append(int(previous[path[-1]]))
        path.reverse()
        steps: list[Step] = []
        for a, b in itertools.pairwise(path):
            (kind, over), fraction = space.edge(a, b)
            moved = fraction * nbytes
            took, chosen = (0.0, "") if kind == "slice" else self._way(kind, over).best(moved)
            steps.append(Step(kind, over, moved, space.layout(a), space.layout(b), took, chosen))
        return tuple(steps)
