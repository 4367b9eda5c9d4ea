"""The ways to take the levels of a cluster apart into factors: where a search begins, and how it goes on from there.

A level starts whole. If no loop of the ops that do the work divides by it (12 devices, dims that are powers of two), it also
starts as the largest parts of it that do divide. From any factoring, one factor is split into an ordered pair of divisors. In
the end, factors that no layout keeps apart are merged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from shardplan.collectives.parts import open_seams, runs, seams
from shardplan.constants import CONSTANTS
from shardplan.cost import compute
from shardplan.graph.nodes import Graph
from shardplan.ir import Factor
from shardplan.mesh import Cluster, factors
from shardplan.mesh.factoring import joined
from shardplan.search.problem.problem import Problem

Work = Sequence[tuple[float, tuple[int, ...]]]
"""(flops, extents of the loops that can be cut) of contractions."""

Alike = tuple[tuple[str, tuple[int, ...]], ...]
"""The parts of each level, in ascending order where order is free."""


def factor_choices(cluster: Cluster, work: Work) -> tuple[tuple[Factor, ...], ...]:
    """The factorings to begin with, whole levels first."""
    whole = factors(cluster)
    parts = {level.name: _parts(level.size, work) for level in cluster.levels if level.size > 1}
    while sum(map(len, parts.values())) > max(CONSTANTS.split_factors, len(parts)):
        longest = max(parts, key=lambda name: len(parts[name]))
        parts[longest] = (*parts[longest][:-2], math.prod(parts[longest][-2:]))
    split = {name: p for name, p in parts.items() if len(p) > 1}
    return (whole, factors(cluster, split)) if split else (whole,)


def splits(cluster: Cluster, of: Sequence[Factor], work: Work) -> Iterator[tuple[Factor, ...]]:
    """Every factoring with one more factor, the most promising first: those whose parts divide the loops of the most flops.

    None beyond ``split_factors``, and one of those that are `alike`.

    >>> cluster = Cluster.load("2x8")
    >>> [[f.size for f in one] for one in splits(cluster, factors(cluster), [(1.0, (64,))])]
    [[2, 2, 4]]
    """
    if len(of) >= CONSTANTS.split_factors:
        return
    found: list[tuple[float, float, tuple[Factor, ...]]] = []
    for i, factor in enumerate(of):
        for major in range(2, factor.size):
            if factor.size % major == 0:
                sizes = [f.size for f in of if f.level == factor.level]
                place = sum(f.level == factor.level for f in of[:i])
                parts = (*sizes[:place], major, factor.size // major, *sizes[place + 1 :])
                every = levels_of(cluster, of) | {cluster.levels[factor.level].name: parts}
                even = abs(math.log(major * major / factor.size))
                found.append((_left(every, work), round(even, 6), factors(cluster, every)))
    seen: set[Alike] = set()
    for _, _, one in sorted(found, key=lambda row: row[:2]):
        if alike(cluster, one) not in seen:
            seen.add(alike(cluster, one))
            yield one


def alike(cluster: Cluster, of: Sequence[Factor]) -> Alike:
    """A key that is equal for factorings that cost the same: on a switch all places are alike, so the order of parts is free.

    >>> cluster = Cluster.load("2x8")
    >>> alike(cluster, factors(cluster, {"gpu": (4, 2)})) == alike(cluster, factors(cluster, {"gpu": (2, 4)}))
    True
    """
    kinds = {level.name: level.kind for level in cluster.levels}
    parts = levels_of(cluster, of).items()
    return tuple((name, tuple(sorted(own)) if kinds[name] == "switch" else own) for name, own in parts)


def levels_of(cluster: Cluster, of: Sequence[Factor]) -> dict[str, tuple[int, ...]]:
    """The parts of each level that has any.

    >>> cluster = Cluster.load("2x8")
    >>> levels_of(cluster, factors(cluster, {"gpu": (4, 2)}))
    {'node': (2,), 'gpu': (4, 2)}
    """
    names = [cluster.levels[f.level].name for f in of]
    return {name: tuple(f.size for f, own in zip(of, names, strict=True) if own == name) for name in dict.fromkeys(names)}


def _left(parts: Mapping[str, Sequence[int]], work: Work) -> float:
    """The flops that a device is left with where each part, the largest first, cuts the first loop that it divides, if any."""
    sizes = sorted(itertools.chain.from_iterable(parts.values()), reverse=True)
    total = 0.0
    for flops, extents in work:
        left, ways = list(extents), 1
        for size in sizes:
            at = next((i for i, n in enumerate(left) if n % size == 0), None)
            if at is not None:
                left[at] //= size
                ways *= size
        total += flops / ways
    return total


def work_of(graph: Graph) -> Work:
    """The ops of a step that multiply matrices; equal ones are summed."""
    weights: dict[int, float] = {}
    for node in graph.nodes:
        weights[node.signature.id] = weights.get(node.signature.id, 0.0) + node.weight
    contractions: list[tuple[float, tuple[int, ...]]] = []
    for signature in {node.signature.id: node.signature for node in graph.nodes}.values():
        description = signature.description
        if description is not None and signature.multiplies:
            extents = tuple(info.extent for info in description.loops if not info.whole)
            if extents:
                contractions.append((compute.flops(description) * weights[signature.id], extents))
    return contractions


def _parts(size: int, work: Work) -> tuple[int, ...]:
    """The parts of a level of ``size`` that suit the most flops of ops that cannot use it whole; (size,) leaves it whole."""
    stuck: dict[tuple[int, ...], float] = {}
    for flop, extents in work:
        parts = largest_parts(size, extents)
        if len(parts) > 1:
            stuck[parts] = stuck.get(parts, 0.0) + flop
    if not stuck or sum(stuck.values()) <= CONSTANTS.stuck_share * sum(flop for flop, _ in work):
        return (size,)
    return max(stuck, key=lambda parts: (stuck[parts], parts))


def largest_parts(size: int, extents: Sequence[int]) -> tuple[int, ...]:
    """Splits a level's size into parts that divide these loops, the largest first; a remainder that divides none comes last.

    >>> largest_parts(12, (512, 2048)), largest_parts(8, (2, 6, 10)), largest_parts(8, (64, 3)), largest_parts(7, (64, 3))
    ((4, 3), (2, 2, 2), (8,), (7,))
    """
    parts: list[int] = []
    left, remaining = list(extents), size
    while remaining > 1:
        common = [math.gcd(extent, remaining) for extent in left]
        divisor = max(common)
        if divisor == 1:
            parts.append(remaining)
            break
        at = common.index(divisor)
        left[at] //= divisor
        remaining //= divisor
        parts.append(divisor)
    return tuple(parts)


def merged(problem: Problem, states: Sequence[int]) -> tuple[Factor, ...] | None:
    """The factors with two neighbours of one level merged that no layout of a solution keeps apart; None without such a pair.

    Two factors may merge only where every tensor that uses either uses both, the major one directly before the minor one.
    """
    between = seams(problem.factors)
    apart = 0
    for v, s in {(v.shape, s): (v, s) for v, s in zip(problem.coarse.variables, states, strict=True)}.values():
        apart |= int(open_seams(problem.resharder.space(v.shape), between)[s])
    for bit, i in enumerate(between):
        if not apart >> bit & 1:
            return joined(problem.cluster, problem.factors, runs(len(problem.factors), frozenset({i})))
    return None
