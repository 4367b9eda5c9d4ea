"""The cuts of a whole function: dims of its arguments and results that may be split together, derived op by op.

A cut starts at one dim of one argument and is followed through the graph: every op on its way is cut along the loop that reads
the dim (Tofu, section 4.2), and requires of its other operands what that cut does. The function can be cut so if no two ops
disagree, if no op needs a neighbour's elements, and if every op does the same on each share: the function's own code runs there,
and does not know which share it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from shardplan.graph.nodes import Graph, Link, Node
from shardplan.ir import Partial, Placement, Replicated, Split
from shardplan.tdl import Call, Strategy, cut, linear_sets

Alike = Callable[[Call, Strategy], bool]
"""Whether every worker runs the same code on its share."""


@dataclass(frozen=True, slots=True)
class FunctionCut:
    """A loop of a function: the dim of each argument that it splits (None: whole), and of each result ("sum": it is a term)."""

    extent: int
    arguments: tuple[int | None, ...]
    results: tuple[int | Literal["sum"] | None, ...]


def function_cuts(graph: Graph, alike: Alike) -> tuple[FunctionCut, ...]:
    """All cuts of a function, in the order of its arguments' dims."""
    found: list[FunctionCut] = []
    for i, t in enumerate(graph.inputs):
        for dim, extent in enumerate(graph.tensors[t].shape):
            if extent > 1 and all(c.arguments[i] != dim for c in found):
                try:
                    found.append(_Cut(graph, t, dim, alike).result())
                except _ConflictError:
                    continue
    return tuple(found)


def dependencies(graph: Graph) -> list[frozenset[int]]:
    """The numbers of the arguments on which each result depends."""
    known = {t: frozenset({i}) for i, t in enumerate(graph.inputs)}
    sizes = -1
    while sizes != (sizes := sum(map(len, known.values()))):  # carries of loops come back to earlier nodes
        for node in graph.nodes:
            own = frozenset[int]().union(*(known.get(t, frozenset()) for t in node.inputs))
            known.update((t, own | known.get(t, frozenset())) for t in node.outputs)
        for link in graph.links:
            known[link.target] = known.get(link.target, frozenset()) | known.get(link.source, frozenset())
    return [known.get(t, frozenset()) for t in graph.outputs]


class _ConflictError(Exception):
    """The function cannot be cut so."""


class _Cut:
    """The placement of every tensor if one dim of one argument is split; tensors without one are whole on every share."""

    def __init__(self, graph: Graph, tensor: int, dim: int, alike: Alike) -> None:
        self._graph, self._alike = graph, alike
        self._extent = graph.tensors[tensor].shape[dim]
        self._ways = next(k for k in range(2, self._extent + 1) if self._extent % k == 0)
        self._placed: dict[int, Placement] = {tensor: Split(dim)}
        self._strategies: dict[int, Strategy] = {}
        size = -1
        while size != (size := len(self._placed) + len(self._strategies)):
            for node in (*graph.nodes, *reversed(graph.nodes)):
                self._node(node)
            for link in graph.links:
                self._link(link)
        for node in graph.nodes:
            self._check(node)

    def result(self) -> FunctionCut:
        """The cut as its arguments and results see it."""
        arguments = tuple(self._dim(t) for t in self._graph.inputs)
        terms = [self._placed.get(t) == Partial("sum") for t in self._graph.outputs]
        results: list[int | Literal["sum"] | None] = [
            "sum" if term else self._dim(t) for t, term in zip(self._graph.outputs, terms, strict=True)
        ]
        return FunctionCut(self._extent, arguments, tuple(results))

    def _dim(self, tensor: int) -> int | None:
        """The split dim of an argument or result.

        Raises:
            _ConflictError: for one that is partial, or split along a dim of another extent.
        """
        match self._placed.get(tensor):
            case None | Replicated():
                return None
            case Split(dim) if self._graph.tensors[tensor].shape[dim] == self._extent:
                return dim
            case _:
                raise _ConflictError

    def _place(self, tensor: int, placement: Placement) -> None:
        """Notes where a tensor lies.

        Raises:
            _ConflictError: where it lies elsewhere, or is an array that the function closes over.
        """
        if tensor < 0 or isinstance(placement, Replicated):
            return
        if tensor in self._graph.constants or self._placed.setdefault(tensor, placement) != placement:
            raise _ConflictError

    def _node(self, node: Node) -> None:
        known = self._strategies.get(node.id)
        if known is None:
            places = [self._placed.get(t) for t in (*node.inputs, *node.outputs)]
            if any(isinstance(p, Split) for p in places):
                known = self._strategies[node.id] = self._strategy(node)
            elif any(isinstance(self._placed.get(t), Partial) for t in node.inputs):
                self._partial(node)
        if known is not None:
            for t, placement in zip((*node.inputs, *node.outputs), (*known.operands, *known.results), strict=True):
                self._place(t, placement)

    def _strategy(self, node: Node) -> Strategy:
        """The cut of a node that fits what is known of its operands and results."""
        for strategy in self._strategies_of(node):
            pairs = zip((*node.inputs, *node.outputs), (*strategy.operands, *strategy.results), strict=True)
            if all(own in (None, placement) for own, placement in ((self._placed.get(t), p) for t, p in pairs)):
                return strategy
        raise _ConflictError

    def _strategies_of(self, node: Node) -> Iterator[Strategy]:
        description = node.signature.description
        for loop in range(0 if description is None else len(description.loops)):
            assert description is not None
            strategy = cut(description, loop, self._ways)
            if strategy is not None and not strategy.has_halo and self._alike(node.signature.call, strategy):
                yield strategy

    def _partial(self, node: Node) -> None:
        """The results of terms are terms, where the op is linear in them."""
        terms = tuple(n for n, t in enumerate(node.inputs) if isinstance(self._placed.get(t), Partial))
        description = node.signature.description
        if description is None or terms not in linear_sets(description):
            raise _ConflictError
        if any(self._placed[node.inputs[n]] != Partial("sum") for n in terms):
            raise _ConflictError
        for t in node.outputs:
            self._place(t, Partial("sum"))

    def _link(self, link: Link) -> None:
        """Both ends of a link lie alike, but for the leading dim that one of them may have."""
        for tensor, other, lift in ((link.source, link.target, link.lift), (link.target, link.source, -link.lift)):
            match self._placed.get(tensor):
                case Split(dim) if dim - lift < 0:
                    raise _ConflictError
                case Split(dim):
                    self._place(other, Split(dim - lift))
                case Partial() as placement:
                    self._place(other, placement)
                case _:
                    pass

    def _check(self, node: Node) -> None:
        """Checks that a cut op needs nothing whole that is split, and an uncut one nothing at all.

        Raises:
            _ConflictError: where it does.
        """
        strategy = self._strategies.get(node.id)
        if strategy is not None:
            wanted = zip((*node.inputs, *node.outputs), (*strategy.operands, *strategy.results), strict=True)
            if any(t >= 0 and self._placed.get(t, Replicated()) != placement for t, placement in wanted):
                raise _ConflictError
        elif any(isinstance(self._placed.get(t), Split) for t in (*node.inputs, *node.outputs)):
            raise _ConflictError
