"""Which buffer holds each tensor of a graph. An op for which no kernel runs makes no buffer: its result is a view of another."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from shardplan.graph.nodes import Graph, Node
from shardplan.tdl.kernels import casts
from shardplan.tdl.language import Access


class BufferUses:
    """Who makes and who reads each buffer, and which must be stored.

    ``calls`` has for each node the call of a library that runs its calls one by one; without it, all ops are compiled together.
    """

    def __init__(self, graph: Graph, calls: Sequence[Hashable] | None = None) -> None:
        self.graph = graph
        self.calls = calls
        self.name = list(range(len(graph.tensors)))  # by tensor: the tensor whose buffer holds it
        self.shown: dict[int, int] = {}  # by renamed tensor: the bytes of the buffer that it shows (a broadcast repeats them)
        self.renamed: set[int] = set()  # nodes for which no kernel runs
        self.leaving = {t for t in graph.outputs if t >= 0} | {k.source for k in graph.links}  # what a body gives to another
        self.narrowed: dict[int, float] = {}  # by result of a product: the part of its bytes that a cast leaves
        self.maker: dict[int, Node] = {}
        self.readers: dict[int, list[Node]] = {}
        self.kept: set[int] = set()  # buffers that control flow reads, or that are results
        self.stacked: set[int] = set()  # buffers that a loop copies to a stack, one in each iteration
        self._name_buffers()

    def _name_buffers(self) -> None:
        graph = self.graph
        using: dict[int, list[Node]] = {}
        for node in graph.nodes:
            for t in node.inputs:
                using.setdefault(t, []).append(node)
        for node in graph.nodes:
            if node.inputs[:1] and node.inputs[0] >= 0 and self._renames(node, using):
                source = node.inputs[0]
                for t in node.outputs:
                    self.name[t] = self.name[source]
                    self.shown[t] = min(graph.tensors[t].nbytes, self.shown.get(source, graph.tensors[source].nbytes))
                    if casts(node.signature.call) and graph.tensors[t].nbytes < graph.tensors[source].nbytes:
                        self.narrowed[self.name[source]] = graph.tensors[t].nbytes / graph.tensors[source].nbytes
                self.renamed.add(node.id)
                continue
            for t in node.outputs:
                self.maker[t] = node
            if node.signature.part == "update" and node.inputs[0] >= 0:
                self.kept.add(self.name[node.inputs[0]])
            for t in dict.fromkeys(node.inputs):
                if t >= 0:
                    self.readers.setdefault(self.name[t], []).append(node)
        self.stacked |= {self.name[k.source] for k in graph.links if k.lift < 0}
        self.kept |= {self.name[t] for t in graph.outputs if t >= 0}
        # a loop computes again what it stacks and reads, too
        read = {t for t in self.stacked if t in self.maker and self.readers.get(t)}
        self.kept |= {self.name[k.source] for k in graph.links if not k.same} - read
        for t, readers in self.readers.items():
            maker = self.maker.get(t)
            # the backward pass of a checkpointed block stands behind a barrier
            if maker is not None and any(r.where != maker.where and r.backward for r in readers):
                self.kept.add(t)

    def bytes_behind(self) -> Mapping[int, int]:
        """The bytes from which a kernel can compute each buffer: its own bytes, or fewer if an elementwise op makes it from a
        smaller value (a comparison with an iota).
        """
        behind: dict[int, int] = {}
        for node in self.graph.nodes:
            inputs = {self.name[t] for t in node.inputs if t >= 0}
            read = sum(behind.get(t, self.graph.tensors[t].nbytes) for t in inputs)
            for t in node.outputs:
                nbytes = self.graph.tensors[t].nbytes
                free = node.signature.part == "loop" and t not in self.kept
                behind.setdefault(self.name[t], min(nbytes, read) if free else nbytes)
        return behind

    def _renames(self, node: Node, using: Mapping[int, Sequence[Node]]) -> bool:
        """Whether no kernel runs for a node: a reshape, a transpose beside a product, or a cast that is part of a product."""
        if self.calls is not None and self._is_view_or_bias(node, self.calls):
            return True
        if len(node.outputs) != 1:
            return False
        if self.calls is None and casts(node.signature.call):
            return self._is_part_of_product(node, using)
        if node.signature.part == "none":
            return True
        if not node.signature.swaps:
            return False
        maker, readers = self.maker.get(node.inputs[0]), using.get(node.outputs[0], ())
        made = maker is not None and maker.signature.part == "product" and len(using[node.inputs[0]]) == 1
        return made or (bool(readers) and all(r.signature.part == "product" for r in readers))

    def _is_part_of_product(self, node: Node, using: Mapping[int, Sequence[Node]]) -> bool:
        """Whether a cast is part of matrix products (XLA's gemm fusion): it widens what only they read, or narrows what one makes
        and only the cast reads. Reshapes may stand between them.
        """
        (source, *_), (result,) = node.inputs, node.outputs
        if self.graph.tensors[result].nbytes > self.graph.tensors[source].nbytes:
            readers = self._past_reshapes(result, using)
            return bool(readers) and all(_is_matrix_product(r) for r in readers)
        maker = self.maker.get(self.name[source])
        return maker is not None and _is_matrix_product(maker) and self._past_reshapes(self.name[source], using) == [node]

    def _past_reshapes(self, t: int, using: Mapping[int, Sequence[Node]]) -> list[Node]:
        """The nodes that read a value, reshaped or not; none where it leaves its body."""
        if t in self.leaving:
            return []
        found: list[Node] = []
        for reader in using.get(t, ()):
            behind = [reader] if reader.signature.part != "none" else self._past_reshapes(reader.outputs[0], using)
            if not behind:
                return []
            found += behind
        return found

    def _is_view_or_bias(self, node: Node, calls: Sequence[Hashable]) -> bool:
        """Whether a library that runs calls one by one runs no kernel for a node.

        If a kernel reads several views of one buffer, it is charged the largest.
        """
        if node.signature.part != "loop" or node.signature.description is None:
            return False
        trees, call = node.signature.description.trees, node.signature.call
        if (
            all(isinstance(tree, Access) for tree in trees)
            and {*call.dtypes} == {*call.result_dtypes}
            and len(call.operands) == 1
        ):
            return True
        maker = self.maker.get(self.name[node.inputs[0]])
        return (
            maker is not None
            and maker.signature.part == "product"
            and calls[maker.id] == calls[node.id]
            and call.operands[0] == call.results[0]
        )

    def shown_part(self, t: int) -> float:
        """The bytes of its buffer that a tensor shows, over the bytes of the tensor: below 1 for a broadcast."""
        nbytes = self.graph.tensors[t].nbytes
        return self.shown.get(t, nbytes) / max(1, nbytes)

    def slot(self, node: Node, t: int) -> int:
        """The number of the first operand of a node that shows a buffer."""
        return next(i for i, own in enumerate(node.inputs) if own >= 0 and self.name[own] == t)


def _is_matrix_product(node: Node) -> bool:
    return node.signature.part == "product" and not node.signature.filter
