"""The fixed part of the task graphs of all assignments: groups of tasks, and bundles of arcs between groups.

A *group* holds the tasks of one operator in one phase, the transfers of one tensor in one direction, or the synchronisation of
one weight. A *bundle* holds the arcs from the tasks of one group to those of others. A change of one configuration replaces
whole groups and bundles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.placement.operators import BACKWARD, FORWARD, UPDATE, OperatorGraph

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Structure:
    """Numbers of groups and bundles. ``backward`` and ``update`` say which operators have tasks in these phases.

    - Operator i has the groups 3 i (forward), 3 i + 1 (backward) and 3 i + 2 (update); tensor e the groups ``edge_group(e)``
      and the next; weight w the groups ``weight_group(w)`` and the next.
    - Bundles go from phase to phase of an operator (``phase_bundle``), from a producer and its transfers (``edge_bundle(e)``, 4
      of them: makes, arrives, returns, arrives back), from each user to a weight (``user_bundles``), and from the two groups of
      a weight (``weight_bundles``, and the next).
    - ``first`` [groups + 1] and ``bundles`` list those that start at each group.
    - ``edges_of[i]`` and ``weights_of[i]`` are the tensors and weights of operator i;
      ``from_last`` lists all tensors, those of the last producer first.
    - ``last_phases`` [operators] are the groups of the last phase of each before weights are synchronised.
    """

    graph: OperatorGraph
    backward: tuple[bool, ...]
    update: tuple[bool, ...]
    groups: int
    user_bundles: tuple[tuple[int, ...], ...]
    weight_bundles: tuple[int, ...]
    sources: Ints
    first: Ints
    bundles: Ints
    edges_of: tuple[tuple[int, ...], ...]
    weights_of: tuple[tuple[int, ...], ...]
    from_last: tuple[int, ...]
    last_phases: Ints

    def edge_group(self, e: int) -> int:
        """The group of a tensor's transfers; the next group has the transfers of its gradient."""
        return 3 * len(self.graph.operators) + 2 * e

    def weight_group(self, w: int) -> int:
        """The group of the one task that follows all terms of a weight's gradient; the next one has its reductions."""
        return self.edge_group(len(self.graph.edges)) + 2 * w

    def edge_bundle(self, e: int) -> int:
        """The first of a tensor's four bundles."""
        return 2 * len(self.graph.operators) + 4 * e


def structure_of(graph: OperatorGraph) -> Structure:
    """The structure of a graph of operators."""
    n, edges, weights = len(graph.operators), graph.edges, graph.weights
    backward = [bool(o.works[BACKWARD]) for o in graph.operators]
    for e in edges:
        if e.gradient:
            backward[e.producer] = backward[e.consumer] = True
    update = [bool(o.works[UPDATE]) for o in graph.operators]
    for w in weights:
        update[w.users[0]] = True
    sources: list[int] = []
    for i in range(n):
        sources += [3 * i, 3 * i + BACKWARD if backward[i] else 3 * i]
    for number, e in enumerate(edges):
        there = 3 * n + 2 * number
        sources += [3 * e.producer, there, 3 * e.consumer + BACKWARD, there + 1]
    last = [3 * i + (BACKWARD if backward[i] else FORWARD) for i in range(n)]
    user_bundles: list[tuple[int, ...]] = []
    for w in weights:
        user_bundles.append(tuple(range(len(sources), len(sources) + len(w.users))))
        sources += [last[u] for u in w.users]
    weight_bundles = tuple(range(len(sources), len(sources) + 2 * len(weights), 2))
    sources += range(3 * n + 2 * len(edges), 3 * n + 2 * len(edges) + 2 * len(weights))
    groups = 3 * n + 2 * len(edges) + 2 * len(weights)
    own = np.array(sources, np.int64)
    first = np.concatenate([[0], np.cumsum(np.bincount(own, minlength=groups))]).astype(np.int64)
    return Structure(
        graph,
        tuple(backward),
        tuple(update),
        groups,
        tuple(user_bundles),
        weight_bundles,
        own,
        first,
        np.argsort(own, kind="stable").astype(np.int64),
        tuple(tuple(k for k, e in enumerate(edges) if i in (e.producer, e.consumer)) for i in range(n)),
        tuple(tuple(k for k, w in enumerate(weights) if i in w.users) for i in range(n)),
        tuple(sorted(range(len(edges)), key=lambda k: (-edges[k].producer, k))),
        np.array(last, np.int64),
    )
