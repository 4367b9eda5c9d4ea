"""How many samples a step takes: the batch dim of its data, as baselines split it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shardplan.graph.nodes import Graph
from shardplan.search.baselines.batch_dims import depending, follow


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one step, the tokens in them (None unless the data are integers [batch, sequence]), and the path of the
    argument from which both were read.
    """

    count: int
    tokens: int | None
    path: str


def samples_of(graph: Graph) -> Samples | None:
    """The samples of a step: the batch dim of that array of its data of which most bytes of other values are made, of several the
    one that most arrays have; None for a step without data. What is made of data alone does not count: an array that the step
    does not give back may be a frozen weight.

    A loop takes the slices of a stack one after the other. If a value of the batch passes from one iteration to the next, they
    are timesteps of the same samples; else they are microbatches, each with samples of its own.
    """
    data = data_inputs(graph)
    batch = follow(graph, data).batch
    microbatches = {link.source for link in graph.links if link.lift == 1} - _timesteps(graph, batch)
    counts: dict[int, int] = {}
    for t in data:
        tensor, dim = graph.tensors[t], batch[t]
        if dim is not None and not tensor.dtype.startswith("key"):
            counts[t] = tensor.shape[dim] * (tensor.shape[0] if dim and t in microbatches else 1)
    if not counts:
        return None
    votes, made, most = Counter(counts.values()), _made(graph, batch), Counter[int]()
    for t, n in counts.items():
        most[n] = max(most[n], made[graph.tensors[t].shape[batch[t] or 0]])
    count = max(votes, key=lambda n: (most[n], votes[n], n))
    paths = dict(zip(graph.inputs, graph.input_paths, strict=True))
    sequences = [t for t, n in counts.items() if n == count and _is_sequence(graph, t, batch[t])]
    lead = (
        max(sequences, key=lambda t: graph.tensors[t].shape[-1]) if sequences else next(t for t in counts if counts[t] == count)
    )
    return Samples(count, count * graph.tensors[lead].shape[-1] if sequences else None, paths[lead])


def data_inputs(graph: Graph) -> list[int]:
    """The arrays that are data: those that the step does not give back; of a step that gives none back, the last argument."""
    state = {graph.inputs[i] for i in graph.feedback if i is not None}
    if state:
        return [t for t in graph.inputs if t not in state]
    last = graph.input_paths[-1].partition("/")[0] if graph.input_paths else ""
    return [t for t, path in zip(graph.inputs, graph.input_paths, strict=True) if path.partition("/")[0] == last]


def _made(graph: Graph, batch: Sequence[int | None]) -> Counter[int]:
    """The bytes of the values that depend on the step's state, by the extent of their batch dim."""
    made: Counter[int] = Counter()
    for t in depending(graph, [graph.inputs[i] for i in graph.feedback if i is not None]).difference(graph.inputs):
        if (dim := batch[t]) is not None:
            made[graph.tensors[t].shape[dim]] += graph.tensors[t].nbytes
    return made


def _timesteps(graph: Graph, batch: Sequence[int | None]) -> frozenset[int]:
    """The arrays that a loop slices while it carries a value with a batch dim from one slice to the next."""
    found: set[int] = set()
    for body in graph.bodies.values():
        inside = set(body)
        if any(t in inside and batch[t] is not None for t in graph.carries):
            found |= {link.source for link in graph.links if link.lift == 1 and link.target in inside}
    return frozenset(found)


def _is_sequence(graph: Graph, t: int, dim: int | None) -> bool:
    """Whether an array holds integers, with one dim after its batch dim."""
    tensor = graph.tensors[t]
    return tensor.dtype.startswith(("int", "uint")) and dim is not None and len(tensor.shape) == dim + 2
