"""Which values may stay partial sums: sums that an addition or a loop's carry adds up, and sums that only contractions with
smaller results read.

A gradient that is summed over microbatches, timesteps or the readers of an activation is then reduced once, not once per term.
If a weight is a product of factors (an adapter of low rank), the gradients of the factors are reduced instead of its own. An op
passes a partial sum on if its description is linear in it and its result is no narrower. A contraction may multiply it by a
value that is whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from shardplan.graph.nodes import Graph, Node, Signature
from shardplan.ir import Constant
from shardplan.tdl import linear_sets


@dataclass(frozen=True, slots=True)
class Deferrable:
    """The tensors that may be partial sums.

    ``late``: tensors whose layouts may be partial. Each lies on a path from a cut sum to an addition of several such sums, to a
    carry, or to contractions that are its only readers and have smaller results. ``zero``: tensors that depend on no input and
    are known to be zero; they may be called partial at no cost.
    """

    late: frozenset[int]
    zero: frozenset[int]


def deferrable(graph: Graph, free: Set[int]) -> Deferrable:
    """Finds the tensors that may be partial sums; ``free`` are the tensors that depend on no input."""
    search = _Search(graph, free)
    return Deferrable(search.useful(), frozenset(search.zero))


class _Search:
    """The search: ``zero`` holds the values known to be zero, ``terms`` the sums in each value that could be partial."""

    def __init__(self, graph: Graph, free: Set[int]) -> None:
        self.graph, self.free = graph, free
        self.same: dict[int, list[int]] = {}
        for link in reversed(graph.links):  # outputs of an outer body are known before those of its inner bodies
            if link.same:
                onward = [link.target, *self.same.get(link.target, ())]
                self.same.setdefault(link.source, []).extend(onward)
        self._sets: dict[int, tuple[frozenset[int], ...]] = {}
        self.zero: set[int] = set()
        self._note_zeros()
        self.carries = {t for t, (start, _, _) in graph.carries.items() if start in self.zero}
        self.terms = self._terms()  # leaves the carries that are partial

    def useful(self) -> frozenset[int]:
        """The tensors that gain from waiting: on paths to an addition, to a carry, or to contractions with smaller results."""
        partials: set[int] = set(self.carries)
        partials.update(self.graph.carries[t][1] for t in self.carries)
        for node in reversed(self.graph.nodes):
            outs = [t for t in node.outputs if t in self.terms]
            partials.update(t for t in outs if any(u in partials for u in self.same.get(t, ())))
            passed = self._passed(node, self.terms) if outs else []
            if passed and (self._adds_up(passed, outs) or any(t in partials for t in outs)):
                partials.update(passed, outs)
        partials |= self._before_contractions()
        carried: set[tuple[int, int]] = set()
        for t in self.carries:
            _, end, after = self.graph.carries[t]
            carried.update(((end, t), (t, after)))
        # a tensor that enters or leaves a body by any other link is whole
        crossing = {k.source for k in self.graph.links if not k.same and (k.source, k.target) not in carried}
        return frozenset(partials - crossing)

    def _before_contractions(self) -> set[int]:
        """Tensors that only contractions with smaller results read, or ops that pass the sum on to such contractions; with the
        results of these readers.
        """
        graph, terms = self.graph, self._terms(whole=True)
        readers: dict[int, list[Node]] = {}
        for node in graph.nodes:
            for t in dict.fromkeys(node.inputs):
                readers.setdefault(t, []).append(node)
        kept = {*graph.outputs, *(k.source for k in graph.links)}
        late: set[int] = set()
        for node in reversed(graph.nodes):
            for t in node.outputs:
                after = readers.get(t, []) if t in terms and t not in kept else []
                if (
                    after
                    and all(t in self._passed(r, terms, whole=True) for r in after)
                    and self._have_smaller_results(after, t, late)
                ):
                    late.update((t, *(o for r in after for o in r.outputs)))
        return late

    def _have_smaller_results(self, readers: Sequence[Node], t: int, late: Set[int]) -> bool:
        """Whether the readers at which a partial sum ends are contractions whose results, together, are smaller than the sum."""
        ending = [r for r in readers if not all(o in late for o in r.outputs)]
        nbytes = sum(self.graph.tensors[o].nbytes for r in ending for o in r.outputs)
        return all(r.signature.contracts for r in ending) and nbytes < self.graph.tensors[t].nbytes

    def _adds_up(self, read: Sequence[int], made: Sequence[int]) -> bool:
        """Whether several sums as large as the result are added: deferring smaller pieces side by side would save no bytes."""
        if len({self.terms[t] for t in read}) < 2:
            return False
        size = self.graph.tensors[made[0]].size
        whole = [t for t in frozenset[int]().union(*(self.terms[t] for t in read)) if self.graph.tensors[t].size >= size]
        return len(whole) > 1

    def _terms(self, *, whole: bool = False) -> dict[int, frozenset[int]]:
        """The sums in each tensor that could be partial, found forwards. ``whole``: see `_passed`.

        A carry counts as partial until its body turns out to return a value that is not.
        """
        while True:
            partials = {t: frozenset({t}) for t in self.carries}
            for node in self.graph.nodes:
                made = frozenset(node.outputs) if _sums(node.signature) else frozenset[int]()
                made = made.union(*(partials[t] for t in self._passed(node, partials, whole=whole)))
                for t in node.outputs if made else ():
                    if t not in self.free:
                        partials.update(dict.fromkeys((t, *self.same.get(t, ())), made))
            wrong = {t for t in self.carries if self.graph.carries[t][1] not in partials}
            if not wrong:
                return partials
            self.carries -= wrong

    def _passed(self, node: Node, known: Mapping[int, object], *, whole: bool = False) -> list[int]:
        """The operands that an op passes on as partial sums: all that depend on an input, or none.

        ``whole``: a contraction may multiply them by whole values.
        """
        alive = {i for i, t in enumerate(node.inputs) if t >= 0 and t not in self.free}
        partial = {i for i in alive if node.inputs[i] in known}
        beside_whole = whole and node.signature.contracts
        if not partial or (partial < alive and not beside_whole) or self._narrows(node):
            return []
        others = {i for i in range(len(node.inputs)) if i not in alive and self._is_zero(node, i)}
        passed: set[int] = set()
        for s in self._linear(node.signature):
            taken = partial & s if beside_whole else alive
            if taken and taken <= s <= taken | others:
                passed |= {node.inputs[i] for i in taken}
        return sorted(passed)

    def _narrows(self, node: Node) -> bool:
        sizes = [self.graph.tensors[t].itemsize for t in node.inputs if t >= 0 and t not in self.free]
        widest = max(sizes, default=0)
        return any(self.graph.tensors[t].itemsize < widest for t in node.outputs)

    def _linear(self, signature: Signature) -> tuple[frozenset[int], ...]:
        if signature.id not in self._sets:
            description = signature.description
            sets: Sequence[tuple[int, ...]] = () if description is None or not signature.defers else linear_sets(description)
            self._sets[signature.id] = tuple(frozenset(s) for s in sets if s)
        return self._sets[signature.id]

    def _note_zeros(self) -> None:
        for node in self.graph.nodes:
            alone = all(t in self.free for t in node.outputs)
            if alone and any(all(self._is_zero(node, i) for i in s) for s in self._linear(node.signature)):
                self.zero.update(node.outputs)

    def _is_zero(self, node: Node, operand: int) -> bool:
        argument = node.op.inputs[operand]
        return not argument.value if isinstance(argument, Constant) else node.inputs[operand] in self.zero


def _sums(signature: Signature) -> bool:
    description = signature.description
    if description is None or not signature.defers:
        return False
    return any(info.reducer == "sum" and info.extent > 1 for info in description.loops)
