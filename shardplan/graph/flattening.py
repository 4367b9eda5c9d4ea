"""The flat graph that the search works on: every op of a program and of its bodies, with its description and how often it runs.

Bodies are inlined. Each tensor of a body has its own id, tied to the tensors outside by *links*. A link is a resharding between
two layouts, priced at the bytes that cross. A body that runs exactly once shares tensors with the outside instead. From here on
nothing knows primitive names.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardplan.constants import CONSTANTS
from shardplan.cost import compute
from shardplan.errors import DescriptionError, MisfitError, UndescribedPrimitiveError
from shardplan.graph.kernel_traffic import with_traffic
from shardplan.graph.nodes import Graph, Link, Node, Signature
from shardplan.ir import Backend, Op, Program, Tensor, Where
from shardplan.tdl import Call, Description, describe
from shardplan.tdl.describe import is_named_call, rule_of
from shardplan.tdl.description import described_at
from shardplan.tdl.xla_quirks import HOST, KERNELS, PLATFORM


def flatten(program: Program, *, replicate: Sequence[str] = (), backend: Backend = "explicit") -> Graph:
    """Describes every op and inlines all bodies. ``backend``: what will run the plan, because it decides which cuts are fenced.

    Raises:
        UndescribedPrimitiveError: for a primitive that has no description and that ``replicate`` does not name.
    """
    return _Flattener(frozenset(replicate), backend).graph(program)


class _Flattener:
    def __init__(self, replicate: frozenset[str], backend: Backend) -> None:
        self.replicate = replicate
        self.backend: Backend = backend
        self.tensors: list[Tensor] = []
        self.kind_of: dict[tuple[tuple[int, ...], str], int] = {}
        self.kinds: list[int] = []  # of each tensor: equal numbers for equal shapes and dtypes
        self.nodes: list[Node] = []
        self.links: list[Link] = []
        self.constants: set[int] = set()
        self.boundary: set[int] = set()
        self.carries: dict[int, tuple[int, int, int]] = {}
        self.bodies: dict[Where, tuple[int, ...]] = {}
        self.begins: dict[Where, int] = {}
        self.signatures: dict[Any, Signature] = {}
        self.unknown: list[str] = []

    def graph(self, program: Program) -> Graph:
        """The flat graph of the whole program."""
        ids = self.inline(program, (), {}, 1.0, False)
        outputs = tuple(ids[o] if isinstance(o, int) else -1 for o in program.outputs)
        graph = Graph(
            tuple(self.tensors),
            tuple(self.nodes),
            tuple(self.links),
            tuple(ids[i] for i in program.inputs),
            outputs,
            program.input_paths,
            program.feedback,
            frozenset(self.constants),
            self.bodies,
            frozenset(self.boundary),
            self.carries,
            tuple(self.unknown),
            self.begins,
            self.backend,
            program.offloaded,
            frozenset(ids[t] for t in program.stacks),
        )
        return with_traffic(graph)

    def add_tensor(self, tensor: Tensor) -> int:
        """Adds a tensor and returns its number."""
        number, kind = len(self.tensors), (tensor.shape, tensor.dtype)
        own = Tensor(number, tensor.shape, tensor.dtype, tensor.itemsize, tensor.hosted)
        self.tensors.append(tensor if tensor.id == number else own)
        self.kinds.append(self.kind_of.setdefault(kind, len(self.kind_of)))
        return number

    def inline(self, program: Program, where: Where, same: Mapping[int, int], weight: float, backward: bool) -> tuple[int, ...]:
        """Adds a program's tensors and ops; ``same`` maps local tensors to tensors that the graph already has."""
        ids = tuple([same[t.id] if t.id in same else self.add_tensor(t) for t in program.tensors])
        self.bodies[where] = ids
        self.begins[where] = len(self.nodes)
        self.constants.update(ids[t] for t, _ in program.constants)
        for op in program.ops:
            back = backward or op.backward
            if op.bodies:
                self.control(op, where, ids, weight, back)
                continue
            inputs = tuple([ids[i] if isinstance(i, int) else -1 for i in op.inputs])
            outputs = tuple([ids[o] for o in op.outputs])
            signature = self.signature(op, inputs, outputs)
            self.nodes.append(Node(len(self.nodes), signature, inputs, outputs, weight, back, where, op, costed=signature))
        return ids

    def control(self, op: Op, where: Where, ids: tuple[int, ...], weight: float, backward: bool) -> None:
        """Inlines the bodies of one op."""
        inputs = [ids[i] if isinstance(i, int) else -1 for i in op.inputs]
        outputs = [ids[o] for o in op.outputs]
        match op.control:
            case "scan":
                self.scan(op, where, inputs, outputs, weight, backward)
            case "while":
                self.while_(op, where, inputs, outputs, weight, backward)
            case "cond":
                self.cond(op, where, inputs, outputs, weight, backward)
            case "remat":
                body = op.bodies[0]
                same = {t: g for t, g in zip(body.inputs, inputs, strict=True) if g >= 0}
                outs = {t for inner in body.ops for t in inner.outputs}
                for t, g in zip(body.outputs, outputs, strict=True):
                    if isinstance(t, int) and t in outs:
                        same.setdefault(t, g)  # the op's output is the tensor that the body computes
                inner = self.inline(body, (*where, (op.id, 0)), same, weight, backward)
                self.link_outputs(body, inner, outputs, weight, same=True)
            case None:
                raise UndescribedPrimitiveError(op.primitive, str(op.source))

    def cond(self, op: Op, where: Where, inputs: list[int], outputs: list[int], weight: float, backward: bool) -> None:
        """Inlines all branches. The dearest (the first of equals) carries its cost; the others carry a small share of theirs.

        A branch for `KERNELS` platforms alone never runs a step: it is the dearest only if all branches are such.
        """
        starts: list[tuple[int, int]] = []
        for b, body in enumerate(op.bodies):
            starts.append((len(self.nodes), len(self.links)))
            same = {t: g for t, g in zip(body.inputs, inputs[1:], strict=True) if g >= 0}
            inner = self.inline(body, (*where, (op.id, b)), same, weight, backward)
            self.link_outputs(body, inner, outputs, weight, same=False)
        starts.append((len(self.nodes), len(self.links)))
        ranges = list(itertools.pairwise(starts))
        work = [sum(self.work(n) for n in self.nodes[a:b]) for (a, _), (b, _) in ranges]
        platforms = op.params.get("branches_platforms") or [None] * len(work)
        dearest = max(range(len(work)), key=lambda b: (not KERNELS.issuperset(platforms[b] or ("any",)), work[b], -b))
        for branch, ((a, c), (b, d)) in enumerate(ranges):
            if branch != dearest:
                self.nodes[a:b] = [replace(n, weight=n.weight * CONSTANTS.minor_branch_share) for n in self.nodes[a:b]]
                self.links[c:d] = [replace(k, weight=k.weight * CONSTANTS.minor_branch_share) for k in self.links[c:d]]

    def work(self, node: Node) -> float:
        """The flops and result elements of a node, to compare branches by."""
        description = node.signature.description
        flop = compute.flops(description) if description is not None else 0.0
        return node.weight * (flop + sum(self.tensors[t].size for t in node.outputs))

    def link_outputs(self, body: Program, inner: tuple[int, ...], outputs: Sequence[int], weight: float, *, same: bool) -> None:
        """Links a body's results to the op's outputs outside."""
        for local, outer in zip(body.outputs, outputs, strict=True):
            if isinstance(local, int) and inner[local] != outer:
                self.links.append(Link(inner[local], outer, 0, weight, same))
            elif not isinstance(local, int):
                self.constants.add(outer)

    def scan(self, op: Op, where: Where, inputs: list[int], outputs: list[int], weight: float, backward: bool) -> None:
        """Inlines a scan's body once, with links for constants, carries and slices."""
        body = op.bodies[0]
        consts, carry = int(op.params["num_consts"]), int(op.params["num_carry"])
        trips = float(op.trips or 1)
        ids = self.inline(body, (*where, (op.id, 0)), {}, weight * trips, backward)
        entry = [ids[t] for t in body.inputs]
        self.boundary.update(entry)
        for i, (outer, inner) in enumerate(zip(inputs, entry, strict=True)):
            if outer < 0:
                self.constants.add(inner) if i < consts else None
                continue
            self.links.append(Link(outer, inner, 1 if i >= consts + carry else 0, weight))
        for i, (local, outer) in enumerate(zip(body.outputs, outputs, strict=True)):
            if i < carry:
                if isinstance(local, int):
                    self.carries[entry[consts + i]] = inputs[consts + i], ids[local], outer
                    self.links.append(Link(ids[local], entry[consts + i], 0, weight * trips))
                self.links.append(Link(entry[consts + i], outer, 0, weight))
            elif isinstance(local, int):
                self.links.append(Link(ids[local], outer, -1, weight))
            else:
                self.constants.add(outer)

    def while_(self, op: Op, where: Where, inputs: list[int], outputs: list[int], weight: float, backward: bool) -> None:
        """Inlines a while loop's body and test once, with links for constants and carries."""
        test, body = op.bodies
        a, b = int(op.params["cond_nconsts"]), int(op.params["body_nconsts"])
        if op.trips is None:
            self.unknown.append(str(op.source))
        ids = self.inline(body, (*where, (op.id, 1)), {}, weight, backward)
        entry = [ids[t] for t in body.inputs]
        self.boundary.update(entry)
        for outer, inner in zip(inputs[a:], entry, strict=True):
            if outer >= 0:
                self.links.append(Link(outer, inner, 0, weight))
        same = {t: g for t, g in zip(test.inputs[:a], inputs[:a], strict=True) if g >= 0}
        same |= dict(zip(test.inputs[a:], entry[b:], strict=True))
        self.inline(test, (*where, (op.id, 0)), same, weight, backward)
        for i, (local, outer) in enumerate(zip(body.outputs, outputs, strict=True)):
            if isinstance(local, int):
                self.links.append(Link(ids[local], entry[b + i], 0, weight))
            self.links.append(Link(entry[b + i], outer, 0, weight))

    def signature(self, op: Op, inputs: Sequence[int], outputs: Sequence[int]) -> Signature:
        """The op's signature; equal ops on equal shapes share one."""
        kinds = self.kinds
        reads, makes = tuple([kinds[i] if i >= 0 else -1 for i in inputs]), tuple([kinds[o] for o in outputs])
        key = op.primitive, reads, makes, parameters_key(op.params)
        cached = self.signatures.get(key)
        if cached is not None:
            return cached
        shapes = tuple(self.tensors[i].shape if i >= 0 else () for i in inputs)
        dtypes = tuple(self.tensors[i].dtype if i >= 0 else "" for i in inputs)
        results = tuple((self.tensors[o].shape, self.tensors[o].dtype) for o in outputs)
        call = Call(op.primitive, shapes, tuple(s for s, _ in results), op.params, dtypes, tuple(d for _, d in results))
        description = _described(call, op)
        waived = self.replicate | HOST | {PLATFORM}
        if description is None and "manual" not in op.params and waived.isdisjoint((op.primitive, op.primitive.split(":")[0])):
            raise UndescribedPrimitiveError(op.primitive, str(op.source), operands=shapes, results=call.results)
        self.signatures[key] = Signature(len(self.signatures), call, description, backend=self.backend)
        return self.signatures[key]


def _described(call: Call, op: Op) -> Description | None:
    try:
        return describe(call)
    except MisfitError as error:
        where = _origin(call, op, error)
        vmap_hint = (
            "; jax.vmap adds a batch dim to a kernel: describe it for any rank (lambda *i), with a run= that takes both ranks, "
            "or put the vmap into a jax.jit function and register that function"
        )
        raise MisfitError(f"{error}{where}{vmap_hint if is_named_call(call.primitive) else ''}") from error
    except DescriptionError as error:
        raise DescriptionError(f"{error}{_origin(call, op, error)}") from error


def _origin(call: Call, op: Op, error: DescriptionError) -> str:
    """Where the op is used and, unless the error says so, where the user describes it."""
    function = rule_of(call.primitive)
    own = described_at(function) if function is not None and hasattr(function, "__signature__") else ""
    already_named = not own or own.removeprefix("described at ").partition(":")[0] in str(error)
    return f" (used at {op.source})" if already_named else f" (used at {op.source}, {own})"


def parameters_key(params: Mapping[str, Any]) -> Hashable:
    """Equal for the parameters of equal ops."""
    plain = tuple([(k, v if type(v) in _PLAIN or not _is_body(v) else _body_key(v)) for k, v in params.items()])
    try:
        hash(plain)
    except TypeError:
        return repr(plain)
    return plain


_PLAIN = {int, bool, str, tuple, type(None)}


def _is_body(param: Any) -> bool:
    """Whether a parameter is a jaxpr or a function: each call has new ones, so equal calls would not compare equal."""
    return hasattr(param, "eqns") or hasattr(param, "jaxpr") or (callable(param) and not isinstance(param, type))


def _body_key(param: Any) -> object:
    """The key of equal bodies: the text of a jaxpr without arrays. A function (a callback) equals only itself."""
    return id(param) if callable(param) or getattr(param, "consts", ()) else str(param)
