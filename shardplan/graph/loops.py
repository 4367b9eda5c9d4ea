"""Loops of the flat graph: which nodes repeat, and which tensors enter and leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from shardplan.graph.nodes import Graph, Link
from shardplan.ir import Where


@dataclass(frozen=True, slots=True)
class RepeatedBody:
    """The first and the last node of a body that repeats.

    ``since``: the node from which on the loop's stacked outputs take memory. XLA fills them with zeros as soon as the previous
    loop in the same body has ended.
    """

    first: int
    last: int
    since: int


@dataclass(frozen=True, slots=True)
class Loops:
    """The loops of a graph: ``of[t]`` is the innermost loop around tensor t, ``carries`` are the tensors that pass from one
    iteration to the next.
    """

    of: Mapping[int, RepeatedBody]
    carries: frozenset[int]

    def left(self, link: Link) -> RepeatedBody | None:
        """The loop that a link leaves; None where it enters a loop or stays in one."""
        loop, after = self.of.get(link.source), self.of.get(link.target)
        leaves = loop is not None and (after is None or (after.first <= loop.first and loop.last <= after.last))
        return loop if leaves and after is not loop else None


def loops_of(graph: Graph) -> Loops:
    """Finds the loops: bodies that tensors enter by a link (a body that runs once shares tensors with the outside)."""
    spans: dict[Where, tuple[int, int]] = {}
    for node in graph.nodes:
        for depth in range(1, len(node.where) + 1):
            first, last = spans.get(node.where[:depth], (node.id, node.id))
            spans[node.where[:depth]] = min(first, node.id), max(last, node.id)
    entries = Counter(link.target for link in graph.links if link.target in graph.boundary)
    inside: dict[Where, RepeatedBody] = {}
    nested: list[tuple[RepeatedBody | None, RepeatedBody]] = []
    of: dict[int, RepeatedBody] = {}
    # outermost first; a while loop's body comes before its test, which reads the tensors that enter the body
    for where, tensors in sorted(graph.bodies.items(), key=lambda row: (len(row[0]), [-body for _, body in row[0]])):
        new = [t for t in tensors if t not in of]
        loop = inside.get(where[:-1])
        if any(t in graph.boundary for t in new):
            begin = graph.begins.get(where, 0)
            first, last = spans.get(where, (begin, begin))  # a body without ops counts as the node after it
            earlier = [other.last + 1 for parent, other in nested if parent is loop and other.last < first]
            parent, loop = loop, RepeatedBody(first, last, max(earlier, default=loop.first if loop is not None else 0))
            nested.append((parent, loop))
        if loop is not None and where:
            inside[where] = loop
            of.update(dict.fromkeys(new, loop))
    return Loops(of, frozenset(t for t, n in entries.items() if n > 1))
