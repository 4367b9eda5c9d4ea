"""Loops of the flat graph: which nodes repeat, and which tensors enter and leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from shardplan.graph.flattening import Graph, Link
from shardplan.ir import Where


@dataclass(frozen=True, slots=True)
class Loop:
    """The first and the last node of a body that runs again and again.

    ``since``: from this node on there is room for what it stacks up. XLA fills that with zeros as soon as the loop before it, in
    the same body, has ended.
    """

    first: int
    last: int
    since: int


@dataclass(frozen=True, slots=True)
class Loops:
    """``of[t]`` is the innermost loop in which tensor t is; ``carries`` are the tensors that an iteration hands to the next."""

    of: Mapping[int, Loop]
    carries: frozenset[int]

    def left(self, link: Link) -> Loop | None:
        """The loop that a link leads out of; None where it enters one, or stays where it is."""
        loop, after = self.of.get(link.source), self.of.get(link.target)
        outwards = loop is not None and (after is None or (after.first <= loop.first and loop.last <= after.last))
        return loop if outwards and after is not loop else None


def loops_of(graph: Graph) -> Loops:
    """Finds the loops: bodies that tensors enter by a link (a body that runs once shares its tensors with what is around it)."""
    spans: dict[Where, tuple[int, int]] = {}
    for node in graph.nodes:
        for depth in range(1, len(node.where) + 1):
            first, last = spans.get(node.where[:depth], (node.id, node.id))
            spans[node.where[:depth]] = min(first, node.id), max(last, node.id)
    entries = Counter(link.target for link in graph.links if link.target in graph.boundary)
    inside: dict[Where, Loop] = {}
    beside: list[tuple[Loop | None, Loop]] = []
    of: dict[int, Loop] = {}
    # outermost first; of a while loop the body before the test, which reads the tensors that enter the body
    for where, tensors in sorted(graph.bodies.items(), key=lambda row: (len(row[0]), [-body for _, body in row[0]])):
        new = [t for t in tensors if t not in of]
        loop = inside.get(where[:-1])
        if any(t in graph.boundary for t in new):
            begin = graph.begins.get(where, 0)
            first, last = spans.get(where, (begin, begin))  # a body without ops runs before the node behind it
            earlier = [other.last + 1 for around, other in beside if around is loop and other.last < first]
            around, loop = loop, Loop(first, last, max(earlier, default=loop.first if loop is not None else 0))
            beside.append((around, loop))
        if loop is not None and where:
            inside[where] = loop
            of.update(dict.fromkeys(new, loop))
    return Loops(of, frozenset(t for t, n in entries.items() if n > 1))
