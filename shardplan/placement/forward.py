"""The forward pass of a step, op by op: which operator each joins."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shardplan.graph.nodes import Graph, Node
from shardplan.ir import Program
from shardplan.placement.labels import Passed, anchored, labels_before, merged, passed
from shardplan.placement.operators import Labels, OpWork
from shardplan.placement.roles import roles_of


@dataclass(slots=True)
class GrowingOperator:
    """An operator while ops join it.

    ``extents[n]`` has the extents of all dims that loop n splits. ``labels`` are the labels of the tensors that it makes,
    ``read`` those of the tensors of other operators, and of the arguments, that it reads. ``works`` has its ops by phase.
    ``shapes`` labels tensors by shape.
    """

    anchor: Node
    names: list[str]
    extents: list[int]
    labels: dict[int, Labels] = field(default_factory=dict[int, Labels])
    read: dict[int, Labels] = field(default_factory=dict[int, Labels])
    works: tuple[list[OpWork], list[OpWork], list[OpWork]] = field(default_factory=lambda: ([], [], []))
    shapes: dict[tuple[int, ...], Labels] = field(default_factory=dict[tuple[int, ...], Labels])
    contracts: bool = False
    loop: bool = False
    cut: tuple[tuple[int, int], ...] = ()


class Grouping:
    """The operators of a graph while its nodes are given to them.

    ``of`` is the operator of each tensor of the forward pass, ``owner`` the operator of each node.
    """

    def __init__(self, graph: Graph, program: Program) -> None:
        self.graph, self.roles = graph, roles_of(graph, program)
        self.groups: list[GrowingOperator] = []
        self.of: dict[int, int] = {}
        self.owner: dict[int, int] = {}
        self.derived: dict[int, Node] = {}
        self.charged: set[int] = set()
        self._loops: dict[object, int] = {}
        self._entered = {link.target: link.source for link in graph.links if link.target in graph.boundary}
        self._entered |= {t: initial for t, (initial, _, _) in graph.carries.items()}
        self._left = {link.target: link.source for link in graph.links if link.target not in graph.boundary}
        self._left |= {after: last for _, last, after in graph.carries.values()}

    # -- the forward pass --------------------------------------------------------------------------------------------

    def forward(self, node: Node) -> None:
        """Gives a node of the forward pass to an operator."""
        roles = self.roles
        key = roles.enclosing(node)
        if key is not None:
            self._join_loop(node, key)
            return
        operands = [t for t in dict.fromkeys(node.inputs) if t >= 0 and t not in roles.free]
        if not operands and set(node.outputs) <= roles.free:
            return
        if all(self._is_argument(t) for t in operands) and not _starts(node):
            self.derived.update(dict.fromkeys(node.outputs, node))
            return
        makers = [at for t in operands if (at := self.maker(t)) is not None]
        if makers and not node.signature.multiplies:
            at = max(makers)
            group = self.groups[at]
            how = None if group.loop else passed(node, [group.labels.get(t) if t >= 0 else None for t in node.inputs])
            if how is not None:
                self._add(at, node, how)
                return
        self._start(node)

    def maker(self, t: int) -> int | None:
        """The operator that makes a tensor; a tensor that leaves a loop belongs to the loop's operator."""
        if t not in self.of and t in self._left:
            at = self.maker(self._left[t])
            if at is not None:
                self.of[t] = at
                self.groups[at].labels[t] = self.roles.sample_labels(t)
        return self.of.get(t)

    def _is_argument(self, t: int) -> bool:
        return t in self.derived or t in self.roles.arguments

    def _start(self, node: Node) -> None:
        how = anchored(node) or Passed(
            tuple((-1,) * len(s) for s in node.signature.call.operands),
            tuple((-1,) * len(s) for s in node.signature.call.results),
            (),
            (),
        )
        description = node.signature.description
        loops = [] if description is None else [description.loops[v] for v, _ in how.cut]
        group = GrowingOperator(
            node, [loop.name for loop in loops], [loop.extent for loop in loops], contracts=node.signature.multiplies
        )
        group.cut = how.cut
        self.groups.append(group)
        self._add(len(self.groups) - 1, node, how)

    def _add(self, at: int, node: Node, how: Passed) -> None:
        """Adds an op of the forward pass to an operator, with how it passes labels on."""
        group = self.groups[at]
        self.owner[node.id] = at
        self._record(group, node, how)
        for t, labels in zip(node.outputs, how.results, strict=True):
            self.of[t] = at
            group.labels[t] = labels
        exchanged = sum(self.graph.tensors[t].nbytes for t in node.outputs) if how.reduces else 0.0
        divides = tuple(dict.fromkeys(n for _, n in how.cut))
        group.works[0].append(
            OpWork(node.costed, node.weight, how.operands, how.results, how.cut, divides, how.reduces, exchanged * node.weight)
        )

    def _record(self, group: GrowingOperator, node: Node, how: Passed) -> None:
        """Notes what an op of the forward pass reads, and the extents that the loops divide."""
        tensors = self.graph.tensors
        for t, labels in zip((*node.inputs, *node.outputs), (*how.operands, *how.results), strict=True):
            if t < 0:
                continue
            for d, n in enumerate(labels):
                if n >= 0:
                    group.extents[n] = math.gcd(group.extents[n], tensors[t].shape[d])
            group.shapes.setdefault(tensors[t].shape, labels)
        for t, labels in zip(node.inputs, how.operands, strict=True):
            if t >= 0 and t not in self.roles.free and t not in group.labels:
                self._read(group, t, labels)

    def _read(self, group: GrowingOperator, t: int, labels: Labels) -> None:
        """Notes that a group reads a tensor with these labels; a tensor derived from arguments counts as read from them."""
        node = self.derived.get(t)
        if node is None:
            group.read[t] = merged(group.read[t], labels) if t in group.read else labels
            return
        before = labels_before(node, labels if node.outputs[0] == t else (-1,) * len(labels))
        if node.id not in self.charged:
            self.charged.add(node.id)
            self.owner[node.id] = next(j for j, own in enumerate(self.groups) if own is group)
            group.works[0].append(OpWork(node.costed, node.weight, before, tuple(labels for _ in node.outputs)))
        for source, own in zip(node.inputs, before, strict=True):
            if source >= 0 and source not in self.roles.free:
                self._read(group, source, own)

    # -- loops -------------------------------------------------------------------------------------------------------

    def _join_loop(self, node: Node, key: object) -> None:
        """Adds an op inside a scan or a while loop to the operator of that loop, which is cut over samples."""
        if key not in self._loops:
            self._loops[key] = len(self.groups)
            self.groups.append(GrowingOperator(node, ["sample"], [0], loop=True))
        at = self._loops[key]
        group = self.groups[at]
        self.owner[node.id] = at
        group.contracts |= node.signature.multiplies
        operands, results = (tuple(self.roles.sample_labels(t) for t in side) for side in (node.inputs, node.outputs))
        shapes = node.signature.call.operands
        operands = tuple(own if len(own) == len(s) else (-1,) * len(s) for own, s in zip(operands, shapes, strict=True))
        how = Passed(operands, results, (), ())
        self._record(group, node, how)
        for t, labels in zip(node.outputs, results, strict=True):
            self.of[t] = at
            group.labels[t] = labels
        sampled = any(0 in labels for labels in (*operands, *results))
        group.works[0].append(OpWork(node.costed, node.weight, operands, results, (), (0,) if sampled else ()))

    def follow_links(self) -> None:
        """Ties what a loop reads to the tensors outside of it."""
        tensors = self.graph.tensors
        for group in self.groups:
            for t in list(group.read):
                source = self.outside(t)
                if source != t:
                    labels = group.read.pop(t)
                    labels = labels if len(labels) == len(tensors[source].shape) else self.roles.sample_labels(source)
                    group.read[source] = merged(group.read[source], labels) if source in group.read else labels

    def outside(self, t: int) -> int:
        """The tensor outside of all loops by which a tensor inside enters."""
        while t in self._entered:
            t = self._entered[t]
        return t


def _starts(node: Node) -> bool:
    """Whether an op on arguments alone starts an operator: it multiplies, or reads by data, or reduces."""
    signature = node.signature
    light = signature.elementwise or signature.moves or signature.part == "broadcast" or len(signature.call.operands) <= 1
    return signature.multiplies or not light or bool(signature.reducers)
