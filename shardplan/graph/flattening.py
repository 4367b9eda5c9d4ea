"""The flat graph that the search works on: every op of a program and of its bodies, with its description and how often it runs.

Bodies are inlined. Each tensor of a body has its own id, tied to the tensors outside by *links*. A link is a resharding between
two layouts, priced at the bytes that cross. A body that runs exactly once shares tensors with the outside instead. From here on
nothing knows primitive names.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from shardplan.cost import compute
from shardplan.errors import DescriptionError, MisfitError, UndescribedPrimitiveError
from shardplan.ir import Constraint, Manual, Op, Program, Reducer, Tensor, Where
from shardplan.tdl import (
    Call,
    Description,
    Strategy,
    cut,
    describe,
    in_step,
    linear_sets,
)
from shardplan.tdl.describe import is_named_call, is_run_by_user, rule_of
from shardplan.tdl.description import described_at
from shardplan.tdl.index import Affine
from shardplan.tdl.language import Apply
from shardplan.tdl.xla_quirks import (
    HOST,
    KERNELS,
    PLATFORM,
    adds_up_at_once,
    fenced_loops,
    shared_loops,
)


@dataclass(frozen=True, slots=True)
class Signature:
    """The call and description that equal ops share (description None: the op may run whole on every device).

    - ``shared``: the loops that each device cuts on its own share where they divide. ``fenced``: those that are cut in no other
      way and never padded.
    - ``defers``: its sums may stay partial.
    - ``elementwise``: every operand is read at the result's own index. ``adds``: the result is the elementwise sum (or
      difference) of all operands that are read.
    - ``moves``: the result has the elements of the one operand, moved, converted to another dtype or negated. ``resizes``: such
      an op only adds or removes dims of size 1.
    - ``constraint``: where the step says that the result lies (None: it does not say).
    - ``manual``: how it takes and leaves values where the step itself runs it on each device (None: the plan chooses).
    - ``contracts``: it sums products, as a matrix product or a convolution does.
    """

    id: int
    call: Call
    description: Description | None
    shared: frozenset[int] = field(init=False)
    fenced: frozenset[int] = field(init=False)
    defers: bool = field(init=False)
    elementwise: bool = field(init=False)
    adds: bool = field(init=False)
    moves: bool = field(init=False)
    resizes: bool = field(init=False)
    contracts: bool = field(init=False)
    constraint: Constraint | None = field(init=False)
    manual: Manual | None = field(init=False)
    _strategies: dict[tuple[int, int], Strategy | None] = field(init=False, repr=False, compare=False)
    _in_step: dict[int, bool] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        known = self.description
        set_ = partial(object.__setattr__, self)  # computed once: many passes over all ops read these
        own = is_run_by_user(self.call.primitive)
        set_("shared", shared_loops(self.call, known, run_by_user=own))
        set_("fenced", fenced_loops(self.call, known, run_by_user=own))
        set_("defers", not adds_up_at_once(self.call, known, run_by_user=own))
        set_("elementwise", known is not None and known.elementwise)
        set_("adds", known is not None and known.elementwise and _adds(known))
        set_("moves", known is not None and _moves(self.call, known))
        set_("resizes", known is not None and self.moves and not self.elementwise and _resizes(self.call, known))
        set_("constraint", self.call.params.get("constraint"))
        set_("manual", self.call.params.get("manual"))
        set_("contracts", known is not None and compute.is_contraction(known))
        set_("_strategies", {})
        set_("_in_step", {})

    def cut(self, loop: int, ways: int) -> Strategy | None:
        """`tdl.cut`; pads the last block where the loop does not divide and is not fenced."""
        if self.description is None:
            return None
        key = loop, ways
        if key not in self._strategies:
            self._strategies[key] = cut(self.description, loop, ways, pad=loop not in self.fenced)
        return self._strategies[key]

    def in_step(self, loop: int) -> bool:
        """Whether this loop indexes operand dims alone and over their whole extent."""
        assert self.description is not None, "only what is described has loops"
        if loop not in self._in_step:
            self._in_step[loop] = in_step(self.description, loop) is not None
        return self._in_step[loop]

    @property
    def reducers(self) -> frozenset[Reducer]:
        """The reducers of its loops."""
        loops = () if self.description is None else self.description.loops
        return frozenset(loop.reducer for loop in loops if loop.reducer is not None)

    @property
    def aligned(self) -> bool:
        """Whether every loop indexes operand dims alone and over their whole extent."""
        known = self.description
        return known is None or all(self.in_step(loop) for loop in range(len(known.loops)))

    @property
    def turns(self) -> bool:
        """Whether the result's dims are those of the one operand, in some order."""
        known = self.description
        if known is None or not self.moves or self.call.dtypes != self.call.result_dtypes or len(known.accesses) > 1:
            return False
        own = [Affine(((loop, 1),)) for loop in known.results[0]]
        return all(set(own) == set(indices) for _, indices in known.accesses)


def _adds(description: Description) -> bool:
    tree = description.trees[0]
    chooses = isinstance(tree, Apply) and tree.how == "where"  # one of them, not their sum
    used = tuple(sorted({o for m in description.monomials[0] for o in m}))
    return len(used) > 1 and used in linear_sets(description) and not chooses


def _moves(call: Call, description: Description) -> bool:
    if not len(call.operands) == len(call.results) == 1 or any(v.reducer is not None for v in description.loops):
        return False
    return math.prod(call.operands[0]) == math.prod(call.results[0]) and linear_sets(description) == ((0,),)


def _resizes(call: Call, description: Description) -> bool:
    """Whether an op that moves elements keeps the dtype and, in order, every dim whose size is not 1."""
    if call.dtypes != call.result_dtypes:
        return False
    own, outs = ([d for d, n in enumerate(shape) if n != 1] for shape in (call.operands[0], call.results[0]))
    if [call.operands[0][d] for d in own] != [call.results[0][d] for d in outs]:
        return False
    at = [Affine(((description.results[0][d], 1),)) for d in outs]
    return all([indices[d] for d in own] == at for _, indices in description.accesses)


@dataclass(frozen=True, slots=True)
class Node:
    """One op: its signature, tensors (-1 for a literal), how often it runs, and where it came from."""

    id: int
    signature: Signature
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    weight: float
    backward: bool
    where: Where
    op: Op


@dataclass(frozen=True, slots=True)
class Link:
    """Passes the value of tensor ``source`` to tensor ``target``, ``weight`` times.

    ``lift`` is 1 where the source has an extra leading loop dim (a scan's xs), -1 where the target has one (its ys), and 0 where
    the shapes agree. ``same``: both are one tensor (the body runs once).
    """

    source: int
    target: int
    lift: int
    weight: float
    same: bool = False


@dataclass(frozen=True, slots=True)
class Graph:
    """The whole program, flat.

    ``bodies`` maps each body's tensors to tensors of the graph; ``begins`` gives the first node after each body's start.
    ``carries`` gives for each scan carry, as a tensor inside the body, its initial value, its next value and its value after the
    loop. ``boundary`` holds the tensors by which values enter a loop's body.
    """

    tensors: tuple[Tensor, ...]
    nodes: tuple[Node, ...]
    links: tuple[Link, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    input_paths: tuple[str, ...]
    feedback: tuple[int | None, ...]
    constants: frozenset[int]
    bodies: Mapping[Where, tuple[int, ...]]
    boundary: frozenset[int]
    carries: Mapping[int, tuple[int, int, int]]
    unknown_trips: tuple[str, ...]
    begins: Mapping[Where, int] = field(default_factory=dict[Where, int])

    @property
    def whole(self) -> tuple[str, ...]:
        """The ops on arrays that no device can run a part of, each with its source line."""
        return tuple(dict.fromkeys(f"{n.op.primitive} at {n.op.source}" for n in self.nodes if _is_whole(n)))

    @property
    def placed(self) -> Mapping[int, Node]:
        """The tensors for which the step says where they lie, each with the node that says so."""
        return {node.outputs[0]: node for node in self.nodes if node.signature.constraint is not None}


def _is_whole(node: Node) -> bool:
    """Whether an op on arrays runs whole on every device: it has no description, or no loop that may be cut."""
    signature = node.signature
    if signature.manual is not None or all(
        math.prod(shape) <= 1 for shape in (*signature.call.operands, *signature.call.results)
    ):
        return False
    loops = () if signature.description is None else signature.description.loops
    return all(loop.whole or loop.extent <= 1 for loop in loops)


_MINOR_BRANCH_SHARE = 1e-3
"""The share of its cost that any branch but the dearest keeps: enough for the search to choose its layouts by cost."""


def flatten(program: Program, *, replicate: Sequence[str] = ()) -> Graph:
    """Describes every op and inlines all bodies.

    Raises:
        UndescribedPrimitiveError: for a primitive that has no description and that ``replicate`` does not name.
    """
    return _Flattener(frozenset(replicate)).graph(program)


class _Flattener:
    def __init__(self, replicate: frozenset[str]) -> None:
        self.replicate = replicate
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
        return Graph(
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
        )

    def add_tensor(self, tensor: Tensor) -> int:
        """Adds a tensor and returns its number."""
        number, kind = len(self.tensors), (tensor.shape, tensor.dtype)
        self.tensors.append(tensor if tensor.id == number else Tensor(number, tensor.shape, tensor.dtype, tensor.itemsize))
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
            self.nodes.append(Node(len(self.nodes), signature, inputs, outputs, weight, back, where, op))
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
        """Inlines all branches. The dearest (the first of equals) carries the cost; the others keep a small share of theirs.

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
                self.nodes[a:b] = [replace(n, weight=n.weight * _MINOR_BRANCH_SHARE) for n in self.nodes[a:b]]
                self.links[c:d] = [replace(k, weight=k.weight * _MINOR_BRANCH_SHARE) for k in self.links[c:d]]

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
        params = tuple([(k, v if type(v) in _PLAIN or not _is_body(v) else _body_key(v)) for k, v in op.params.items()])
        key: Any = (op.primitive, reads, makes, params)
        try:
            cached = self.signatures.get(key)
        except TypeError:
            key = (op.primitive, reads, makes, repr(params))
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
        self.signatures[key] = Signature(len(self.signatures), call, description)
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


_PLAIN = {int, bool, str, tuple, type(None)}


def _is_body(param: Any) -> bool:
    """Whether a parameter is a jaxpr or a function: each call has new ones, so equal calls would not compare equal."""
    return hasattr(param, "eqns") or hasattr(param, "jaxpr") or (callable(param) and not isinstance(param, type))


def _body_key(param: Any) -> object:
    """What equal bodies have in common: the text of a jaxpr without arrays; a function (a callback) equals itself alone."""
    return id(param) if callable(param) or getattr(param, "consts", ()) else str(param)
