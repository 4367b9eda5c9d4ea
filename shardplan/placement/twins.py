"""Gives each op of the backward pass, and of the update, to the operator of the forward pass that it belongs to.

The gradient of a weight belongs to the operator that reads the weight. Each of the two gradients of a product reads the other
operand, so the forward product that reads the same tensor is the twin. Any other op reads a value that an op of its operator
read at the same line of the step, or only passes a gradient on.
"""

from __future__ import annotations

from shardplan.graph.nodes import Node
from shardplan.placement.forward import Grouping
from shardplan.placement.labels import by_shape
from shardplan.placement.operators import BACKWARD, UPDATE, OpWork
from shardplan.search.coarsening.gradient_pairing import same_values


def assign_backward(grouping: Grouping) -> None:
    """Adds every node of the backward pass to the works of an operator."""
    _Backward(grouping).run()


class _Backward:
    def __init__(self, grouping: Grouping) -> None:
        self.grouping, self.roles = grouping, grouping.roles
        self.values = same_values(grouping.graph)
        self.of: dict[int, int] = {}  # of each gradient, its operator
        self.readers: dict[int, list[int]] = {}
        self.users: dict[int, list[int]] = {}
        self.loops: dict[object, int] = {}
        for j, group in enumerate(grouping.groups):
            for t in group.read:
                (self.users if t in self.roles.trained else self.readers).setdefault(self._value(t), []).append(j)
        self.lines: dict[tuple[int, str], set[int]] = {}  # operators of the nodes that read a value, by value and source line
        for node in grouping.graph.nodes:
            made = {grouping.of[t] for t in node.outputs if t in grouping.of} if not node.backward else set[int]()
            for t in node.inputs:
                if t >= 0 and made:
                    self.lines.setdefault((self._value(t), str(node.op.source)), set()).update(made)
        self.sources: dict[int, list[int]] = {}
        for link in grouping.graph.links:
            self.sources.setdefault(link.target, []).append(link.source)

    def run(self) -> None:
        """Walks the backward pass in order."""
        for node in self.grouping.graph.nodes:
            if self.roles.phases[node.id] == BACKWARD:
                at = self._operator(node)
                self.grouping.owner[node.id] = at
                self.of.update(dict.fromkeys(node.outputs, at))
                group = self.grouping.groups[at]
                how = by_shape(node, group.shapes)
                every = tuple(range(len(group.extents)))
                group.works[BACKWARD].append(OpWork(node.costed, node.weight, how.operands, how.results, (), every))

    def _value(self, t: int) -> int:
        return self.values[t]

    def _operator(self, node: Node) -> int:
        key = self.roles.enclosing(node)
        if key is not None:
            if key not in self.loops:
                self.loops[key] = self._loop(node)
            return self.loops[key]
        gradients = [self.of[t] for t in node.inputs if t in self.of]
        before = min(gradients, default=len(self.grouping.groups) - 1)
        own = [w for t in node.outputs for w in self.roles.ends.get(t, ()) if w in self.roles.trained]
        users = sorted({j for w in own for j in self.users.get(self._value(w), ())})
        if users:
            return _nearest(users, before)
        saved = [t for t in node.inputs if t >= 0 and t not in self.of and t not in self.roles.free]
        if node.signature.multiplies:
            twins = self._twins(saved)
            return _nearest(twins, before) if twins else before
        same_line = sorted({j for t in saved for j in self.lines.get((self._value(t), str(node.op.source)), ())})
        if same_line:
            return _nearest(same_line, before)
        made = [self.grouping.of[v] for t in saved if (v := self._value(t)) in self.grouping.of]
        return min(max(made), before) if made else before

    def _twins(self, saved: list[int]) -> list[int]:
        """The operators of the forward pass whose products read one of these tensors."""
        found: list[int] = []
        for t in saved:
            for root in self._roots(t):
                found += self.users.get(root, []) + self.readers.get(root, [])
            if not found and self._value(t) in self.grouping.of:
                found.append(self.grouping.of[self._value(t)])
        groups = self.grouping.groups
        return sorted({j for j in found if groups[j].contracts} or set(found))

    def _roots(self, t: int) -> list[int]:
        """The tensors that operators read for this one: itself, or the arguments that it is derived from."""
        node = self.grouping.derived.get(t)
        if node is None:
            return [self._value(t)]
        return [r for s in node.inputs if s >= 0 and s not in self.roles.free for r in self._roots(s)]

    def _loop(self, node: Node) -> int:
        """The operator of a loop of the backward pass: the last one that saved a value for it, but none after the operator of
        its gradients.
        """
        key, graph = self.roles.enclosing(node), self.grouping.graph
        inside = {t for n in graph.nodes if self.roles.enclosing(n) == key for t in n.inputs}
        outside = [s for t in inside for s in self.sources.get(t, ())]
        made = [at for s in outside if (at := self.grouping.maker(s)) is not None]
        loops = [j for j in made if self.grouping.groups[j].loop]
        return max(loops or made, default=len(self.grouping.groups) - 1)


def _nearest(candidates: list[int], before: int) -> int:
    """The last candidate that comes no later than ``before``; else the first."""
    return max((j for j in candidates if j <= before), default=candidates[0])


def assign_update(grouping: Grouping) -> None:
    """Adds every node of the update to the operator that reads its weight first."""
    roles = grouping.roles
    first: dict[int, int] = {}
    for j, group in enumerate(grouping.groups):
        for t in group.read:
            if t in roles.trained:
                first.setdefault(t, j)
    at_last = len(grouping.groups) - 1
    for node in grouping.graph.nodes:
        if roles.phases[node.id] != UPDATE or set(node.outputs) <= roles.free:
            continue
        own = [first[w] for t in node.outputs for w in roles.ends.get(t, ()) if w in first]
        at = min(own) if own else at_last
        grouping.owner[node.id] = at
        how = by_shape(node, grouping.groups[at].shapes)
        works = grouping.groups[at].works[UPDATE]
        works.append(OpWork(node.costed, node.weight, how.operands, how.results))
        for t in node.inputs:
            source = grouping.derived.get(t)
            if source is not None and source.id not in grouping.charged:
                grouping.charged.add(source.id)
                grouping.owner[source.id] = at
                works.append(OpWork(source.costed, source.weight, how.operands[:1] * len(source.inputs), how.results))
