"""A step on one GPU as its kernels in program order, each with the blocks of memory that it reads and writes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shardplan.graph import Graph
from shardplan.graph.nodes import Node

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kernel:
    """An op that takes time. ``node`` is its number in the graph (-1: in none)."""

    seconds: float
    reads: Ids
    writes: Ids
    node: int = -1

    @property
    def touches(self) -> Ids:
        """The blocks that are in memory while it runs."""
        return tuple(dict.fromkeys((*self.reads, *self.writes)))


@dataclass(frozen=True, slots=True)
class Trace:
    """Kernels in program order, and the bytes of each block.

    The first ``arguments`` blocks are those of the step's arguments: they outlive it. Any other block lives from the first kernel
    that touches it to the last.
    """

    kernels: tuple[Kernel, ...]
    nbytes: tuple[float, ...]
    arguments: int

    @property
    def largest_kernel_bytes(self) -> float:
        """The bytes of the kernel that touches most: no less memory runs the step."""
        return max((sum(self.nbytes[b] for b in k.touches) for k in self.kernels), default=0.0)


def trace_of(plan: Any) -> Trace:
    """The trace of a plan on one device, of a step without loops.

    Values inside a chain of fused ops have no block: the kernel at its end reads the blocks that the chain begins with. A result
    that replaces a donated argument takes its block. A product that is added to a sum of products is added in place, as MXNet
    aggregates gradients (section 7.2 on Table 3).
    """
    return _Walk(plan.session.graph, plan.planned.op_seconds, frozenset(plan.donated_leaves)).trace()


class _Walk:
    def __init__(self, graph: Graph, seconds: tuple[float, ...], donated: frozenset[int]) -> None:
        self.graph, self.seconds = graph, seconds
        self.nbytes = [float(graph.tensors[t].nbytes) for t in graph.inputs]
        self.blocks: dict[int, Ids] = {t: (i,) for i, t in enumerate(graph.inputs)}  # by tensor
        pairs = zip(graph.outputs, graph.feedback, strict=True)
        self.replaces = {t: i for t, i in pairs if i is not None and i in donated}
        self.same = {link.target: link.source for link in graph.links if link.target not in self.blocks}
        self.readers: dict[int, int] = {}
        for node in graph.nodes:
            for t in node.inputs:
                self.readers[t] = self.readers.get(t, 0) + 1
        self.terms: set[int] = set()

    def trace(self) -> Trace:
        """Walks the step."""
        kernels = [self.kernel(node) for node in self.graph.nodes]
        return Trace(tuple(k for k in kernels if k.seconds > 0 or k.writes), tuple(self.nbytes), len(self.graph.inputs))

    def kernel(self, node: Node) -> Kernel:
        """What an op reads and writes; its results have their blocks afterwards."""
        reads = self.of(node.inputs)
        seconds, traffic = self.seconds[node.id] * node.weight, node.costed.traffic
        summed = self.is_sum(node)
        writes: list[int] = []
        for r, t in enumerate(node.outputs):
            stored = seconds > 0 and (traffic is None or traffic.writes[r] > 0)
            if t in self.replaces:
                own: Ids = (self.replaces[t],)
            elif summed:
                own = self.of(node.inputs[:1])[:1]
            elif stored:
                own = (self.made(t),)
            else:
                self.blocks[t] = reads
                continue
            self.blocks[t] = own
            writes += own
        return Kernel(seconds, reads, tuple(dict.fromkeys(writes)), node.id)

    def is_sum(self, node: Node) -> bool:
        """Whether an op adds two products, or sums of such, that nothing else reads."""
        signature = node.signature
        summed = signature.adds and len(node.inputs) > 1 and self.terms.issuperset(node.inputs)
        if summed or signature.contracts or (signature.moves and self.terms.issuperset(node.inputs)):
            self.terms.update(t for t in node.outputs if self.readers.get(t) == 1)
        return summed

    def made(self, tensor: int) -> int:
        """A new block for a tensor."""
        self.nbytes.append(float(self.graph.tensors[tensor].nbytes))
        return len(self.nbytes) - 1

    def of(self, tensors: Iterable[int]) -> Ids:
        """The blocks of tensors; literals and constants have none."""
        found: list[int] = []
        for t in tensors:
            while t in self.same and t not in self.blocks:
                t = self.same[t]
            found += self.blocks.get(t, ())
        return tuple(dict.fromkeys(found))
