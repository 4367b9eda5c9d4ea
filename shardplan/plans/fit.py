"""Checks that the choices of a plan fit a program before they run: a wrong choice would give wrong results."""

from __future__ import annotations

from collections.abc import Sequence

from shardplan.collectives.reshard import Resharder
from shardplan.cost import Network
from shardplan.errors import PlanFileError
from shardplan.graph import Graph, Node, Signature
from shardplan.ir import BodyChoices, Constant, Layout, Program, Use, Where, spec_text
from shardplan.plans.data import PlanData
from shardplan.search.coarsening.tensor_roles import mark
from shardplan.search.problem.composite_strategies import Late, Options, options


def check_choices(name: str, data: PlanData, program: Program, graph: Graph) -> None:
    """Refuses a plan that does not fit a program.

    Each value needs a layout of its rank, layouts must divide the arguments, and each op must be cut in a way that its
    description allows.

    Raises:
        PlanFileError: with what does not fit; ``name`` is the name of the file.
    """
    _Fit(name, data, graph).check(program)


def unfit(data: PlanData, graph: Graph) -> Node | None:
    """The first op that a plan cuts in a way that this graph of its program does not allow: one made for another backend."""
    fit = _Fit(data.name, data, graph)
    for node in graph.nodes:
        use = data.choices.use(node.where, node.op.id)
        if use is not None and not fit.allowed(node.signature, fit.late(node) if node.signature.defers else None, use):
            return node
    return None


class _Fit:
    def __init__(self, name: str, data: PlanData, graph: Graph) -> None:
        self.name, self.data, self.graph = name, data, graph
        self.nodes = {(n.where, n.op.id): n for n in graph.nodes}
        self.sizes = [f.size for f in data.factors]
        self.resharder = Resharder(Network(data.cluster, data.factors), self.sizes)
        self._options: dict[tuple[int, Late | None], Options] = {}
        self._allowed: dict[tuple[int, Late | None, Use], bool] = {}
        self.roles = mark(graph)

    def check(self, program: Program) -> None:
        """Checks the layouts of all bodies first, then every op."""
        choices = self.data.choices
        count = f"the plan has {len(choices.bodies)} bodies, the step {len(self.graph.bodies)}"
        self.need(set(choices.bodies) == set(self.graph.bodies), count)
        for where, body in choices.bodies.items():
            self.layouts(where, body)
        self.ends(program, choices.bodies[()].layouts)
        for where, body in choices.bodies.items():
            for op, use in body.uses.items():
                self.need((where, op) in self.nodes, f"the plan cuts op {op}, which is not in this step")
                self.use(self.nodes[where, op], use, body, where)
            for (op, slot), copy in body.reads.items():
                self.read(where, op, slot, choices.copies[copy].layout)

    def need(self, holds: bool, what: str) -> None:
        """Refuses the plan unless ``holds``; ``what`` is the reason."""
        if not holds:
            raise PlanFileError(f"{self.name}: {what}; plan this step again")

    def layouts(self, where: Where, body: BodyChoices) -> None:
        """Each value of a body has a layout of its rank, or None."""
        tensors = [self.graph.tensors[t] for t in self.graph.bodies[where]]
        self.need(len(tensors) == len(body.layouts), f"{len(body.layouts)} layouts for {len(tensors)} values")
        for tensor, layout in zip(tensors, body.layouts, strict=True):
            fits = layout is None or len(layout.dims) == len(tensor.shape)
            self.need(fits, f"a layout of rank {len(layout.dims) if layout else 0} for a value of shape {tensor.shape}")
            free = tensor.id in self.roles.free
            # a value that no op touches has no layout either
            self.need(layout is None or not free, f"a value of shape {tensor.shape} on every device has a layout")

    def ends(self, program: Program, layouts: Sequence[Layout | None]) -> None:
        """Arguments and results have the layouts of their values, and layouts divide the arguments."""
        names = [f.name for f in self.data.factors]
        counts = [(len(self.data.arguments), len(program.inputs)), (len(self.data.result_layouts), len(program.outputs))]
        for what, (given, own) in zip(("arguments", "results"), counts, strict=True):
            self.need(given == own, f"the plan has {given} {what}, the step {own}")
        for t, argument in zip(program.inputs, self.data.arguments, strict=True):
            layout, shape = layouts[t], program.tensors[t].shape
            self.need(layout == argument.layout, f"the plan gives {argument.path} two layouts")
            if layout is not None:
                text = spec_text(layout.entries(names))
                self.need(
                    self.divides(layout, shape), f"the layout {text} of {argument.path} of shape {shape} does not divide it"
                )
        for n, (o, layout) in enumerate(zip(program.outputs, self.data.result_layouts, strict=True)):
            self.need(layout == (layouts[o] if isinstance(o, int) else None), f"the plan gives result {n} two layouts")

    def use(self, node: Node, use: Use, body: BodyChoices, where: Where) -> None:
        """An op is cut as its description allows, and its results are stored in the layouts of its body."""
        what = f"op {node.op.id} ({node.op.primitive}) cannot be cut as the plan says"
        late = self.late(node) if node.signature.defers else None
        key = node.signature.id, late, use
        if key not in self._allowed:
            self._allowed[key] = self.allowed(node.signature, late, use)
        self.need(self._allowed[key], what)
        for i, (t, need) in enumerate(zip(node.inputs, use.needs, strict=True)):
            free = t < 0 or t in self.roles.free
            self.need(
                (need is None) == free, f"operand {i} of op {node.op.id} ({node.op.primitive}) has {'a' if free else 'no'} layout"
            )
        stored = tuple(body.layouts[t] for t in node.op.outputs)
        self.need(use.stored == stored, f"the plan stores the results of op {node.op.id} ({node.op.primitive}) in two layouts")

    def late(self, node: Node) -> Late:
        """The op's operands without a layout, and the ones among them that only one term of a sum could contain."""
        free = {i for i, t in enumerate(node.inputs) if t < 0 or t in self.roles.free}
        zero = {i for i in free if node.inputs[i] in self.roles.zero}
        zero |= {i for i in free if isinstance(c := node.op.inputs[i], Constant) and not c.value}
        return Late(frozenset(free), frozenset(free - zero))

    def allowed(self, signature: Signature, late: Late | None, use: Use) -> bool:
        """Whether a use is one of an op's strategies; partial results may be stored as terms where the strategy allows it."""
        call = signature.call
        if len(use.needs) != len(call.operands) or len(use.gives) != len(call.results):
            return False
        rows = self.options(signature, late)
        for s in (rows.loops == use.loops).all(axis=1).nonzero()[0].tolist():
            needs = [self.resharder.layout(x, int(n)) for x, n in zip(call.operands, rows.needs[s], strict=True)]
            gives = [self.resharder.layout(x, int(g)) for x, g in zip(call.results, rows.gives[s], strict=True)]
            if list(use.gives) == gives and all(a is None or a == b for a, b in zip(use.needs, needs, strict=True)):
                kept = [() if stored is None else stored.partial for stored in use.stored]
                inside = all(set(p) <= set(g.partial) for p, g in zip(kept, use.gives, strict=True))
                return inside and (bool(rows.terms[s]) or not any(kept))
        return False

    def options(self, signature: Signature, late: Late | None) -> Options:
        """All strategies of an op, including those that pass partial sums on."""
        key = signature.id, late
        if key not in self._options:
            self._options[key] = options(signature, self.resharder, None, late=late)
        return self._options[key]

    def read(self, where: Where, op: int, slot: int, copy: Layout) -> None:
        """The op has the operand that it reads, and the copy that it reads has the operand's rank."""
        node = self.nodes.get((where, op))
        inside = node is not None and 0 <= slot < len(node.inputs) and node.inputs[slot] >= 0
        self.need(inside, f"op {op} reads operand {slot}, which is not in this step")
        assert node is not None
        shape = self.graph.tensors[node.inputs[slot]].shape
        self.need(len(copy.dims) == len(shape), f"a copy of rank {len(copy.dims)} for a value of shape {shape}")

    def divides(self, layout: Layout, shape: Sequence[int]) -> bool:
        """Whether a layout splits a shape into equal blocks, without partial sums."""
        for n, dim in zip(shape, layout.dims, strict=True):
            for f in dim:
                if n % self.sizes[f]:
                    return False
                n //= self.sizes[f]
        return not layout.partial
