"""The purpose of each factor of a plan: the rows of its parallelism matrix.

The contractions say it, by the loops that a factor cuts. Loops over the batch are data parallelism, or FSDP where the op's weight
is stored split over the factor; loops over other dims of the data (positions, height, width) are sequence parallelism; loops that
run over a weight and an activation side by side, without being summed, are experts; all others, over features and heads, are
tensor parallelism. A factor that cuts no contraction is a replica.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal, TypeVar, get_args

from shardplan.graph.nodes import Node
from shardplan.search.baselines.batch_dims import follow
from shardplan.search.baselines.megatron import roots
from shardplan.search.coarsening.coarsen import FREE
from shardplan.search.problem.compute_prices import least_compute_s
from shardplan.search.problem.extract import Decisions
from shardplan.search.problem.problem import Problem
from shardplan.tdl.index import loops_of

Purpose = Literal["data", "fsdp", "tensor", "sequence", "expert", "replica"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
LoopKind = Literal["batch", "sequence", "expert", "tensor"]
"""What a loop of a contraction runs over."""

T = TypeVar("T")
Shares = tuple[tuple[Purpose, float], ...]
"""The purposes of a factor with their parts of its seconds, the largest first (`led_by`: the fixed one)."""


def purpose_of(name: object) -> Purpose:
    """The purpose with this name.

    Raises:
        ValueError: if there is none.
    """
    known: dict[object, Purpose] = {p: p for p in PURPOSES}
    if name in known:
        return known[name]
    raise ValueError(f"unsupported purpose {name!r}: use one of {', '.join(PURPOSES)}")


class ContractionLoops:
    """The kinds of the loops of a step's contractions. ``root`` has the input that each weight is made from.

    Weights are inputs that the step gives back changed. A step may give back no input that a contraction reads, as a forward
    pass does. Then an argument's inputs are weights if a contraction multiplies one of them with an activation, or if one is the
    filter of a convolution. If a contraction multiplies inputs of two other arguments, those of the earlier argument are
    weights.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.graph, self.coarse = problem, problem.graph, problem.coarse
        graph, root_of = self.graph, {t: root for t, (root, _) in roots(self.graph, self.coarse).items()}
        state = {graph.inputs[i] for i in graph.feedback if i is not None}
        read = {root_of[t] for node in self.contractions for t in node.inputs if t in root_of}
        weights = state if state & read else state | self._of_forward_pass(root_of)
        self.root = {t: root for t, root in root_of.items() if root in weights}
        self.examples = follow(graph, [t for t in graph.inputs if self.coarse.of[t] != FREE and t not in weights])

    def _of_forward_pass(self, root_of: Mapping[int, int]) -> set[int]:
        """The inputs of the arguments that hold weights, in a step that gives no weight back."""
        argument = {t: path.split("/")[0] for t, path in zip(self.graph.inputs, self.graph.input_paths, strict=True)}
        held: set[str] = set()
        for node in self.contractions:
            alive = [t for t in dict.fromkeys(node.inputs) if t >= 0 and t not in self.coarse.free]
            read = [t for t in alive if t in root_of]
            if len(read) == 1 and len(alive) == 2:
                held.add(argument[root_of[read[0]]])
            if node.signature.filter == "operand" and node.inputs[1] in root_of:
                held.add(argument[root_of[node.inputs[1]]])
        order = list(dict.fromkeys(argument.values()))
        for node in self.contractions:
            met = {argument[root_of[t]] for t in node.inputs if t in root_of}
            if len(met) > 1 and not met & held:
                held.add(min(met, key=order.index))
        return {t for t, name in argument.items() if name in held}

    @cached_property
    def contractions(self) -> tuple[Node, ...]:
        """The contractions that have a table."""
        nodes = (self.graph.nodes[n] for n in self.coarse.joins)
        return tuple(n for n in nodes if n.signature.contracts and n.signature.description is not None)

    @cached_property
    def _expert_dims(self) -> Mapping[int, frozenset[int]]:
        """By variable: its dims over experts, numbered without dims of one element.

        A weight has the dims over experts that an activation has too and that are not summed over. The operands and results of a
        contraction have the dims of its loops over experts.
        """
        found: dict[int, frozenset[int]] = {}
        for node in self.contractions:
            description = node.signature.description
            assert description is not None
            summed = {v for v, info in enumerate(description.loops) if info.reducer is not None}
            for operand, indices in description.accesses:
                t = node.inputs[operand]
                if t not in self.root:
                    continue
                others = {v for o, ix in description.accesses if o != operand for i in ix for v in loops_of(i)}
                dims = frozenset(d for d, ix in enumerate(self._without_ones(t, indices)) if (loops_of(ix) & others) - summed)
                for v in self.variables(t):
                    found[v] = found.get(v, frozenset()) | dims
        before = None
        while before != found:
            before = dict(found)
            for node in self.contractions:
                experts = self._over_experts(node, found)
                for t, dims in self._dims_of(node):
                    own = frozenset(d for d, loops in enumerate(dims) if loops & experts)
                    for v in self.variables(t) if own else ():
                        found[v] = found.get(v, frozenset()) | own
        return found

    def _over_experts(self, node: Node, dims_of: Mapping[int, frozenset[int]]) -> frozenset[int]:
        """The loops of a contraction that index dims over experts."""
        found = frozenset[int]()
        for t, dims in self._dims_of(node):
            for v in self.variables(t):
                found = found.union(*(dims[d] for d in dims_of.get(v, ())))
        return found

    def _dims_of(self, node: Node) -> Iterator[tuple[int, tuple[frozenset[int], ...]]]:
        """The tensors of a contraction, each with the loops that index its dims."""
        description = node.signature.description
        assert description is not None
        for operand, indices in description.accesses:
            if node.inputs[operand] >= 0:
                t = node.inputs[operand]
                yield t, tuple(frozenset(loops_of(ix)) for ix in self._without_ones(t, indices))
        for t, loops in zip(node.outputs, description.results, strict=False):
            yield t, tuple(frozenset({loop}) for loop in self._without_ones(t, loops))

    def _without_ones(self, t: int, dims: Sequence[T]) -> tuple[T, ...]:
        """Drops the dims of one element: tensors of one variable may differ in these."""
        return tuple(dim for dim, n in zip(dims, self.graph.tensors[t].shape, strict=True) if n > 1)

    def variables(self, t: int) -> tuple[int, ...]:
        """The variable of a tensor; none where it is free."""
        v = self.coarse.of[t]
        return () if v == FREE else (v,)

    def kinds(self, node: Node) -> Mapping[int, LoopKind]:
        """The kind of each loop of a contraction."""
        description = node.signature.description
        assert description is not None
        batch, data = self.examples.loops(node)
        experts = self._over_experts(node, self._expert_dims)

        def kind(loop: int) -> LoopKind:
            if loop in experts:
                return "expert"
            if loop in batch:
                return "batch"
            return "sequence" if loop in data else "tensor"

        return {v: kind(v) for v in range(len(description.loops))}


def purposes(problem: Problem, decisions: Decisions) -> tuple[Shares, ...]:
    """The purposes of each factor. Seconds are those of the contractions, spread evenly over all devices."""
    loops, device = ContractionLoops(problem), problem.cluster.device
    spent: list[dict[Purpose, float]] = [{} for _ in problem.factors]
    stored = _stored(loops, decisions)
    undecided = [0.0] * len(problem.factors)  # of ops over the batch without a weight
    for node in loops.contractions:
        use = decisions.uses.get(node.id)
        if use is None:
            continue
        seconds = node.weight * least_compute_s(node.costed, device, problem.cluster.size)
        kinds = loops.kinds(node)
        weights = [v for t in (*node.inputs, *node.outputs) if t >= 0 and (v := problem.coarse.of[t]) in stored]
        for f, loop in enumerate(use.loops):
            if loop < 0:
                continue
            match kinds[loop]:
                case "batch" if weights:
                    purpose: Purpose = "fsdp" if any(f in stored[v] for v in weights) else "data"
                    spent[f][purpose] = spent[f].get(purpose, 0.0) + seconds
                case "batch":
                    undecided[f] += seconds
                case "sequence" | "expert" | "tensor" as kind:
                    spent[f][kind] = spent[f].get(kind, 0.0) + seconds
    result: list[Shares] = []
    for own, more in zip(spent, undecided, strict=True):
        if more:  # they go with the ops that have weights
            of_batch: Purpose = "fsdp" if own.get("fsdp", 0.0) > own.get("data", 0.0) else "data"
            own[of_batch] = own.get(of_batch, 0.0) + more
        total = sum(own.values())
        rows = sorted(own.items(), key=lambda row: (-row[1], PURPOSES.index(row[0])))
        result.append(tuple((p, s / total) for p, s in rows) if total > 0 else (("replica", 1.0),))
    return tuple(result)


def led_by(fixed: Sequence[Purpose], shares: Sequence[Shares]) -> tuple[Shares, ...]:
    """The purposes of each factor with the one that is fixed for it first; as they are where none is fixed."""
    if not fixed:
        return tuple(shares)
    return tuple(tuple(sorted(own, key=lambda row: row[0] != first)) for first, own in zip(fixed, shares, strict=True))


def _stored(loops: ContractionLoops, decisions: Decisions) -> Mapping[int, frozenset[int]]:
    """By variable of a weight, of its views and of its gradient: the factors over which the weight is stored split."""
    coarse = loops.coarse
    result: dict[int, frozenset[int]] = {}
    for t, root in sorted(loops.root.items()):
        layout = decisions.layouts[root]
        for v in loops.variables(t):
            result[v] = result.get(v, frozenset()) | {f for dim in (layout.dims if layout is not None else ()) for f in dim}
    for variable in coarse.variables:
        if variable.kind != "stored" and variable.of in result:
            result[variable.id] = result[variable.of]
    return result
