"""The flat graph that the search works on: every op of a program and of its bodies, with its description and how often it runs.

Bodies are laid open: a tensor of a body has an id of its own, tied to the tensors outside by *links* (a reshard between two
layouts, priced at the bytes that cross) or, where the body runs exactly once, by being the same tensor. From here on nothing
knows primitive names.
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
from shardplan.ir import Op, Program, Reducer, Tensor, Where
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
    """What distinct ops share: the call and its description (None: allowed to run whole on every device).

    ``shared`` are the loops that each device cuts on its own share where they divide, ``fenced`` those of them that are cut in no
    other way, and never padded; ``defers``: terms of its sums may stay apart. ``elementwise``: every operand is read at the
    result's own index; ``adds``: its result is a sum (or difference) of all that it reads, element by element. ``moves``: it has
    the elements of its one operand in its result, in other places or in another dtype, or negated; ``resizes``: it only puts dims
    of one element in or leaves them out. ``contracts``: it multiplies and adds up: a product, a convolution.
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

    def __post_init__(self) -> None:
        known = self.description
        set_ = partial(object.__setattr__, self)  # once, since passes over all ops ask again and again
        own = is_run_by_user(self.call.primitive)
        set_("shared", shared_loops(self.call, known, run_by_user=own))
        set_("fenced", fenced_loops(self.call, known, run_by_user=own))
        set_("defers", not adds_up_at_once(self.call, known, run_by_user=own))
        set_("elementwise", known is not None and known.elementwise)
        set_("adds", known is not None and known.elementwise and _adds(known))
        set_("moves", known is not None and _moves(self.call, known))
        set_("resizes", known is not None and self.moves and not self.elementwise and _resizes(self.call, known))
        set_("contracts", known is not None and compute.is_contraction(known))

    def cut(self, loop: int, ways: int) -> Strategy | None:
        """`tdl.cut`, the last block padded where the loop does not divide and is not fenced."""
        return None if self.description is None else cut(self.description, loop, ways, pad=loop not in self.fenced)

    @property
    def reducers(self) -> frozenset[Reducer]:
        """How its loops reduce."""
        loops = () if self.description is None else self.description.loops
        return frozenset(loop.reducer for loop in loops if loop.reducer is not None)

    @property
    def aligned(self) -> bool:
        """Whether every operand is read at its loops' own indices alone, from end to end."""
        known = self.description
        return known is None or all(in_step(known, loop) is not None for loop in range(len(known.loops)))

    @property
    def turns(self) -> bool:
        """Whether each dim of the result is a dim of the one operand, in some order."""
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
    """Of an op that moves elements: whether dtype and dims of more than one element are the same, these in the same order."""
    if call.dtypes != call.result_dtypes:
        return False
    own, made = ([d for d, n in enumerate(shape) if n != 1] for shape in (call.operands[0], call.results[0]))
    if [call.operands[0][d] for d in own] != [call.results[0][d] for d in made]:
        return False
    at = [Affine(((description.results[0][d], 1),)) for d in made]
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
    """Tensor ``source`` becomes tensor ``target`` ``weight`` times; ``lift`` says which of them has a leading loop dim more.

    ``lift`` is 1 where the source is stacked (a scan's xs), -1 where the target is (its ys), 0 where the shapes agree.
    ``same``: they are one tensor (a body that runs once).
    """

    source: int
    target: int
    lift: int
    weight: float
    same: bool = False


@dataclass(frozen=True, slots=True)
class Graph:
    """The whole program, flat.

    ``bodies`` gives for each body the graph's tensor of each of its own, ``begins`` the first node behind its start; ``carries``
    for a scan's carry inside its body the value that it starts from, the one that it is replaced by, and what it is after the
    loop; ``boundary`` are the tensors that enter a body.
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


_SELDOM = 1e-3
"""The share of its cost that a branch keeps which is not the dearest: enough to choose its layouts by."""


def flatten(program: Program, *, replicate: Sequence[str] = ()) -> Graph:
    """Describes every op and lays bodies open.

    Raises:
        UndescribedPrimitiveError: for a primitive without description that ``replicate`` does not name.
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
        """The whole program laid flat."""
        ids = self.place(program, (), {}, 1.0, False)
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

    def new(self, tensor: Tensor) -> int:
        """The number of a new tensor."""
        number, kind = len(self.tensors), (tensor.shape, tensor.dtype)
        self.tensors.append(tensor if tensor.id == number else Tensor(number, tensor.shape, tensor.dtype, tensor.itemsize))
        self.kinds.append(self.kind_of.setdefault(kind, len(self.kind_of)))
        return number

    def place(self, program: Program, where: Where, same: Mapping[int, int], weight: float, backward: bool) -> tuple[int, ...]:
        """Adds a program's tensors and ops; ``same`` gives local tensors that are tensors of the graph already."""
        ids = tuple([same[t.id] if t.id in same else self.new(t) for t in program.tensors])
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
        """Lays the bodies of one op open."""
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
                made = {t for inner in body.ops for t in inner.outputs}
                for t, g in zip(body.outputs, outputs, strict=True):
                    if isinstance(t, int) and t in made:
                        same.setdefault(t, g)  # what the body makes it makes outside
                inner = self.place(body, (*where, (op.id, 0)), same, weight, backward)
                self.ends(body, inner, outputs, weight, same=True)
            case None:
                raise UndescribedPrimitiveError(op.primitive, str(op.source))

    def cond(self, op: Op, where: Where, inputs: list[int], outputs: list[int], weight: float, backward: bool) -> None:
        """The dearest branch carries the cost, the first of equals, of branches for platforms one that a device may take; the
        others must still have layouts.
        """
        starts: list[tuple[int, int]] = []
        for b, body in enumerate(op.bodies):
            starts.append((len(self.nodes), len(self.links)))
            same = {t: g for t, g in zip(body.inputs, inputs[1:], strict=True) if g >= 0}
            inner = self.place(body, (*where, (op.id, b)), same, weight, backward)
            self.ends(body, inner, outputs, weight, same=False)
        starts.append((len(self.nodes), len(self.links)))
        ranges = list(itertools.pairwise(starts))
        work = [sum(self.work(n) for n in self.nodes[a:b]) for (a, _), (b, _) in ranges]
        platforms = op.params.get("branches_platforms") or [None] * len(work)
        dearest = max(range(len(work)), key=lambda b: (not KERNELS.issuperset(platforms[b] or ("any",)), work[b], -b))
        for branch, ((a, c), (b, d)) in enumerate(ranges):
            if branch != dearest:
                self.nodes[a:b] = [replace(n, weight=n.weight * _SELDOM) for n in self.nodes[a:b]]
                self.links[c:d] = [replace(k, weight=k.weight * _SELDOM) for k in self.links[c:d]]

    def work(self, node: Node) -> float:
        """Arithmetic and elements made, to compare branches by."""
        description = node.signature.description
        flop = compute.flops(description) if description is not None else 0.0
        return node.weight * (flop + sum(self.tensors[t].size for t in node.outputs))

    def ends(self, body: Program, inner: tuple[int, ...], outputs: Sequence[int], weight: float, *, same: bool) -> None:
        """Links what a body returns to what the op gives outside."""
        for local, outer in zip(body.outputs, outputs, strict=True):
            if isinstance(local, int) and inner[local] != outer:
                self.links.append(Link(inner[local], outer, 0, weight, same))
            elif not isinstance(local, int):
                self.constants.add(outer)

    def scan(self, op: Op, where: Where, inputs: list[int], outputs: list[int], weight: float, backward: bool) -> None:
        """A scan's body, once, with links for constants, carries and slices."""
        body = op.bodies[0]
        consts, carry = int(op.params["num_consts"]), int(op.params["num_carry"])
        trips = float(op.trips or 1)
        ids = self.place(body, (*where, (op.id, 0)), {}, weight * trips, backward)
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
        """A while loop's body and test, once, with links for constants and carries."""
        test, body = op.bodies
        a, b = int(op.params["cond_nconsts"]), int(op.params["body_nconsts"])
        if op.trips is None:
            self.unknown.append(str(op.source))
        ids = self.place(body, (*where, (op.id, 1)), {}, weight, backward)
        entry = [ids[t] for t in body.inputs]
        self.boundary.update(entry)
        for outer, inner in zip(inputs[a:], entry, strict=True):
            if outer >= 0:
                self.links.append(Link(outer, inner, 0, weight))
        same = {t: g for t, g in zip(test.inputs[:a], inputs[:a], strict=True) if g >= 0}
        same |= dict(zip(test.inputs[a:], entry[b:], strict=True))
        self.place(test, (*where, (op.id, 0)), same, weight, backward)
        for i, (local, outer) in enumerate(zip(body.outputs, outputs, strict=True)):
            if isinstance(local, int):
                self.links.append(Link(ids[local], entry[b + i], 0, weight))
            self.links.append(Link(entry[b + i], outer, 0, weight))

    def signature(self, op: Op, inputs: Sequence[int], outputs: Sequence[int]) -> Signature:
        """What an op is, equal for equal ops on equal shapes."""
        kinds = self.kinds
        reads, makes = tuple([kinds[i] if i >= 0 else -1 for i in inputs]), tuple([kinds[o] for o in outputs])
        params = tuple([(k, v) for k, v in op.params.items() if type(v) in _PLAIN or not _is_body(v)])
        key: Any = (op.primitive, reads, makes, params)
        try:
            found = self.signatures.get(key)
        except TypeError:
            key = (op.primitive, reads, makes, repr(params))
            found = self.signatures.get(key)
        if found is not None:
            return found
        shapes = tuple(self.tensors[i].shape if i >= 0 else () for i in inputs)
        dtypes = tuple(self.tensors[i].dtype if i >= 0 else "" for i in inputs)
        results = tuple((self.tensors[o].shape, self.tensors[o].dtype) for o in outputs)
        call = Call(op.primitive, shapes, tuple(s for s, _ in results), op.params, dtypes, tuple(d for _, d in results))
        description = _described(call, op)
        waived = self.replicate | HOST | {PLATFORM}
        if description is None and waived.isdisjoint((op.primitive, op.primitive.split(":")[0])):
            raise UndescribedPrimitiveError(op.primitive, str(op.source), operands=shapes, results=call.results)
        self.signatures[key] = Signature(len(self.signatures), call, description)
        return self.signatures[key]


def _described(call: Call, op: Op) -> Description | None:
    try:
        return describe(call)
    except MisfitError as error:
        where = _places(call, op, error)
        batched = (
            "; under jax.vmap a kernel has a batch dim more: describe it for any rank (lambda *i), with a run= that takes both, "
            "or put the vmap into a jax.jit function and register that one"
        )
        raise MisfitError(f"{error}{where}{batched if is_named_call(call.primitive) else ''}") from error
    except DescriptionError as error:
        raise DescriptionError(f"{error}{_places(call, op, error)}") from error


def _places(call: Call, op: Op, error: DescriptionError) -> str:
    """Where an op is used, and where the user describes it unless the error says so."""
    function = rule_of(call.primitive)
    own = described_at(function) if function is not None and hasattr(function, "__signature__") else ""
    said = not own or own.removeprefix("described at ").partition(":")[0] in str(error)
    return f" (used at {op.source})" if said else f" (used at {op.source}, {own})"


_PLAIN = {int, bool, str, tuple, type(None)}


def _is_body(param: Any) -> bool:
    """A jaxpr, or a function: both are made anew at each call, and would keep equal calls apart."""
    return hasattr(param, "eqns") or hasattr(param, "jaxpr") or (callable(param) and not isinstance(param, type))
