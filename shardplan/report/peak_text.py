"""A device's memory at its peak, in words: arguments by path, other values by the source line that makes them."""

from __future__ import annotations

from collections.abc import Mapping

from shardplan.graph import Graph
from shardplan.graph.attention import product_names
from shardplan.graph.updates import value_names
from shardplan.report.paths import grouped
from shardplan.report.tables import size
from shardplan.search.memory.contents import Held, held_at_peak
from shardplan.search.memory.liveness import liveness
from shardplan.search.session import Session

_NAMED = 3
"""The most names in a line."""

_KINDS = {"arguments": "of arguments", "values": "of values between ops", "copies": "of copies in other layouts"}


def peak_lines(session: Session) -> list[str]:
    """Where memory peaks, then a line for each kind of content: its bytes on one device and its largest parts."""
    solution, problem, graph = session.solution, session.problem, session.graph
    live = liveness(problem, session.donated)
    point, held = held_at_peak(problem, live, solution.states, solution.keep, solution.limits)
    products = product_names(graph, session.decisions.layouts)
    where = "after the last op"
    if point < len(graph.nodes):
        node = graph.nodes[point]
        name = products.get(point, node.op.primitive)
        where = f"{'in the backward pass ' if node.backward else ''}at {node.op.source} ({name})"
    lines = [f"Memory peaks {where}. A device holds there"]
    names = _Names(graph, value_names(graph, session.program.output_paths), products)
    for kind, words in _KINDS.items():
        own = [h for h in held if h.kind != "working" and names.kind(h) == kind]
        if own:
            largest = names.largest(own)
            rest = f" and {len(largest) - _NAMED} more" if len(largest) > _NAMED else ""
            parts = ", ".join(f"{name} ({size(nbytes)})" for name, nbytes in largest[:_NAMED])
            lines.append(f"  {size(sum(h.nbytes for h in own))} {words}: {parts}{rest}")
    working = sum(h.nbytes for h in held if h.kind == "working")
    return [*lines, f"  {size(working)} in which the op works"] if working else lines


class _Names:
    """The names of a graph's tensors: those of ``named``, else the source line of the op that makes them."""

    def __init__(self, graph: Graph, named: Mapping[int, str], products: Mapping[int, str]) -> None:
        self._products = products
        self._arguments, self._named = frozenset(graph.inputs), named
        self._makers = {t: node for node in graph.nodes for t in node.outputs}
        self._sources = {link.target: link.source for link in graph.links if not link.same}

    def kind(self, held: Held) -> str:
        """The key of `_KINDS` for a held tensor."""
        if held.kind != "stored":
            return "copies"
        return "arguments" if held.tensor in self._arguments else "values"

    def largest(self, held: list[Held]) -> list[tuple[str, float]]:
        """(name, total bytes), largest first. Paths that `grouped` puts under one pattern share a name."""
        lines: dict[str, float] = {}
        paths: dict[str, float] = {}
        for h in held:
            tensor = self._origin(h.tensor)
            if tensor in self._named:
                path = self._named[tensor]
                paths[path] = paths.get(path, 0.0) + h.nbytes
            else:
                name = self._line(tensor)
                lines[name] = lines.get(name, 0.0) + h.nbytes
        for group in grouped(paths):
            lines[group.pattern] = sum(paths[path] for path in group.paths)
        return sorted(lines.items(), key=lambda row: (-row[1], row[0]))

    def _origin(self, tensor: int) -> int:
        """The tensor whose value loops hand on as this tensor."""
        seen = {tensor}
        while tensor not in self._makers and tensor not in self._named and tensor in self._sources:
            tensor = self._sources[tensor]
            if tensor in seen:
                break
            seen.add(tensor)
        return tensor

    def _line(self, tensor: int) -> str:
        node = self._makers.get(tensor)
        return f"{self._products.get(node.id, node.op.primitive)} at {node.op.source}" if node is not None else "constants"
