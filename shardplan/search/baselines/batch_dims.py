"""Which dims of each value count examples: the batch dim, and every dim that comes with the data (sequence, height, width).

Followed from the data through the index maps: a result's dim that is a loop which indexes such a dim of an operand is one too.
What people call data parallel splits the first, and what they call tensor parallel splits none of the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from shardplan.graph.flattening import Graph, Node
from shardplan.tdl.index import (
    Affine,
    Exact,
    FloorDiv,
    IndexExpr,
    Plus,
    Times,
    loops_of,
)


@dataclass(frozen=True, slots=True)
class Examples:
    """For each tensor its batch dim (None: it has none) and all dims that come with the data."""

    batch: tuple[int | None, ...]
    data: tuple[frozenset[int], ...]

    def loops(self, node: Node) -> tuple[frozenset[int], frozenset[int]]:
        """(the loops of an op that run over the batch, all those that run over dims that come with the data)."""
        led, met = _led(node, self.batch, self.data)
        description = node.signature.description
        for t, dims in zip(node.outputs, description.results if description else (), strict=False):
            met.update(dims[d] for d in self.data[t])
            led.update(dims[d] for d in self.data[t] if self.batch[t] == d)
        return frozenset(led), frozenset(met)


def follow(graph: Graph, inputs: Sequence[int]) -> Examples:
    """Follows the dims of these input tensors; of an array that holds no integers the last dim, its features, does not count."""
    batch: list[int | None] = [None] * len(graph.tensors)
    data: list[set[int]] = [set() for _ in graph.tensors]
    for t in inputs:
        tensor = graph.tensors[t]
        rank = len(tensor.shape)
        features = rank > 1 and not tensor.dtype.startswith(("int", "uint"))
        batch[t] = 0 if rank else None
        data[t] = set(range(rank - features))
    changed = True
    while changed:  # again for what loops carry around
        changed = False
        for node in graph.nodes:
            for t, dim, is_batch in _through(node, batch, data):
                changed |= _mark(t, dim, is_batch, batch, data)
        for link in graph.links:
            for dim in sorted(data[link.source]):
                if 0 <= dim - link.lift < len(graph.tensors[link.target].shape):
                    is_batch = batch[link.source] == dim
                    changed |= _mark(link.target, dim - link.lift, is_batch, batch, data)
        changed &= bool(graph.links)  # ops follow those that they read
    return Examples(tuple(batch), tuple(frozenset(d) for d in data))


def _mark(t: int, dim: int, is_batch: bool, batch: list[int | None], data: list[set[int]]) -> bool:
    new = dim not in data[t] or (is_batch and batch[t] is None)
    data[t].add(dim)
    if is_batch and batch[t] is None:
        batch[t] = dim
    return new


def _through(node: Node, batch: Sequence[int | None], data: Sequence[set[int]]) -> Iterator[tuple[int, int, bool]]:
    """(tensor, dim, whether it is the batch dim) of the results' dims that an op hands on."""
    description = node.signature.description
    led, met = _led(node, batch, data)
    for t, dims in zip(node.outputs, description.results if description else (), strict=False):
        for dim, loop in enumerate(dims):
            if loop in met:
                yield t, dim, loop in led


def _led(node: Node, batch: Sequence[int | None], data: Sequence[Set[int]]) -> tuple[set[int], set[int]]:
    """The loops that lead an operand's batch dim, and all that index a dim of its data."""
    led: set[int] = set()
    met: set[int] = set()
    description = node.signature.description
    if description is None or not any(data[t] for t in node.inputs if t >= 0):
        return led, met
    for operand, indices in description.accesses:
        t = node.inputs[operand]
        if t < 0:
            continue
        for dim, ix in enumerate(indices):
            if dim in data[t] and node.signature.call.operands[operand][dim] > 1:
                met |= loops_of(ix)
                if batch[t] == dim:
                    led |= _leading(ix)
    return led, met


def _leading(ix: IndexExpr) -> frozenset[int]:
    """The loops that move an index furthest: of ``32 * b + t`` it is ``b``."""
    match ix:
        case Affine(terms):
            most = max((abs(c) for _, c in terms), default=0)
            return frozenset(loop for loop, c in terms if abs(c) == most)
        case FloorDiv(inner) | Exact(inner) | Times(inner):
            return _leading(inner)
        case Plus(left, right):
            return _leading(left) | _leading(right)
        case _:
            return frozenset()
