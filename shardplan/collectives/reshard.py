"""Resharding: the best program of collectives that moves a tensor from one layout to another, priced whole.

All layouts of a tensor are the nodes of a graph, and collectives are its edges (all-gather, local slice, all-to-all, permute,
all-reduce, reduce-scatter over any set of factors). A program is a path; the price between two layouts is the length of the
shortest path. So an all-reduce over a hierarchy becomes reduce-scatter, all-reduce, all-gather where that is cheaper (P2,
section 3), and a gather of a major factor becomes a permute and a gather. The graph is in `shardplan.collectives.layouts`.

An all-reduce, all-gather or reduce-scatter may also be a program with intermediate states that no layout describes, such as a
Reduce to masters, an AllReduce among them and a Broadcast, or one that takes a level apart. So the price of such an edge is the
lower of two prices: the collective's own, and the price of the best program of `shardplan.collectives.divided`. Where the
program is cheaper, the step names it.

Where a level is taken apart into several factors, a pair of layouts is priced over the fewest parts in which both can be written
(`shardplan.collectives.parts`), and so is a collective. So its price does not depend on parts that it treats alike.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import dijkstra

from shardplan.collectives.divided import best_programs
from shardplan.collectives.layouts import LayoutSpace
from shardplan.collectives.moves import Name
from shardplan.collectives.parts import in_runs, open_seams, runs, seams
from shardplan.collectives.states import Goal
from shardplan.collectives.step import BUNDLED, Step, StepKind
from shardplan.constants import CONSTANTS
from shardplan.cost.network import Network
from shardplan.cost.wire import WireBytes
from shardplan.ir import Collective, Factor, Layout
from shardplan.mesh.factoring import joined


@dataclass(frozen=True, slots=True, eq=False)
class Ways:
    """The alternatives for one collective: rows of (latency_s, seconds_per_byte) [A, 2], and the program of each.

    ``ranked`` are the same rows with a few picoseconds added, more for longer programs, to break ties.
    """

    lines: NDArray[np.float64]
    ranked: NDArray[np.float64]
    programs: tuple[str, ...]

    def best(self, nbytes: float) -> tuple[float, str]:
        """The seconds of the best alternative, and its program."""
        which = int(np.argmin(self.ranked[:, 0] + self.ranked[:, 1] * nbytes))
        return float(self.lines[which, 0] + self.lines[which, 1] * nbytes), self.programs[which]


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Edges row by row: their indices among all edges [K], their columns [K], and the start of each row [S + 1]."""

    which: NDArray[np.int64]
    columns: NDArray[np.int32]
    starts: NDArray[np.int32]


Family = dict[tuple[Factor, ...], "Resharder"]

_PriceKey = tuple[int, bytes, float, bool]
"""The key of prices: rank of the space, legal states, bytes of the whole tensor, direction."""


def split_dims(shape: Sequence[int]) -> list[int]:
    """The dims of a tensor that can be split: those whose size is not 1."""
    return [d for d, n in enumerate(shape) if n != 1]


class Resharder:
    """Prices and programs of resharding on one network.

    ``family`` holds the resharders of one cluster by their factors; resharders of fewer factors are shared through it.
    """

    def __init__(self, network: Network | WireBytes, sizes: Sequence[int], family: Family | None = None) -> None:
        self.network = network
        self.sizes = tuple(sizes)
        self._family: Family = {} if family is None else family
        self._family.setdefault(network.factors, self)
        self._seams = seams(network.factors)
        self._every = (1 << len(self._seams)) - 1
        # by rank, the seams that each state keeps open; by rank and open seams, each state over the runs that are left
        self._open: dict[int, NDArray[np.int64]] = {}
        self._in_runs: dict[tuple[int, int], NDArray[np.int64]] = {}
        self._spaces: dict[int, LayoutSpace] = {}
        self._layouts: dict[tuple[tuple[int, ...], int, int], Layout] = {}
        self._ways: dict[Name, Ways] = {}
        self._full: dict[Name, float] = {}
        self._with: dict[tuple[StepKind, tuple[int, ...], str], list[list[float]]] = {}
        self._legal: dict[tuple[tuple[int, ...], bool], NDArray[np.bool_]] = {}
        self._masks: dict[tuple[int, ...], bytes] = {}
        # by rank and legal states: each state's leader, and its names of the leader's dims
        self._leader_of: dict[tuple[int, bytes], tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        # price rows of leaders, with predecessors, and price rows of all states
        self._leader_rows: dict[_PriceKey, dict[int, tuple[NDArray[np.float64], NDArray[np.int32]]]] = {}
        self._rows: dict[_PriceKey, dict[int, NDArray[np.float64]]] = {}
        self._tables: dict[_PriceKey, tuple[NDArray[np.float64], NDArray[np.int32]]] = {}
        # graphs of edge prices, the edges between legal states, and the lines of all edges of a rank
        self._graphs: dict[_PriceKey, csr_matrix] = {}
        self._legal_edges: dict[tuple[int, bytes, bool], _Rows] = {}
        self._edge_lines: dict[int, tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]] = {}
        self._edge_kinds: dict[int, list[tuple[Name, float]]] = {}  # with the part of the tensor that they move

    def space(self, shape: Sequence[int]) -> LayoutSpace:
        """The layouts of tensors of a shape. Dims of one element are never split, so the space leaves them out."""
        return self._space(len(split_dims(shape)))

    def _space(self, rank: int) -> LayoutSpace:
        if rank not in self._spaces:
            self._spaces[rank] = LayoutSpace(self.sizes, rank, [f.level for f in self.network.factors])
        return self._spaces[rank]

    def layout(self, shape: Sequence[int], state: int) -> Layout:
        """A state of a shape's space as a layout of all dims; a buffer that is split appears as an extra last dim."""
        own = split_dims(shape)
        result = self._space(len(own)).layout(state)
        if len(own) == len(shape):
            return result
        key = tuple(own), len(shape), state
        if key not in self._layouts:
            dims: list[tuple[int, ...]] = [()] * len(shape)
            for d, factors in zip(own, result.dims, strict=False):
                dims[d] = factors
            self._layouts[key] = Layout((*dims, *result.dims[len(own) :]), result.partial)
        return self._layouts[key]

    def state(self, shape: Sequence[int], layout: Layout) -> int:
        """The state of a layout.

        Raises:
            KeyError: if there is no such layout.
        """
        own = split_dims(shape)
        if any(layout.dims[d] for d in range(len(shape)) if d not in own):
            raise KeyError(layout)
        return self._space(len(own)).of(Layout(tuple(layout.dims[d] for d in own), layout.partial))

    def legal(self, shape: Sequence[int], *, pad: bool) -> NDArray[np.bool_]:
        """[S]: whether all split dims of a state divide evenly or (``pad``) need padding of at most an eighth.

        Every device has elements of each split dim; tensors without elements are not split.
        """
        key = tuple(shape), pad
        result = self._legal.get(key)
        if result is None:
            splits, sizes = self.space(shape).splits, np.array([*(shape[d] for d in split_dims(shape)), 0])
            if 0 in shape:
                result = np.all(splits == 1, axis=1)
            elif pad:
                result = np.all((-(-sizes // splits) * splits - sizes) * CONSTANTS.padding <= sizes, axis=1)
                result &= np.all(splits[:, :-1] <= sizes[:-1], axis=1)  # no device without elements
            else:
                result = np.all(sizes % splits == 0, axis=1)
            result.setflags(write=False)
            self._legal[key] = result
        return result

    def seconds(self, kind: StepKind, over: tuple[int, ...], nbytes: float) -> float:
        """One collective's time: the best of its algorithms and programs."""
        return CONSTANTS.slice_s if kind == Collective.SLICE else self._way(kind, over).best(nbytes)[0]

    def seconds_with(self, kind: StepKind, over: tuple[int, ...], nbytes: float, program: str) -> float:
        """One collective's time as this program (empty: the collective itself, by the best of its algorithms)."""
        key = kind, over, program
        if key not in self._with:
            way = self._way(kind, over)
            self._with[key] = way.lines[[text == program for text in way.programs]].tolist()
        return min(latency_s + per_byte * nbytes for latency_s, per_byte in self._with[key])

    def full_bytes(self, kind: StepKind, over: tuple[int, ...]) -> float:
        """The bytes at which a bundle has gained what it can; infinite where bytes take no time."""
        if (kind, over) not in self._full:
            slope = self.seconds(kind, over, CONSTANTS.wide_bytes) / CONSTANTS.wide_bytes
            self._full[kind, over] = self.seconds(kind, over, 0.0) / slope / CONSTANTS.latency_share if slope > 0 else math.inf
        return self._full[kind, over]

    def bundled_s(self, kind: StepKind, over: tuple[int, ...], nbytes: float, times: float) -> float:
        """The seconds of one collective as its part of a bundle of ``times`` its bytes, or of as many as fill it.

        Infinite for one that travels alone.
        """
        if kind not in BUNDLED or not nbytes:
            return math.inf
        whole = max(nbytes, min(nbytes * times, self.full_bytes(kind, over)))
        return self.seconds(kind, over, whole) * nbytes / whole

    def program_for(self, kind: StepKind, over: tuple[int, ...], nbytes: float) -> str:
        """The program that is fastest for one collective of these bytes; empty for the collective itself."""
        return self._way(kind, over).best(nbytes)[1]

    def _way(self, kind: StepKind, over: tuple[int, ...]) -> Ways:
        key = (kind, over)
        if key not in self._ways and (apart := self._apart(kind, over)) != self._every:
            fewer, of = self._fewer(apart)
            run_of = {run[0]: g for g, run in enumerate(of)}
            self._ways[key] = fewer._way(kind, tuple(run_of[f] for f in over if f in run_of))
        if key not in self._ways:
            rows = self.network.lines(kind, over)
            steps, programs = [1] * len(rows), [""] * len(rows)
            goals: list[Goal] = [goal for goal in BUNDLED if goal == kind]
            if goals and isinstance(self.network, Network):
                found = best_programs(self.network, over, goals[0])
                rows = np.concatenate([rows, np.array([(p.latency_s, p.seconds_per_byte) for p in found])])
                # one step more, so that an equal path of edges wins
                steps += [len(p.program.steps) + 1 for p in found]
                programs += [p.text for p in found]
            ranked = rows + np.stack([np.array(steps) * CONSTANTS.slice_s, np.zeros(len(rows))], axis=1)
            self._ways[key] = Ways(rows, ranked, tuple(programs))
        return self._ways[key]

    def prices(self, shape: Sequence[int], nbytes: float, states: Sequence[int], *, into: bool = False) -> NDArray[np.float64]:
        """[len(states), S]: seconds from each of ``states`` to every state, or (``into``) from every state to each of them.

        Infinite where there is no program.
        """
        key = self._key(shape, nbytes, into)
        if len(self.sizes) <= 2 and not self._seams:
            return self._table(key)[0][list(states)]
        rows = self._rows.setdefault(key, {})
        missing = [s for s in dict.fromkeys(states) if s not in rows]
        if missing:
            filled = self._table(key)[0][missing] if len(self.sizes) <= 2 else self._fill(key, missing)
            if self._seams:
                filled = self._over_fewer(shape, key, missing, filled)
            filled.setflags(write=False)  # the cache holds it
            rows.update(zip(missing, filled, strict=True))
            if len(missing) == len(states):
                return filled
        return np.stack([rows[s] for s in states])

    def direct(
        self, shape: Sequence[int], nbytes: float, states: Sequence[int], *, into: bool = False
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The moves between ``states`` and others, as `prices` has them, whose cheapest program is one collective.

        [M] each: the row of the move, its column, and its kind in `edge_kinds`.
        """
        edges, prices = self._between(self._key(shape, nbytes, into)), self.prices(shape, nbytes, states, into=into)
        latency_s, slope, kind = self._lines(self.space(shape))
        starts, ends = edges.starts[list(states)], edges.starts[np.array(states) + 1]
        counts = ends - starts
        rows = np.repeat(np.arange(len(states)), counts)
        at = np.arange(len(rows)) + np.repeat(starts - np.cumsum(counts) + counts, counts)
        columns, kinds = edges.columns[at].astype(np.int64), kind[edges.which[at]]
        direct = np.min(latency_s + slope * nbytes, axis=0)[kinds] <= prices[rows, columns] * (1 + CONSTANTS.rounding)
        return rows[direct], columns[direct], kinds[direct]

    def edge_kinds(self, shape: Sequence[int]) -> Sequence[tuple[Name, float]]:
        """The kinds of edges between the layouts of a shape: the collective, and the part of the tensor that it moves."""
        space = self.space(shape)
        self._lines(space)
        return self._edge_kinds[space.rank]

    # -- over fewer factors --------------------------------------------------------------------------------------------

    def _apart(self, kind: StepKind, over: Sequence[int]) -> int:
        """The seams that a collective tells apart, as bits: between a factor of it and one outside, or where order matters."""
        orders = (over[: len(over) // 2], over[len(over) // 2 :]) if kind == Collective.PERMUTE else (over,)
        in_order = kind in (Collective.PERMUTE, Collective.SHIFT)
        return sum(1 << k for k, i in enumerate(self._seams) if not all(_together(one, i, in_order=in_order) for one in orders))

    def _fewer(self, apart: int) -> tuple[Resharder, tuple[tuple[int, ...], ...]]:
        """The resharder with only these seams open, and the runs of factors that are its factors."""
        closed = frozenset(i for k, i in enumerate(self._seams) if not apart >> k & 1)
        of = runs(len(self.sizes), closed)
        factors = joined(self.network.cluster, self.network.factors, of)
        if factors not in self._family:
            Resharder(self.network.over(factors), [f.size for f in factors], self._family)
        return self._family[factors], of

    def _open_seams(self, rank: int) -> NDArray[np.int64]:
        """[S]: the seams that each layout keeps open, as bits."""
        if rank not in self._open:
            self._open[rank] = open_seams(self._space(rank), self._seams)
        return self._open[rank]

    def _states_over(self, rank: int, apart: int) -> NDArray[np.int64]:
        """[S]: each state in the space of the resharder with only these seams open; -1 where it keeps others open."""
        if (rank, apart) not in self._in_runs:
            fewer, of = self._fewer(apart)
            self._in_runs[rank, apart] = in_runs(self._space(rank), fewer._space(rank), of)
        return self._in_runs[rank, apart]

    def _over_fewer(
        self, shape: Sequence[int], key: _PriceKey, states: Sequence[int], own: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """[len(states), S]: these price rows, with the prices of every pair over the fewest factors that tell both apart."""
        rank, _, nbytes, into = key
        open_ = self._open_seams(rank)
        result, mine = own.copy(), open_[list(states)]
        for apart in range(self._every):
            rows = np.flatnonzero((mine & ~apart) == 0)
            if not len(rows):
                continue
            fewer, _ = self._fewer(apart)
            at = self._states_over(rank, apart)
            prices = fewer.prices(shape, nbytes, at[np.array(states)[rows]].tolist(), into=into)
            for own_apart in np.unique(mine[rows]).tolist():
                some = np.flatnonzero(mine[rows] == own_apart)
                columns = np.flatnonzero((open_ | own_apart) == apart)
                result[np.ix_(rows[some], columns)] = prices[np.ix_(some, at[columns])]
        return result

    def _key(self, shape: Sequence[int], nbytes: float, into: bool) -> _PriceKey:
        shape = tuple(shape)
        if shape not in self._masks:
            self._masks[shape] = self.legal(shape, pad=True).tobytes()
        return len(split_dims(shape)), self._masks[shape], nbytes, into

    def _row(self, key: _PriceKey, state: int) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        """[S], [S]: the seconds between one state and every other, and the predecessor of each on the path."""
        if len(self.sizes) <= 2:
            distance, before = self._table(key)
            return distance[state], before[state]
        leaders, names_in = self._leaders(key)
        leader, names = int(leaders[state]), tuple(names_in[state].tolist())
        if leader not in self._leader_rows.get(key, {}):
            self._fill(key, (state,))
        distance, before = self._leader_rows[key][leader]
        space = self._space(key[0])
        new, old = space.renamed(names), space.renamed(_inverse(names))
        return distance[old], np.where(before >= 0, new[before * (before >= 0)], before)[old]

    def _fill(self, key: _PriceKey, states: Sequence[int]) -> NDArray[np.float64]:
        """[len(states), S]: the price rows of these states over the factors themselves, once for all states with one leader."""
        leaders, names_in = self._leaders(key)
        state_leaders: list[int] = leaders[list(states)].tolist()
        leader_rows = self._leader_rows.setdefault(key, {})
        missing = [s for s in dict.fromkeys(state_leaders) if s not in leader_rows]
        if missing:
            distances, before = _shortest(self._graph(key), np.array(missing))
            leader_rows.update(zip(missing, zip(distances, before, strict=True), strict=True))
        result = np.array([leader_rows[leader][0] for leader in state_leaders])
        others = [i for i, (state, leader) in enumerate(zip(states, state_leaders, strict=True)) if state != leader]
        if others:
            space, names = self._space(key[0]), names_in[[states[i] for i in others]].tolist()
            old = np.array([space.renamed(_inverse(tuple(dim_names))) for dim_names in names])
            result[others] = np.take_along_axis(result[others], old, axis=1)
        return result

    def _leaders(self, key: _PriceKey) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """`LayoutSpace.leaders`, where dims with the same legal splits may exchange names."""
        result = self._leader_of.get(key[:2])
        if result is None:
            space, mask = self._space(key[0]), np.frombuffer(key[1], np.bool_)
            alone = [(space.splits > 1).sum(axis=1) == (space.splits[:, d] > 1) for d in range(key[0])]
            kinds = [mask[alone[d] & (space.splits[:, d] > 1)].tobytes() for d in range(key[0])]
            result = self._leader_of[key[:2]] = space.leaders(tuple(kinds.index(kind) for kind in kinds))
        return result

    def _table(self, key: _PriceKey) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        """`_row` for all states at once, which is cheap where there are few."""
        result = self._tables.get(key)
        if result is None:
            result = self._tables[key] = _shortest(self._graph(key), None)
        return result

    def _graph(self, key: _PriceKey) -> csr_matrix:
        """[S, S]: the price of each edge between legal states, from row to column, or (``into``) from column to row."""
        if key not in self._graphs:
            rank, _, nbytes, _ = key
            latency_s, slope, kind = self._lines(self._space(rank))
            edges = self._between(key)
            cost = np.min(latency_s + slope * nbytes, axis=0)[kind[edges.which]]
            n = len(edges.starts) - 1
            self._graphs[key] = csr_matrix((cost, edges.columns, edges.starts), shape=(n, n))
        return self._graphs[key]

    def _between(self, key: _PriceKey) -> _Rows:
        rank, legal, _, into = key
        if (rank, legal, into) not in self._legal_edges:
            edges, mask = self._space(rank).edges, np.frombuffer(legal, np.bool_)
            rows, columns = (edges.target, edges.source) if into else (edges.source, edges.target)
            kept = np.flatnonzero(mask[rows] & mask[columns])
            kept = kept[np.argsort(rows[kept], kind="stable")]
            starts = np.concatenate([[0], np.cumsum(np.bincount(rows[kept], minlength=len(mask)))])
            # the graph library takes 32-bit indices
            self._legal_edges[rank, legal, into] = _Rows(kept, columns[kept].astype(np.int32), starts.astype(np.int32))
        return self._legal_edges[rank, legal, into]

    def _lines(self, space: LayoutSpace) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
        """([A, K], [A, K]): latency and seconds per byte of the whole tensor, for each alternative and kind of edge; [E]: the
        kind of each edge. Edges of one kind are the same collective of the same part of the tensor.
        """
        result = self._edge_lines.get(space.rank)
        if result is None:
            edges = space.edges
            parts, part = np.unique(edges.fraction, return_inverse=True)
            kind = edges.which * len(parts) + part
            known = np.flatnonzero(np.bincount(kind))
            self._edge_kinds[space.rank] = [
                (edges.names[code // len(parts)], parts[code % len(parts)]) for code in known.tolist()
            ]
            ways = [
                np.array([(CONSTANTS.slice_s, 0.0)]) if name[0] == Collective.SLICE else self._way(*name).ranked
                for name in edges.names
            ]
            alternatives = np.arange(max(map(len, ways), default=1))
            latency_s, slope = np.zeros((2, len(alternatives), len(known)))
            for column, code in enumerate(known.tolist()):
                which, at = divmod(code, len(parts))
                own = ways[which][np.minimum(alternatives, len(ways[which]) - 1)]  # repeats the last one
                latency_s[:, column], slope[:, column] = own[:, 0], own[:, 1] * parts[at]
            result = self._edge_lines[space.rank] = latency_s, slope, np.searchsorted(known, kind)
        return result

    def program(self, shape: Sequence[int], nbytes: float, before: int, after: int) -> tuple[Step, ...]:
        """The cheapest program from one state to another."""
        if before == after:
            return ()
        rank = len(split_dims(shape))
        open_ = self._open_seams(rank)
        if (apart := int(open_[before] | open_[after])) != self._every:
            fewer, of = self._fewer(apart)
            at = self._states_over(rank, apart)
            return tuple(_in_parts(s, of) for s in fewer.program(shape, nbytes, int(at[before]), int(at[after])))
        distance, previous = self._row(self._key(shape, nbytes, False), before)
        assert np.isfinite(distance[after]), "there is no program to this state"
        space = self.space(shape)
        path = [after]
        while path[-1] != before:
            path.append(int(previous[path[-1]]))
        path.reverse()
        steps: list[Step] = []
        for a, b in itertools.pairwise(path):
            (kind, over), fraction = space.edge(a, b)
            moved = fraction * nbytes
            duration_s, program_text = (0.0, "") if kind == Collective.SLICE else self._way(kind, over).best(moved)
            steps.append(Step(kind, over, moved, self.layout(shape, a), self.layout(shape, b), duration_s, program_text))
        return tuple(steps)


def _in_parts(step: Step, of: Sequence[tuple[int, ...]]) -> Step:
    """A step over runs of factors as one over the factors themselves."""

    def spread(some: Sequence[int]) -> tuple[int, ...]:
        return tuple(f for g in some for f in of[g])

    before, after = (Layout(tuple(map(spread, one.dims)), spread(one.partial)) for one in (step.before, step.after))
    return replace(step, over=spread(step.over), before=before, after=after)


def _together(over: Sequence[int], i: int, *, in_order: bool) -> bool:
    """Whether factors i and i + 1 are one to a collective: both outside, or both inside (where order matters, side by side)."""
    if not in_order or not (i in over and i + 1 in over):
        return (i in over) == (i + 1 in over)
    return over.index(i) + 1 == over.index(i + 1)


@functools.cache
def _inverse(names: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(names.index(d) for d in range(len(names)))


def _shortest(graph: csr_matrix, sources: NDArray[np.int64] | None) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Distances from these states (from all, where None), and predecessors on the paths."""
    return dijkstra(graph, indices=sources, return_predecessors=True)


class Programs:
    """The cheapest programs between layouts on one network; each is computed once."""

    def __init__(self, resharder: Resharder) -> None:
        self.resharder = resharder
        self._known: dict[tuple[tuple[int, ...], int, Layout, Layout], tuple[Step, ...]] = {}

    def between(self, shape: tuple[int, ...], nbytes: int, before: Layout, after: Layout) -> tuple[Step, ...]:
        """The steps that move a tensor of ``nbytes`` bytes in total from one layout to another; none where they are the same."""
        if before == after:
            return ()
        key = (shape, nbytes, before, after)
        if key not in self._known:
            ends = self.resharder.state(shape, before), self.resharder.state(shape, after)
            self._known[key] = self.resharder.program(shape, nbytes, *ends)
        return self._known[key]
