"""The cuts of a whole function: dims of its arguments and results that may be split together, derived op by op.

A cut starts at one dim of one argument and is followed through the graph: every op on its way is cut along the loop that reads
the dim (Tofu, section 4.2), and requires of its other operands what that cut does. The function can be cut so if no two ops
disagree, if no op needs a neighbour's elements, and if the function is the same on each share: its own code runs there, and
knows neither the number of its share nor the number of shares. So the function is traced again for the shapes of a share, for
every number of shares that divides the dim, and for twice the dim. It has to have the same ops there, with the same numbers.
Shares of one element are left out: JAX writes ops on dims of size 1 in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from shardplan.graph.nodes import Graph, Link, Node
from shardplan.ir import Constant, Partial, Placement, Replicated, Split
from shardplan.tdl import Call, Strategy, cut, linear_sets

Alike = Callable[[Call, Strategy], bool]
"""Whether every worker runs the same code on its share."""
Again = Callable[[Sequence[tuple[int, ...]]], Graph | None]
"""The function traced for other shapes of its arguments; None where it does not take them, or closes over other arrays."""


@dataclass(frozen=True, slots=True)
class FunctionCut:
    """A loop of a function: the dim of each argument that it splits (None: whole), and of each result ("sum": it is a term)."""

    extent: int
    arguments: tuple[int | None, ...]
    results: tuple[int | Literal["sum"] | None, ...]


def function_cuts(graph: Graph, alike: Alike, again: Again) -> tuple[FunctionCut, ...]:
    """All cuts of a function, in the order of its arguments' dims."""
    found: list[FunctionCut] = []
    for i, t in enumerate(graph.inputs):
        for dim, extent in enumerate(graph.tensors[t].shape):
            if extent > 1 and all(c.arguments[i] != dim for c in found):
                try:
                    found.append(_from(graph, (t, dim), alike, again))
                except _ConflictError:
                    continue
    return tuple(found)


def _from(graph: Graph, seed: tuple[int, int], alike: Alike, again: Again) -> FunctionCut:
    """The cut that begins at this (tensor, dim).

    Raises:
        _ConflictError: if there is none for every number of shares that divides the dim.
    """
    tensor, dim = seed
    extent = graph.tensors[tensor].shape[dim]
    cuts = [_Cut(graph, tensor, dim, alike, ways) for ways in range(2, extent + 1) if extent % ways == 0]
    first, *rest = [own.result() for own in cuts]
    if any(other != first for other in rest):
        raise _ConflictError
    for own in cuts:
        own.check_size(extent // own.ways, again)
    cuts[0].check_size(2 * extent, again)
    return first


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

    def __init__(self, graph: Graph, tensor: int, dim: int, alike: Alike, ways: int) -> None:
        self._graph, self._alike, self.ways = graph, alike, ways
        self._extent = graph.tensors[tensor].shape[dim]
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

    def check_size(self, size: int, again: Again) -> None:
        """Checks that the function, traced for another size of the dim, has the ops that it has here.

        Raises:
            _ConflictError: where an op, a number in it, or the shape of a value is another one.
        """
        if size == 1:
            return
        other = again([self._resized(t, size) for t in self._graph.inputs])
        if other is None or len(other.nodes) != len(self._graph.nodes):
            raise _ConflictError
        for whole, own in zip(self._graph.nodes, other.nodes, strict=True):
            tensors = [*zip(whole.inputs, own.inputs, strict=False), *zip(whole.outputs, own.outputs, strict=False)]
            if _kind(whole) != _kind(own) or any((a < 0) != (b < 0) for a, b in tensors):
                raise _ConflictError
            if any(a >= 0 and self._resized(a, size) != other.tensors[b].shape for a, b in tensors):
                raise _ConflictError

    def _resized(self, tensor: int, size: int) -> tuple[int, ...]:
        """The shape of a tensor where the dim of the cut has another size."""
        shape, placed = list(self._graph.tensors[tensor].shape), self._placed.get(tensor)
        if isinstance(placed, Split):
            shape[placed.dim] = shape[placed.dim] * size // self._extent
        return tuple(shape)

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
            strategy = cut(description, loop, self.ways)
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
        """Both ends of a link lie alike, except for the leading dim that one of them may have. A term of a sum enters or leaves
        no body: another branch, or the value before a loop, may be whole.
        """
        for tensor, other, lift in ((link.source, link.target, link.lift), (link.target, link.source, -link.lift)):
            match self._placed.get(tensor):
                case Split(dim) if dim - lift < 0:
                    raise _ConflictError
                case Split(dim):
                    self._place(other, Split(dim - lift))
                case Partial():
                    raise _ConflictError
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
            return
        terms = [isinstance(self._placed.get(t), Partial) for t in node.inputs]
        if any(isinstance(self._placed.get(t), Split) for t in (*node.inputs, *node.outputs)):
            raise _ConflictError
        if not any(terms) and any(isinstance(self._placed.get(t), Partial) for t in node.outputs):
            raise _ConflictError


def _kind(node: Node) -> tuple[object, ...]:
    """The parts of an op that must not depend on the size of a share: its primitive, how often it runs, and the numbers in it."""
    numbers = [repr(i.value) for i in node.op.inputs if isinstance(i, Constant)]
    params = sorted((k, v) for k, v in node.op.params.items() if isinstance(v, bool | int | float | str) and k != "name")
    return node.op.primitive, len(node.inputs), len(node.outputs), node.weight, numbers, params
