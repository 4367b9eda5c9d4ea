"""The factors to plan over: whole levels, levels split where a dim needs it, and factors merged where no layout needs them.

A level stays whole wherever a dim divides by it: each further factor pays its own latency. Where no loop of the ops that do the
work divides by a level (12 devices, dims that are powers of two), it is split into the largest parts of it that do divide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardplan.cost import compute
from shardplan.graph.flattening import Graph
from shardplan.ir import Factor
from shardplan.mesh import Cluster, factors
from shardplan.search.problem.problem import Problem

_STUCK = 0.02
"""A level is split if more than this fraction of the flops is in ops whose loops divide only by parts of it."""
_MOST = 4
"""The most factors of a split: the number of layouts grows exponentially with the number of factors."""


def factor_choices(cluster: Cluster, graph: Graph) -> tuple[tuple[Factor, ...], ...]:
    """The factorings to try, whole levels first."""
    whole = factors(cluster)
    work = _work(graph)
    parts = {level.name: _parts(level.size, work) for level in cluster.levels if level.size > 1}
    while sum(map(len, parts.values())) > max(_MOST, len(parts)):
        longest = max(parts, key=lambda name: len(parts[name]))
        parts[longest] = (*parts[longest][:-2], math.prod(parts[longest][-2:]))
    split = {name: p for name, p in parts.items() if len(p) > 1}
    return (whole, factors(cluster, split)) if split else (whole,)


def _work(graph: Graph) -> list[tuple[float, tuple[int, ...]]]:
    """(flops, extents of the loops that can be cut) of every contraction; equal contractions are summed."""
    weights: dict[int, float] = {}
    for node in graph.nodes:
        weights[node.signature.id] = weights.get(node.signature.id, 0.0) + node.weight
    contractions: list[tuple[float, tuple[int, ...]]] = []
    for signature in {node.signature.id: node.signature for node in graph.nodes}.values():
        description = signature.description
        if description is not None and signature.contracts:
            extents = tuple(info.extent for info in description.loops if not info.whole)
            if extents:
                contractions.append((compute.flops(description) * weights[signature.id], extents))
    return contractions


def _parts(size: int, work: Sequence[tuple[float, tuple[int, ...]]]) -> tuple[int, ...]:
    """The parts of a level of ``size`` that suit the most flops of ops that cannot use it whole; (size,) leaves it whole."""
    stuck: dict[tuple[int, ...], float] = {}
    for flop, extents in work:
        parts = largest_parts(size, extents)
        if len(parts) > 1:
            stuck[parts] = stuck.get(parts, 0.0) + flop
    if not stuck or sum(stuck.values()) <= _STUCK * sum(flop for flop, _ in work):
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
    layouts = [problem.resharder.space(v.shape).state(s) for v, s in zip(problem.coarse.variables, states, strict=True)]
    for i, (a, b) in enumerate(zip(problem.factors, problem.factors[1:], strict=False)):
        if a.level == b.level and a.stride == b.stride * b.size and all(_together(i, layout) for layout in layouts):
            level = problem.cluster.levels[a.level]
            whole = a.size * b.size == level.size
            one = Factor(level.name if whole else a.name, a.size * b.size, a.level, b.stride)
            return (*problem.factors[:i], one, *problem.factors[i + 2 :])
    return None


def _together(i: int, layout: tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]) -> bool:
    """Whether a layout uses factors i and i + 1 side by side, or neither."""
    dims, partial = layout
    for used in (*dims, partial):
        if (i in used) != (i + 1 in used):
            return False
        if i in used and used.index(i + 1) != used.index(i) + 1:
            return False
    return True
