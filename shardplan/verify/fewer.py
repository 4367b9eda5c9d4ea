"""The sizes of a shrunken copy of a step: fewer samples, and fewer layers where its loops run over stacked state.

The copy has the ops of the step, so the plan's layouts and cuts apply to it. Every cut of the plan divides its sizes. At least
two samples and two layers are left, because dims of size one broadcast, and the step might trace to other ops.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax

from shardplan.frontend.trace import Traced
from shardplan.graph.nodes import Graph, Node
from shardplan.search.baselines.batch_dims import Examples, follow
from shardplan.search.baselines.samples import data_inputs
from shardplan.tdl.index import Affine

Ways = Sequence[tuple[int, tuple[int, ...]]]
"""Tensors of a graph, each with the number of parts into which a plan cuts each dim; a tensor that is cut in several ways
occurs several times.
"""


@dataclass(frozen=True, slots=True)
class Fewer:
    """The first ``kept`` of the ``whole`` samples, or layers, of a step. ``dims`` maps the number of each input that has them
    to the dim that counts them.
    """

    what: Literal["batch", "layers"]
    whole: int
    kept: int
    dims: Mapping[int, int] = field(repr=False)

    def __str__(self) -> str:
        return f"{self.what} {self.whole} -> {self.kept}"


def smaller(traced: Traced, fewer: Sequence[Fewer]) -> Any:
    """The arguments of a traced step as smaller shapes."""
    shapes = list(traced.in_shapes)
    for own in fewer:
        for i, dim in own.dims.items():
            shape = (*shapes[i].shape[:dim], own.kept, *shapes[i].shape[dim + 1 :])
            shapes[i] = jax.ShapeDtypeStruct(shape, shapes[i].dtype, weak_type=shapes[i].weak_type)
    return jax.tree.unflatten(traced.in_tree, shapes)


def first_of(x: Any, shape: Sequence[int]) -> Any:
    """The first elements of an array along each dim; the array itself where that is all of it."""
    return x if tuple(getattr(x, "shape", ())) == tuple(shape) else x[tuple(map(slice, shape))]


def fewer_samples(graph: Graph, ways: Ways) -> list[Fewer]:
    """Smaller batches, smallest first, for the data (`data_inputs`) whose batch dim has the most frequent extent.

    Every cut of a batch dim divides them. They divide the batch, because the step itself may divide it by some number; if no
    such size exists, the only one is the smallest that the cuts divide.
    """
    data = data_inputs(graph)
    examples = follow(graph, data)
    number = {t: i for i, t in enumerate(graph.inputs)}
    dims = {t: dim for t in data if (dim := examples.batch[t]) is not None}
    extents = {t: graph.tensors[t].shape[dim] for t, dim in dims.items()}
    votes = Counter(n for t, n in extents.items() if not graph.tensors[t].dtype.startswith("key"))
    if not votes:
        return []
    whole = max(votes, key=lambda n: (votes[n], n))
    own = {number[t]: dims[t] for t, n in extents.items() if n == whole}
    return [Fewer("batch", whole, n, own) for n in _sizes(whole, _batch_ways(graph, examples, ways))]


def fewer_layers(graph: Graph, ways: Ways) -> tuple[Fewer, ...]:
    """The fewest layers that every cut divides, one item for each number of layers of state whose dim 0 a loop runs over."""
    stacks = _stacks(graph, follow(graph, data_inputs(graph)))
    state = sorted({i for i in graph.feedback if i is not None and graph.inputs[i] in stacks})
    lengths: dict[int, dict[int, int]] = defaultdict(dict)
    for i in state:
        lengths[graph.tensors[graph.inputs[i]].shape[0]][i] = 0
    found: list[Fewer] = []
    for whole, dims in sorted(lengths.items()):
        own = ((graph.tensors[t].shape[0], parts[0]) for t, parts in ways if t in stacks)
        sizes = _sizes(whole, ((n, k) for n, k in own if n == whole), divisors=False)
        found += [Fewer("layers", whole, n, dims) for n in sizes[:1]]
    return tuple(found)


def _batch_ways(graph: Graph, examples: Examples, ways: Ways) -> Iterator[tuple[int, int]]:
    """(extent, parts) of the batch dim of each tensor that has one."""
    for t, parts in ways:
        dim = examples.batch[t]
        if dim is not None:
            yield graph.tensors[t].shape[dim], parts[dim]


def _sizes(whole: int, cut: Iterable[tuple[int, int]], *, divisors: bool = True) -> list[int]:
    """The sizes from 2 on, below ``whole``, at which every cut (extent, parts) that is even now stays even.

    Extents scale with the size, so that [batch * sequence] is cut evenly too.
    """
    even = {(n, k) for n, k in cut if n % k == 0 and (n % whole == 0 or whole % n == 0)}
    able = [size for size in range(2, whole) if all(n * size % (whole * k) == 0 for n, k in even)]
    return ([size for size in able if whole % size == 0] if divisors else []) or able[:1]


def _stacks(graph: Graph, examples: Examples) -> frozenset[int]:
    """The tensors whose dim 0 counts the layers of a loop: those that it slices or stacks, and all that share this dim 0. A
    loop over data (timesteps, microbatches) has no layers.
    """
    ends = {k.source for k in graph.links if k.lift == 1} | {k.target for k in graph.links if k.lift == -1}
    found = {t for t in ends if 0 not in examples.data[t]}
    beside: dict[int, set[int]] = defaultdict(set)
    for a, b in _same_leading(graph):
        beside[a].add(b)
        beside[b].add(a)
    rest = sorted(found)
    while rest:
        new = beside[rest.pop()] - found
        found |= new
        rest += sorted(new)
    return frozenset(found)


def _same_leading(graph: Graph) -> Iterator[tuple[int, int]]:
    """Pairs of tensors whose dim 0 is the same: an operand and a result, a value passed on, or a state before and after."""
    for node in graph.nodes:
        yield from _through(graph, node)
    for link in graph.links:
        if link.lift == 0 and graph.tensors[link.source].shape:
            yield link.source, link.target
    for i, t in zip(graph.feedback, graph.outputs, strict=True):
        if i is not None and t >= 0 and graph.tensors[t].shape:
            yield graph.inputs[i], t


def _through(graph: Graph, node: Node) -> Iterator[tuple[int, int]]:
    """(operand, result) of an op, where one loop is dim 0 of both."""
    description = node.signature.description
    if description is None:
        return
    for operand, indices in description.accesses:
        source = node.inputs[operand]
        for t, loops in zip(node.outputs, description.results, strict=True):
            leads = source >= 0 and indices and loops and indices[0] == Affine(((loops[0], 1),))
            if leads and graph.tensors[source].shape[0] == graph.tensors[t].shape[0]:
                yield source, t


def parts_of(dims: Sequence[Sequence[int]], sizes: Sequence[int]) -> tuple[int, ...]:
    """The number of parts into which each dim is cut; ``dims`` are the factors that cut each."""
    return tuple(math.prod(sizes[f] for f in dim) for dim in dims)
