"""The batch dim of each value, and its *data dims*: all dims that come with the data (batch, sequence, height, width).

A loop takes the slices of a stack one after the other, so the batch dim of a stack of microbatches or timesteps is its second.

They are followed from the data through the index maps: a result's dim is a data dim if its loop indexes a data dim of an operand.
A value that is made of no input, as the mask of a loop's step is, has the dims that it meets the data with. Data parallelism
splits the batch dim; tensor parallelism splits no data dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from shardplan.graph.nodes import Graph, Node
from shardplan.tdl.index import (
    Affine,
    Exact,
    FloorDiv,
    IndexExpr,
    Multiple,
    Plus,
    loops_of,
)


@dataclass(frozen=True, slots=True)
class Examples:
    """For each tensor its batch dim (None where it has none) and all its data dims."""

    batch: tuple[int | None, ...]
    data: tuple[frozenset[int], ...]

    def loops(self, node: Node) -> tuple[frozenset[int], frozenset[int]]:
        """(the loops of an op over the batch dim, its loops over any data dim)."""
        over_batch, over_data = _loops_over(node, self.batch, self.data)
        description = node.signature.description
        for t, dims in zip(node.outputs, description.results if description else (), strict=False):
            over_data.update(dims[d] for d in self.data[t])
            over_batch.update(dims[d] for d in self.data[t] if self.batch[t] == d)
        return frozenset(over_batch), frozenset(over_data)


def follow(graph: Graph, inputs: Sequence[int], *, forward: bool = False) -> Examples:
    """Follows the dims of these input tensors. The last dim of an array without integers is its features and does not count.

    With ``forward``, only values that are made of these inputs have such dims.
    """
    stacks = frozenset(link.source for link in graph.links if link.lift == 1)
    batch: list[int | None] = [None] * len(graph.tensors)
    data: list[set[int]] = [set() for _ in graph.tensors]
    for t in inputs:
        tensor = graph.tensors[t]
        rank = len(tensor.shape)
        features = rank > 1 and not tensor.dtype.startswith(("int", "uint"))
        data[t] = set(range(rank - features))
        batch[t] = min(int(t in stacks), rank - 1) if rank else None
    given = depending(graph, graph.inputs)
    changed = True
    while changed:  # repeated for values that loops carry
        changed = False
        for node in graph.nodes:
            for t, dim, is_batch in _through(node, batch, data):
                changed |= _mark(t, dim, dim == 1 if t in stacks else is_batch, batch, data)
        for node in () if forward else reversed(graph.nodes):
            for t, dim, is_batch in _met(node, given, batch, data):
                changed |= _mark(t, dim, is_batch, batch, data)
        for link in graph.links:
            for dim in sorted(data[link.target]) if not forward and link.source not in given else ():
                if 0 <= dim + link.lift < len(graph.tensors[link.source].shape):
                    is_batch = batch[link.target] == dim
                    changed |= _mark(link.source, dim + link.lift, is_batch, batch, data)
            for dim in sorted(data[link.source]):
                if 0 <= dim - link.lift < len(graph.tensors[link.target].shape):
                    is_batch = batch[link.source] == dim
                    changed |= _mark(link.target, dim - link.lift, is_batch, batch, data)
        changed &= bool(graph.links)  # without links one pass each way is enough: ops come after those that they read
    return Examples(tuple(batch), tuple(frozenset(d) for d in data))


def depending(graph: Graph, inputs: Sequence[int]) -> frozenset[int]:
    """The tensors that depend on one of these inputs of the step, and the inputs."""
    given = set(inputs)
    known = -1
    while known < len(given):
        known = len(given)
        for node in graph.nodes:
            if given.intersection(node.inputs):
                given.update(node.outputs)
        given.update(link.target for link in graph.links if link.source in given)
    return frozenset(given)


def _met(node: Node, given: Set[int], batch: Sequence[int | None], data: Sequence[Set[int]]) -> Iterator[tuple[int, int, bool]]:
    """(tensor, dim, whether it is the batch dim) of each dim at which an operand that depends on no input meets the data."""
    description = node.signature.description
    if description is None or all(t < 0 or t in given for t in node.inputs):
        return
    over_batch, over_data = _loops_over(node, batch, data)
    for t, dims in zip(node.outputs, description.results, strict=False):
        over_data.update(loop for d, loop in enumerate(dims) if d in data[t])
        over_batch.update(loop for d, loop in enumerate(dims) if d == batch[t])
    for operand, indices in description.accesses:
        t = node.inputs[operand]
        if t < 0 or t in given:
            continue
        for dim, ix in enumerate(indices):
            loops = loops_of(ix)
            if len(loops) == 1 and loops <= over_data and node.signature.call.operands[operand][dim] > 1:
                yield t, dim, loops <= over_batch


def _mark(t: int, dim: int, is_batch: bool, batch: list[int | None], data: list[set[int]]) -> bool:
    new = dim not in data[t] or (is_batch and batch[t] is None)
    data[t].add(dim)
    if is_batch and batch[t] is None:
        batch[t] = dim
    return new


def _through(node: Node, batch: Sequence[int | None], data: Sequence[set[int]]) -> Iterator[tuple[int, int, bool]]:
    """(tensor, dim, whether it is the batch dim) of each data dim of an op's results."""
    description = node.signature.description
    over_batch, over_data = _loops_over(node, batch, data)
    for t, dims in zip(node.outputs, description.results if description else (), strict=False):
        for dim, loop in enumerate(dims):
            if loop in over_data:
                yield t, dim, loop in over_batch


def _loops_over(node: Node, batch: Sequence[int | None], data: Sequence[Set[int]]) -> tuple[set[int], set[int]]:
    """(the loops that move an operand's batch dim furthest, all loops that index a data dim)."""
    over_batch: set[int] = set()
    over_data: set[int] = set()
    description = node.signature.description
    if description is None or not any(data[t] for t in node.inputs if t >= 0):
        return over_batch, over_data
    for operand, indices in description.accesses:
        t = node.inputs[operand]
        if t < 0:
            continue
        for dim, ix in enumerate(indices):
            if dim in data[t] and node.signature.call.operands[operand][dim] > 1:
                over_data |= loops_of(ix)
                if batch[t] == dim:
                    over_batch |= _leading(ix)
    return over_batch, over_data


def _leading(ix: IndexExpr) -> frozenset[int]:
    """The loops that move an index furthest: of ``32 * b + t`` it is ``b``."""
    match ix:
        case Affine(terms):
            most = max((abs(c) for _, c in terms), default=0)
            return frozenset(loop for loop, c in terms if abs(c) == most)
        case FloorDiv(inner) | Exact(inner) | Multiple(inner):
            return _leading(inner)
        case Plus(left, right):
            return _leading(left) | _leading(right)
        case _:
            return frozenset()
