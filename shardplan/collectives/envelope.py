"""The best program of a goal as a function of its bytes: the lower envelope of all programs' lines.

A program's time is a sum of minima of lines, with one line for each algorithm of a step. So the time of the best program is the
minimum of finitely many lines. It is concave, and probes where two neighbouring lines cross find it exactly. A probe prices all
steps of the graph of contexts (`shardplan.collectives.synthesis`) at once and takes the fastest walk; programs are never listed.

A caller that prices many sizes, like the search for a plan, pays for a few probes and then for one `numpy.min`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..constants import CONSTANTS
from ..cost.network import Network
from ..ir import Collective
from .dsl import Form, InsideGroup, Instruction, Master, Parallel, Reduction, groups
from .ranking import Entries, entries, shape_of, step_lines
from .states import Context, Goal
from .synthesis import Walks, shared_walks

Ints = NDArray[np.int64]
T = TypeVar("T")
Floats = NDArray[np.float64]
_LEAST_BYTES, _MOST_BYTES = 1.0, 1e15  # below, the least latency decides; above, the least slope


@dataclass(frozen=True, slots=True, eq=False)
class Envelope:
    """The best programs of one goal: ``lines`` are their (latency_s, seconds_per_byte) [L, 2], best for few bytes first.

    Bytes are those of one device's operand, for an all-gather those of its result.
    """

    lines: Floats
    programs: tuple[Reduction, ...]

    def best(self, nbytes: float) -> tuple[float, Reduction]:
        """The seconds of the best program for these bytes, and the program."""
        seconds = self.lines[:, 0] + self.lines[:, 1] * nbytes
        first = int(np.argmin(seconds))
        return float(seconds[first]), self.programs[first]


def envelope(
    network: Network, over: Sequence[int], goal: Goal = Collective.ALL_REDUCE, levels: Entries | None = None
) -> Envelope:
    """The best emitted programs of at most five steps over these factors, for any number of bytes; cached in ``network.memo``.

    ``levels`` is the hierarchy, by default the `entries` of the factors.

    Exact for up to three levels. For a deeper hierarchy, only programs that join neighbouring levels into three are considered;
    `shardplan.collectives.search` considers all. A reduce-scatter leaves its shards in the order of the levels. An all-gather's
    shards may have any order, as its programs and their times do not depend on it.

    >>> from ..mesh import Cluster, factors
    >>> cluster = Cluster.load("gcp-a100:4")
    >>> best = envelope(Network(cluster, factors(cluster)), (0, 1))
    >>> [program.short for program in best.programs]
    ['AllReduce', 'ReduceScatter-AllReduce-AllGather']
    """
    key = ("envelope", frozenset(over), goal, levels)
    if key not in network.memo:
        levels = entries(network, over) if levels is None else levels
        result = [_envelope(network, levels, joined, goal) for joined in _joinings(len(levels))] if levels else []
        network.memo[key] = _lowest(result)
    return network.memo[key]


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    """Numbered contexts, 0 the start, and as edges the steps between them in programs of at most ``program_steps`` steps.

    ``priced[what[e]]`` is the instruction of edge ``e``, and the levels over which the data that it moves is scattered.
    """

    contexts: int
    end: int
    source: Ints
    target: Ints
    what: Ints
    priced: tuple[tuple[Instruction, frozenset[int]], ...]


@lru_cache(maxsize=8)
def _graph(depth: int, goal: Goal) -> _Graph:
    walks = shared_walks((2,) * depth, goal)
    scattered_at_start = 0 if goal != Collective.ALL_GATHER else (1 << depth) - 1
    number = {walks.start: 0, walks.end: 1}
    scattered = {walks.start: (scattered_at_start,) * walks.space.k}
    known: dict[tuple[Instruction, Parts], tuple[int, Parts]] = {}
    priced: dict[tuple[Instruction, int], int] = {}
    edges: list[tuple[int, int, int]] = []
    layer = [walks.start]
    for left in range(CONSTANTS.program_steps, 0, -1):
        following: list[Context] = []
        for context in layer:
            parts = scattered[context]
            for step, after in walks.promising(context) if left > 1 else walks.closing(context):
                result = known.get((step, parts))
                if result is None:
                    result = known[step, parts] = _after(walks, step, parts)
                if after not in scattered:
                    scattered[after] = result[1]
                    number.setdefault(after, len(number))
                    if after != walks.end:
                        following.append(after)
                edges.append((number[context], number[after], priced.setdefault((step, result[0]), len(priced))))
        layer = following
    kept = np.array(edges, np.int64)[_on_walks(edges, len(number))]
    levels, used = range(depth), np.flatnonzero(np.bincount(kept[:, 2]))
    rows = list(priced)
    result = ((rows[at][0], frozenset(i for i in levels if rows[at][1] >> i & 1)) for at in used.tolist())
    return _Graph(len(number), 1, kept[:, 0], kept[:, 1], np.searchsorted(used, kept[:, 2]), tuple(result))


def _on_walks(edges: Sequence[tuple[int, int, int]], contexts: int) -> Ints:
    """[kept]: indices of the edges on walks of at most ``program_steps`` steps from context 0 to context 1."""
    source, target, _ = np.array(edges, np.int64).T
    done, left = np.full((2, contexts), CONSTANTS.program_steps)
    done[0] = left[1] = 0
    for _ in range(CONSTANTS.program_steps):
        np.minimum.at(done, target, done[source] + 1)
        np.minimum.at(left, source, left[target] + 1)
    return np.flatnonzero(done[source] + left[target] < CONSTANTS.program_steps)


Parts = tuple[int, ...]
"""For each device, a bitset of the levels over which its part of the data is scattered."""


def _after(walks: Walks, step: Instruction, parts: Parts) -> tuple[int, Parts]:
    """The scattered levels of the largest part that a group of a step moves, and the scattered levels of every device's part
    after the step.
    """
    low, high = step.span(len(walks.shape))
    crossed = (1 << high) - (1 << low)
    held = list(parts)
    moved: list[int] = []
    for group in groups(walks.shape, step):
        before = after = parts[group[0]]
        match step.collective:
            case Collective.REDUCE_SCATTER:
                assert not before & crossed, "data is scattered over a level only once"
                after = before | crossed
            case Collective.ALL_GATHER:
                assert not crossed & ~before, "only scattered data is gathered"
                before = after = before & ~crossed
            case _:
                pass
        moved.append(before)
        for device in group:
            held[device] = after
    most = min(moved, key=int.bit_count)
    assert not any(most & ~other for other in moved), "one group moves the most for all sizes of the levels"
    return most, tuple(held)


def _joinings(depth: int) -> Iterator[tuple[int, ...]]:
    """The ways to cut ``depth`` levels into at most ``deepest_graph`` parts: positions of the cuts, 0 and ``depth`` included."""
    for cuts in itertools.combinations(range(1, depth), min(depth, CONSTANTS.deepest_graph) - 1):
        yield (0, *cuts, depth)


def _envelope(network: Network, levels: Entries, cuts: Sequence[int], goal: Goal) -> Envelope:
    """The envelope over a hierarchy in which the levels between two cuts are joined."""
    joined = tuple(tuple(i for entry in levels[a:b] for i in entry) for a, b in itertools.pairwise(cuts))
    shape = shape_of(network, joined)
    graph = _graph(len(joined), goal)
    rows = [
        step_lines(network, joined, step, "emitted") * np.array([1.0, 1.0 / math.prod(shape[i] for i in scattered)])
        for step, scattered in graph.priced
    ]
    widest = max(map(len, rows))
    lines = np.stack([np.concatenate([r, np.repeat(r[-1:], widest - len(r), axis=0)]) for r in rows])  # [priced, algorithms, 2]
    result: dict[tuple[float, float], Reduction] = {}

    def probe(nbytes: float) -> tuple[float, float]:
        path = _fastest(graph, np.min(lines[:, :, 0] + lines[:, :, 1] * nbytes, axis=1))
        path_lines = lines[path]
        pick = np.argmin(path_lines[:, :, 0] + path_lines[:, :, 1] * nbytes, axis=1)
        latency, slope = path_lines[np.arange(len(path)), pick].sum(axis=0).tolist()
        steps = tuple(_widened(graph.priced[w][0], cuts) for w in path)
        result.setdefault((latency, slope), Reduction(steps, len(levels)))
        return latency, slope

    def between(few: tuple[float, float], many: tuple[float, float]) -> None:
        if few[1] <= many[1] or few[0] >= many[0]:
            return
        crossing = (many[0] - few[0]) / (few[1] - many[1])
        middle = probe(crossing)
        if middle[0] + middle[1] * crossing < (few[0] + few[1] * crossing) * (1 - 1e-12):
            between(few, middle)
            between(middle, many)

    between(probe(_LEAST_BYTES), probe(_MOST_BYTES))
    return Envelope(np.array(list(result)), tuple(result.values()))


def _fastest(graph: _Graph, seconds: Floats) -> list[int]:
    """The fastest walk from the first context to the end, as indices into ``graph.priced``; ties go to the shortest."""
    cost = seconds[graph.what]
    spent = [np.full(graph.contexts, np.inf)]
    spent[0][0] = 0.0
    for _ in range(CONSTANTS.program_steps):
        after = spent[-1].copy()
        np.minimum.at(after, graph.target, spent[-1][graph.source] + cost)
        spent.append(after)
    path: list[int] = []
    at = graph.end
    for before, after in zip(reversed(spent[:-1]), reversed(spent[1:]), strict=True):
        if before[at] != after[at]:
            edge = int(np.flatnonzero((graph.target == at) & (before[graph.source] + cost == after[at]))[0])
            path.append(int(graph.what[edge]))
            at = int(graph.source[edge])
    return path[::-1]


def _widened(step: Instruction, cuts: Sequence[int]) -> Instruction:
    """An instruction over joined levels, rewritten for the original levels."""
    form: Form
    match step.form:
        case Parallel(level):
            form = Parallel(cuts[level])
        case Master(level):
            form = Master(cuts[level])
        case InsideGroup():
            form = step.form
    return Instruction(cuts[step.slice], form, step.collective)


def _lowest(envelopes: Sequence[Envelope]) -> Envelope:
    """The lower envelope of envelopes."""
    candidates = [
        (*row, len(program.steps), (row, program))
        for e in envelopes
        for row, program in zip(e.lines.tolist(), e.programs, strict=True)
    ]
    kept = lowest(candidates)
    if not kept:
        return Envelope(np.zeros((1, 2)), (Reduction((), 0),))
    return Envelope(np.array([row for row, _ in kept]), tuple(program for _, program in kept))


def lowest(candidates: Sequence[tuple[float, float, int, T]]) -> list[T]:
    """The lines (latency_s, seconds_per_byte, steps, what) that are the lowest for some number of bytes, fewest bytes first.

    Among equal lines, the one with the fewest steps is kept; among these, the first.
    """
    kept: list[tuple[float, float, T]] = []  # steepest first
    for latency_s, slope, _, what in sorted(candidates, key=lambda line: (-line[1], line[0], line[2])):
        line = (latency_s, slope, what)
        if kept and kept[-1][1] == slope:
            continue
        while kept and kept[-1][0] >= latency_s:
            kept.pop()
        while len(kept) > 1 and _crossing(kept[-2], line) <= _crossing(kept[-2], kept[-1]):
            kept.pop()
        kept.append(line)
    return [what for _, _, what in kept]


def _crossing(few: tuple[float, float, object], many: tuple[float, float, object]) -> float:
    """The number of bytes above which the flatter line, ``many``, is the lower."""
    return (many[0] - few[0]) / (few[1] - many[1])
