"""The types of the flat graph: ops with their descriptions, links between bodies, and the whole graph."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Self

from shardplan.cost import compute
from shardplan.cost.tiles import ProductLoops
from shardplan.ir import Backend, Constraint, Manual, Op, Reducer, Tensor, Where
from shardplan.tdl import Call, Description, Strategy, cut, in_step, linear_sets
from shardplan.tdl.describe import is_run_by_user
from shardplan.tdl.index import Affine
from shardplan.tdl.kernels import Part, combines, filter_of, images_of, kept_by_zero, part_of, reads_slices, swaps, update_of
from shardplan.tdl.language import Apply
from shardplan.tdl.xla_quirks import adds_up_at_once, fenced_loops, shared_loops


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one op adds to the kernels that XLA compiles (`shardplan.graph.kernel_traffic`).

    These are the multiples of each operand's bytes that are read on its behalf, the multiples of each result's bytes that are
    written, and the number of kernels launched.
    """

    reads: tuple[float, ...]
    writes: tuple[float, ...]
    launches: float

    @property
    def empty(self) -> bool:
        """Whether the op adds nothing."""
        return not (any(self.reads) or any(self.writes) or self.launches)


@dataclass(frozen=True, slots=True)
class Signature:
    """The call and description that equal ops share (description None: the op may run whole on every device).

    - ``backend``: what will run the plan. ``shared``: under ``specs``, the loops that each device cuts on its own share where
      they divide. ``fenced``: those that are never padded, and under ``specs`` cut in no other way.
    - ``defers``: its sums may stay partial.
    - ``elementwise``: every operand is read at the result's own index. ``adds``: the result is the elementwise sum (or
      difference) of all operands that are read.
    - ``moves``: the result has the elements of the one operand, moved, converted to another dtype or negated. ``resizes``: such
      an op only adds or removes dims of size 1.
    - ``constraint``: where the step says that the result lies (None: it does not say).
    - ``manual``: how it takes and leaves values where the step itself runs it on each device (None: the plan chooses).
    - ``contracts``: it sums products, as a matrix product or a convolution does. ``multiplies``: it does, or it is opaque and
      states the flops of products inside it. ``attends``: they belong to fused attention, which has a rate of its own.
      ``product``: the loops of the product, if it is one (None: it is not, or its extents are unknown).
    - ``traffic``: what it adds to kernels (None: it is a kernel of its own).
    - ``part``: its role inside kernels. ``update``: the operand that it writes into its first, in place (None: it makes a new
      result); ``combines``: it also reads that part. ``slices``: it reads only as many elements of its first operand as its
      result has. ``filter``: where a convolution has a filter that is copied into another order. ``images``: the
      operands that a convolution takes in one order. ``swaps``: a transpose that products undo.
    """

    id: int
    call: Call
    description: Description | None
    traffic: Traffic | None = None
    backend: Backend = "explicit"
    shared: frozenset[int] = field(init=False)
    fenced: frozenset[int] = field(init=False)
    defers: bool = field(init=False)
    elementwise: bool = field(init=False)
    adds: bool = field(init=False)
    moves: bool = field(init=False)
    resizes: bool = field(init=False)
    contracts: bool = field(init=False)
    multiplies: bool = field(init=False)
    attends: bool = field(init=False)
    product: ProductLoops | None = field(init=False)
    part: Part = field(init=False)
    update: int | None = field(init=False)
    combines: bool = field(init=False)
    slices: bool = field(init=False)
    swaps: bool = field(init=False)
    kept_by_zero: bool = field(init=False)
    filter: Literal["operand", "result", ""] = field(init=False)
    images: tuple[int, ...] = field(init=False)
    constraint: Constraint | None = field(init=False)
    manual: Manual | None = field(init=False)
    _strategies: dict[tuple[int, int], Strategy | None] = field(init=False, repr=False, compare=False)
    _in_step: dict[int, bool] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        known = self.description
        set_ = partial(object.__setattr__, self)  # computed once: many passes over all ops read these
        own = is_run_by_user(self.call.primitive)
        set_("shared", shared_loops(self.call, known, run_by_user=own))
        set_("fenced", fenced_loops(self.call, known, run_by_user=own, backend=self.backend))
        set_("defers", not adds_up_at_once(self.call, known, run_by_user=own, backend=self.backend))
        set_("elementwise", known is not None and known.elementwise)
        set_("adds", known is not None and known.elementwise and _adds(known))
        set_("moves", known is not None and _moves(self.call, known))
        set_("resizes", known is not None and self.moves and not self.elementwise and _resizes(self.call, known))
        set_("constraint", self.call.params.get("constraint"))
        set_("manual", self.call.params.get("manual"))
        set_("contracts", known is not None and compute.is_contraction(known))
        set_("multiplies", self.contracts or (known is not None and compute.states_products(known)))
        set_("attends", known is not None and compute.is_attention(known))
        set_("product", compute.product_loops(known) if known is not None and self.contracts else None)
        set_("part", part_of(self.call, known, multiplies=self.multiplies))
        set_("update", update_of(self.call))
        set_("combines", combines(self.call))
        set_("slices", reads_slices(self.call))
        set_("swaps", swaps(self.call))
        set_("kept_by_zero", kept_by_zero(self.call))
        set_("filter", filter_of(self.call))
        set_("images", images_of(self.call))
        set_("_strategies", {})
        set_("_in_step", {})

    @property
    def fuses(self) -> bool:
        """Whether its kernel computes what it reads: a slice of a buffer needs no copy."""
        return self.part in ("loop", "transpose", "reduction") and not self.swaps

    def with_traffic(self, number: int, traffic: Traffic) -> Self:
        """The same call with this number and traffic; the derived facts about its cuts are shared."""
        result = copy.copy(self)
        object.__setattr__(result, "id", number)
        object.__setattr__(result, "traffic", traffic)
        return result

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
    """One op: its signature, tensors (-1 for a literal), how often it runs, and where it came from.

    ``costed`` is the signature with the op's part of the traffic of kernels: equal ops may differ in it.
    """

    id: int
    signature: Signature
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    weight: float
    backward: bool
    where: Where
    op: Op
    costed: Signature = field(kw_only=True)


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
    loop. ``boundary`` holds the tensors by which values enter a loop's body. ``backend`` is what will run the plan.
    ``offloaded`` are the inputs, by number, that lie in host memory, as do the outputs that replace them. ``stacks`` are the
    tensors whose dim 0 no layout splits (`shardplan.ir.Program`).
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
    backend: Backend = "explicit"
    offloaded: frozenset[int] = frozenset()
    stacks: frozenset[int] = frozenset()

    @property
    def whole(self) -> tuple[str, ...]:
        """The ops on arrays that no device can run a part of, each with its source line. Those that only rename an array, such as
        the unwrapping of a random key, run nowhere and are left out.
        """
        return tuple(dict.fromkeys(f"{n.op.primitive} at {n.op.source}" for n in self.nodes if _is_whole(n)))

    @property
    def placed(self) -> Mapping[int, Node]:
        """The tensors for which the step says where they lie, each with the node that says so."""
        return {node.outputs[0]: node for node in self.nodes if node.signature.constraint is not None}


def _is_whole(node: Node) -> bool:
    """Whether an op on arrays runs whole on every device: it has no description, or no loop that may be cut."""
    signature = node.signature
    renames = signature.description is not None and signature.part == "none"
    if (
        signature.manual is not None
        or renames
        or all(math.prod(shape) <= 1 for shape in (*signature.call.operands, *signature.call.results))
    ):
        return False
    loops = () if signature.description is None else signature.description.loops
    return all(loop.whole or loop.extent <= 1 for loop in loops)
