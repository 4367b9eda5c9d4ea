"""Finds unrolled identical layers by their ops. They share one choice where the user allows it (Tofu, section 5.1).

The ops of an unrolled model repeat: if the ops at i and i + p are equal for at least p positions i in a row, blocks of p ops
follow each other. Ops are equal if they have the same signature, in the same pass and equally deep in bodies, and each operand
comes from the same number of ops before, or from the same kind of source outside the pass. A block must contain a contraction,
so that a row of parameter updates does not count as layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from shardplan.constants import CONSTANTS
from shardplan.graph.nodes import Graph
from shardplan.search.coarsening.tensor_roles import Marks
from shardplan.search.coarsening.variables import Sets


def share_layers(graph: Graph, sets: Sets, marks: Marks) -> None:
    """Merges the operands and results of each block's ops with those of the next block."""
    kind = _kinds(graph, marks)
    for i, p in repeats(graph):
        a, b = graph.nodes[i], graph.nodes[i + p]
        for s, t in zip((*a.inputs, *a.outputs), (*b.inputs, *b.outputs), strict=True):
            if s >= 0 and t >= 0 and s not in marks.free and kind(s) == kind(t):
                sets.union(s, t)


def _kinds(graph: Graph, marks: Marks) -> Callable[[int], tuple[object, ...]]:
    ends = dict.fromkeys(graph.outputs, 1) | dict.fromkeys(graph.inputs, 2)

    def kind(t: int) -> tuple[object, ...]:
        roles = (t in group for group in (marks.free, marks.apart, marks.weights, marks.deferred))
        argument = t if t in marks.alone else -1
        return (graph.tensors[t].shape, graph.tensors[t].itemsize, ends.get(t, 0), argument, *roles)

    return kind


def repeats(graph: Graph) -> list[tuple[int, int]]:
    """(position of an op, distance to its counterpart in the next block) for all repeated blocks, shortest blocks first."""
    keys = _keys(graph)
    heavy = np.array([n.signature.contracts for n in graph.nodes], bool)
    taken = np.zeros(len(keys), bool)
    matches: list[tuple[int, int]] = []
    for p in _periods(keys):
        same = keys[:-p] == keys[p:]
        for first, last in _runs(same):
            # a block may begin anywhere in a run, so every op of the run is paired with its counterpart
            if last - first < p or not heavy[first : first + p].any() or taken[first:last].all():
                continue
            taken[first : last + p] = True
            matches += [(i, p) for i in range(first, last)]
    return matches


def equal_blocks(graph: Graph) -> int:
    """The most equal blocks that follow each other in the forward pass; 1 where none are repeated."""
    runs: list[list[int]] = []  # [distance, first, end]
    for i, p in repeats(graph):
        if graph.nodes[i].backward:
            continue
        if runs and runs[-1][0] == p and runs[-1][2] == i:
            runs[-1][2] += 1
        else:
            runs.append([p, i, i + 1])
    return max((1 + (end - first) // p for p, first, end in runs), default=1)


def _keys(graph: Graph) -> NDArray[np.int64]:
    """[ops]: equal numbers for ops that may be counterparts in equal blocks."""
    producer = {t: n.id for n in graph.nodes for t in n.outputs}
    inputs = set(graph.inputs)
    ids: dict[object, int] = {}
    keys: list[int] = []
    for node in graph.nodes:
        sources = tuple(
            ("in",)
            if t in inputs
            else ("made", node.id - producer[t] if graph.nodes[producer[t]].backward == node.backward else 0)
            if t in producer
            else ("other",)
            for t in node.inputs
        )
        # layers may have bodies of their own (`jax.checkpoint`)
        bodies = tuple(body for _, body in node.where)
        keys.append(ids.setdefault((node.signature.id, node.backward, bodies, sources), len(ids)))
    return np.array(keys, np.int64)


def _periods(keys: NDArray[np.int64]) -> list[int]:
    """The commonest distances from an op to the next equal one, shortest first."""
    last: dict[int, int] = {}
    seen: Counter[int] = Counter()
    for i, key in enumerate(keys.tolist()):
        if key in last:
            seen[i - last[key]] += 1
        last[key] = i
    return sorted(p for p, _ in sorted(seen.items(), key=lambda row: (-row[1], row[0]))[: CONSTANTS.layer_periods])


def _runs(same: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """(first, end) of every run of trues; the end is exclusive."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
