"""Which products are attention's, by what happens between them: no name of the model decides.

Attention is a product of two values (QK), a softmax over its result, and another product of two values (AV). In a softmax, values
meet their maximum, then their sum. In a layer norm they meet sums alone, and the gate of experts follows a product with a weight.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from shardplan.graph.nodes import Graph, Node
from shardplan.ir import Layout, Reducer

QK, AV = "QK", "AV"


class _Stage(IntEnum):
    """How far a softmax has come: its values, their maximum, the values less it, the sum of these, the values divided by it."""

    VALUES = 0
    MAXIMUM = 1
    SHIFTED = 2
    SUM = 3
    NORMALISED = 4


@dataclass(frozen=True, slots=True)
class _Score:
    """A value made of the results of ``products``, and its stage."""

    products: frozenset[int]
    stage: _Stage


def weight_tensors(graph: Graph, free: Container[int] = frozenset()) -> Mapping[int, int]:
    """The tensors that hold one weight (itself, its slice in a loop, a cast, a transpose), each with the number of that input.

    Weights are inputs with two dims or more that the step feeds back; where it feeds none back, all such inputs. ``free`` are
    tensors that depend on no input.
    """
    state = {i for i in graph.feedback if i is not None} or set(range(len(graph.inputs)))
    weight_of = {t: i for i, t in enumerate(graph.inputs) if i in state and len(graph.tensors[t].shape) > 1}
    entered: dict[int, list[int]] = {}
    for link in graph.links:
        if link.target in graph.boundary:
            entered.setdefault(link.target, []).append(link.source)
    changed = True
    while changed:  # bodies may be nested
        before = len(weight_of)
        for target, sources in entered.items():
            if len(sources) == 1 and sources[0] in weight_of:  # a carry has two sources
                weight_of.setdefault(target, weight_of[sources[0]])
        for node in graph.nodes:
            alive = {t for t in node.inputs if t >= 0 and t not in free}
            if len(alive) == 1 and len(node.outputs) == 1:
                (t,) = alive
                if t in weight_of and graph.tensors[t].size == graph.tensors[node.outputs[0]].size:
                    weight_of.setdefault(node.outputs[0], weight_of[t])
        changed = len(weight_of) != before
    return weight_of


def product_names(graph: Graph, layouts: Sequence[Layout | None]) -> dict[int, str]:
    """`attention_products` of a graph whose tensors have these layouts (None: computed anew where they are read)."""
    return attention_products(graph, weight_tensors(graph, frozenset(t for t, own in enumerate(layouts) if own is None)))


def attention_products(graph: Graph, weights: Container[int]) -> dict[int, str]:
    """The names of attention's products by node: "QK", "AV", "gradient of QK", "gradient of AV".

    ``weights`` are the tensors that hold weights (`weight_tensors`). A product of the backward pass that reads all operands of
    one of the forward pass computes it again; one of the same source line that reads some of them makes a gradient.
    """
    return _Namer(graph, weights).names()


@dataclass(frozen=True, slots=True)
class _Namer:
    """The state of a walk over the nodes in the order of the step: scores by tensor, and the products found by node."""

    graph: Graph
    weights: Container[int]
    scores: dict[int, _Score] = field(default_factory=dict[int, _Score])
    found: dict[int, str] = field(default_factory=dict[int, str])
    sources: dict[int, int] = field(default_factory=dict[int, int])
    makers: dict[int, Node] = field(default_factory=dict[int, Node])

    def names(self) -> dict[int, str]:
        """The products of the forward pass, then those of the backward pass that read the same values."""
        for link in self.graph.links:
            self.sources.setdefault(link.target, link.source)  # of a carry, the value before the loop
        for node in self.graph.nodes:
            self.makers.update(dict.fromkeys(node.outputs, node))
            if not node.backward:
                self._forward(node)
        return self.found | self._backward() if self.found else {}

    # -- the forward pass ----------------------------------------------------------------------------------------------

    def _forward(self, node: Node) -> None:
        read = [s for t in _alive(node.inputs) if (s := self._score(t)) is not None]
        score = _joined(read, node.signature.reducers)
        if node.signature.contracts:
            score = None
            if not any(t in self.weights for t in node.inputs):
                for one in read:
                    if one.stage is _Stage.NORMALISED:
                        self.found.update(dict.fromkeys(one.products - self.found.keys(), QK))
                        self.found[node.id] = AV
                score = _Score(frozenset({node.id}), _Stage.VALUES)
        if score is not None:
            self.scores.update(dict.fromkeys(node.outputs, score))

    def _score(self, tensor: int) -> _Score | None:
        return next((self.scores[t] for t in self._earlier(tensor) if t in self.scores), None)

    def _earlier(self, tensor: int) -> Iterator[int]:
        """A tensor, and the tensors from which bodies of loops get its value."""
        seen: set[int] = set()
        while tensor not in seen:
            yield tensor
            seen.add(tensor)
            tensor = self.sources.get(tensor, tensor)

    # -- the backward pass ---------------------------------------------------------------------------------------------

    def _backward(self) -> dict[int, str]:
        names: dict[int, str] = {}
        operands: dict[tuple[int, str], str] = {}  # by the root of an operand and the source line of its product
        known: dict[tuple[int, str], str] = {}
        whole: dict[frozenset[int], str] = {}
        for node in self.graph.nodes:
            if not node.signature.contracts or not (node.backward or node.id in self.found):
                continue
            roots = frozenset(self._root(t) for t in _alive(node.inputs))
            source = str(node.op.source)
            key = node.signature.id, source
            read = [operands[t, source] for t in sorted(roots) if (t, source) in operands]
            name = self.found.get(node.id) or whole.get(roots)
            if name is None and not read:
                name = known.get(key)  # computed again, from operands that were computed again
            if name is not None:
                operands.update(dict.fromkeys(((t, source) for t in roots), name))
                known[key] = whole[roots] = names[node.id] = name
            elif read:
                names[node.id] = f"gradient of {read[0]}"
        return names

    def _root(self, tensor: int) -> int:
        """The value that a tensor holds, before it was moved, cast or passed into a loop."""
        seen: set[int] = set()
        while tensor not in seen:
            seen.add(tensor)
            node = self.makers.get(tensor)
            if node is None:
                tensor = self.sources.get(tensor, tensor)
            elif node.signature.moves:
                tensor = node.inputs[0]
        return tensor


def _alive(tensors: Sequence[int]) -> Iterable[int]:
    return (t for t in tensors if t >= 0)


def _joined(read: Sequence[_Score], reducers: Container[Reducer]) -> _Score | None:
    """The score of an op's result, given the scores that it reads and its reducers."""
    if not read:
        return None
    stages = {one.stage for one in read}
    stage = max(stages)
    if stages >= {_Stage.SHIFTED, _Stage.SUM}:
        stage = _Stage.NORMALISED
    elif stages >= {_Stage.VALUES, _Stage.MAXIMUM}:
        stage = max(stage, _Stage.SHIFTED)
    elif (stage is _Stage.SHIFTED and "sum" in reducers) or (stage is _Stage.VALUES and "max" in reducers):
        stage = _Stage(stage + 1)
    return _Score(frozenset[int]().union(*(one.products for one in read)), stage)
