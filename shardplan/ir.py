"""The types of a traced step and of what a plan chooses for it. Read these first.

A step is traced to a `Program`; a description of each of its ops gives a `Graph`; `Choices` hold the layout of each tensor and
the cut of each op. All of them are frozen and independent of JAX: the equation behind an op, which only emission needs, is an
opaque ``handle``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any, Literal

Backend = Literal["explicit", "specs"]
"""What runs a plan: each device its own program, or XLA's partitioner."""

Reducer = Literal["sum", "prod", "max", "min", "and", "or", "argmax", "argmin"]
"""How partial terms are combined. The last two reduce pairs: an index, and the extreme value at it."""

PAIRS: tuple[Reducer, ...] = ("argmax", "argmin")
"""The reducers of pairs."""


HOST_COPY = "host_copy"
"""The primitive of a copy between the memories of a device and its host."""


class Collective(StrEnum):
    """What devices do together. The value is the name in HLO, and that in plan files, JSON and reports.

    In a shift every device but the last sends to the next one. Reduce and broadcast have one root in each group. A slice sends
    nothing: each device takes its own part. A reduce and a broadcast of a reduction program run as
    permutes (`shardplan.collectives.lower`).

    >>> Collective.REDUCE_SCATTER.p2, str(Collective.SHIFT.hlo), Collective.SHIFT.short
    ('ReduceScatter', 'collective-permute', 'permute')
    """

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    PERMUTE = "collective-permute"
    BROADCAST = "collective-broadcast"
    RAGGED_ALL_TO_ALL = "ragged-all-to-all"
    SHIFT = "shift"
    REDUCE = "reduce"
    SLICE = "slice"

    @property
    def hlo(self) -> Collective:
        """The instruction that compiled programs have for it: a permute for a shift."""
        return Collective.PERMUTE if self is Collective.SHIFT else self

    @property
    def short(self) -> str:
        """The name in pictures and tables of measurements."""
        return self.hlo.removeprefix("collective-")

    @property
    def p2(self) -> str:
        """The name in reduction programs (P2, section 3.3)."""
        return self.name.title().replace("_", "")


@dataclass(frozen=True, slots=True)
class Split:
    """One dim of a tensor is cut evenly over a factor; a use may need ``halo`` = (lo, hi) further elements."""

    dim: int
    halo: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every device along the factor holds the whole."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Every device along the factor holds a term; the value is their reduction."""

    reducer: Reducer = "sum"


Placement = Split | Replicated | Partial


@dataclass(frozen=True, slots=True)
class Factor:
    """A level of the cluster, or a divisor of its size where the level is split.

    ``level`` indexes the cluster's levels (0 the slowest); ``stride`` is the product of the factors of the same level that vary
    faster than this one, 1 where the level is whole.
    """

    name: str
    size: int
    level: int
    stride: int = 1


Entry = None | str | tuple[str, ...]
"""The entry of a PartitionSpec for one dim."""


def spec_text(entries: Iterable[object]) -> str:
    """A PartitionSpec, or its entries, as source text.

    >>> spec_text(("node", None, ("gpu", "core")))
    "P('node', None, ('gpu', 'core'))"
    """
    return "P(" + ", ".join(repr(e) for e in entries) + ")"


@dataclass(frozen=True, slots=True)
class Layout:
    """How a stored tensor is laid out over the factors.

    ``dims[d]`` lists, major first, the indices of the factors that split dim ``d``; ``partial`` those over which the tensor is a
    sum of terms (or another reduction, by ``reducer``). All other factors replicate the tensor.
    """

    dims: tuple[tuple[int, ...], ...]
    partial: tuple[int, ...] = ()
    reducer: Reducer = "sum"

    @property
    def used(self) -> tuple[int, ...]:
        """The factors that split a dim, sorted."""
        return tuple(sorted(f for dim in self.dims for f in dim))

    @classmethod
    def whole(cls, rank: int) -> Layout:
        """The layout of a tensor of so many dims that every device has whole."""
        return cls(((),) * rank)

    def entries(self, names: Sequence[str]) -> tuple[Entry, ...]:
        """The entries of a PartitionSpec over axes named like the factors; trailing dims without a split are left out.

        >>> Layout(((1,), (0, 2), ())).entries(("node", "gpu", "core"))
        ('gpu', ('node', 'core'))
        """
        spec = [None if not fs else names[fs[0]] if len(fs) == 1 else tuple(names[f] for f in fs) for fs in self.dims]
        while spec and spec[-1] is None:
            spec.pop()
        return tuple(spec)


_KEYS = {"key<fry>": 8, "key<rbg>": 16, "key<urbg>": 16}


@cache
def itemsize(dtype: str) -> int:
    """Bytes of one element of a dtype, by its name; 0 for the empty dtype of a literal. Types below a byte take one.

    >>> [itemsize(name) for name in ("float32", "bfloat16", "complex64", "bool", "int4", "float8_e4m3fn", "key<rbg>", "")]
    [4, 2, 8, 1, 1, 1, 16, 0]
    """
    if dtype in ("", "bool"):
        return len(dtype) // 4
    if dtype.startswith("key"):
        return _KEYS.get(dtype, 8)
    bits = re.search(r"\d+", dtype)
    assert bits is not None, dtype
    return max(1, int(bits[0]) // 8)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value of the program: ``shape`` in elements, ``dtype`` by name (``float32``, ``key<fry>``), ``itemsize`` in bytes.

    ``hosted``: it lies in the memory of the device's host (`jax.memory.Space.Host`).
    """

    id: int
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    hosted: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        n = 1
        for d in self.shape:
            n *= d
        return n

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.size * self.itemsize


@dataclass(frozen=True, slots=True)
class Constraint:
    """Where the step says that a value lies: for each dim the mesh axes that split it, major first (None: any).

    ``axes`` are these axes with their sizes.
    """

    dims: tuple[tuple[str, ...] | None, ...]
    axes: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return spec_text(["UNCONSTRAINED" if d is None else d[0] if len(d) == 1 else d or None for d in self.dims])


@dataclass(frozen=True, slots=True)
class Manual:
    """How a function that the step itself runs on each device takes and leaves values: the axes that split each of their dims.

    ``axes`` are the axes of its mesh with their sizes.
    """

    ins: tuple[tuple[tuple[str, ...], ...], ...]
    outs: tuple[tuple[tuple[str, ...], ...], ...]
    axes: tuple[tuple[str, int], ...]

    def layouts(self, names: Sequence[str]) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
        """The layouts of operands and results over factors of these names."""
        ins, outs = ([Layout(tuple(tuple(map(names.index, d)) for d in dims)) for dims in own] for own in (self.ins, self.outs))
        return tuple(ins), tuple(outs)


@dataclass(frozen=True, slots=True)
class GridBlock:
    """The part of one dim of an operand or result that each program of a kernel's grid gets.

    Program p along the grid dim ``dim`` gets the ``size`` elements of block ``p // per``: ``per`` consecutive programs share a
    block. ``dim`` is -1 if each program of the grid gets the whole dim.
    """

    dim: int
    size: int
    per: int = 1

    def programs(self, extent: int) -> int:
        """The number of programs along the grid dim, for a dim of this extent."""
        return extent // self.size * self.per


@dataclass(frozen=True, slots=True)
class KernelGrid:
    """How a kernel that is launched on a grid reads its operands and writes its results, block by block.

    ``blocks[t][d]`` is the block of dim d of operand or result t. ``fixed`` are the grid dims along which the number of programs
    must stay: the body asks for its program number or their number, or blocks do not divide what they count. ``skips``: the
    length of a loop in the body depends on the program, and not on what it reads, as where a causal mask leaves blocks out.
    ``source`` is the file of the body. ``names[t]`` is the argument of the kernel that operand t is (``args[2]``), or the place
    of result t.
    """

    blocks: tuple[tuple[GridBlock, ...], ...]
    fixed: tuple[int, ...]
    skips: bool
    source: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Constant:
    """A scalar constant written into the program."""

    value: Any
    dtype: str


Operand = int | Constant

Control = Literal["scan", "while", "cond", "remat"]
"""The kind of control flow of an op with bodies."""

CONTROL: Mapping[str, Control] = {"scan": "scan", "while": "while", "cond": "cond", "remat2": "remat", "checkpoint": "remat"}
"""The primitives of control flow."""
_NONDETERMINISTIC = frozenset({"rng_uniform"})
"""Primitives whose result differs each time; random bits that are made from a key do not."""

RECOMPUTED = "rematted_computation"
"""The mark in the scope of an op that is recomputed in the backward pass, as under `jax.checkpoint`."""

_TRANSPOSED = "transpose("


@dataclass(frozen=True, slots=True)
class Op:
    """One primitive application.

    ``inputs`` are tensor ids or literals, ``outputs`` tensor ids. ``bodies`` are the sub-programs of control flow with their
    roles in ``params``; ``trips`` how often a body runs (None if unknown). ``source`` is the user's line, ``scope`` the
    name stack. ``handle`` is the equation, for emission to evaluate.
    """

    id: int
    primitive: str
    inputs: tuple[Operand, ...]
    outputs: tuple[int, ...]
    params: Mapping[str, Any]
    source: str
    scope: str
    bodies: tuple[Program, ...] = ()
    trips: int | None = 1
    handle: Any = field(default=None, compare=False, repr=False)

    @property
    def tensors(self) -> tuple[int, ...]:
        """The inputs that are tensors, literals left out."""
        return tuple(i for i in self.inputs if isinstance(i, int))

    @property
    def moves_memory(self) -> bool:
        """Whether it copies a value between the memories of a device and its host."""
        return self.primitive == HOST_COPY

    @property
    def sums(self) -> bool:
        """Whether its result is the sum of its two operands."""
        return self.primitive in ("add", "add_any")

    @property
    def control(self) -> Control | None:
        """Its kind of control flow; None for an op without bodies, or of an unknown kind."""
        return CONTROL.get(self.primitive) if self.bodies else None

    @property
    def recomputed(self) -> bool:
        """Whether it recomputes a value of the forward pass; JAX marks its scope."""
        return RECOMPUTED in self.scope

    @property
    def backward(self) -> bool:
        """Whether it belongs to the backward pass; JAX marks its scope, or its bodies as differentiated."""
        return _TRANSPOSED in self.scope or self.recomputed or bool(self.bodies and self.params.get("differentiated"))

    @property
    def again(self) -> bool:
        """Whether it computes values of the forward pass again and must not find them saved: differentiated remat."""
        return self.control == "remat" and bool(self.params.get("differentiated") and self.params.get("prevent_cse"))

    @property
    def repeatable(self) -> bool:
        """Whether it may run twice: it is deterministic, has no effects, and is no control flow."""
        return (
            not self.bodies and self.primitive not in _NONDETERMINISTIC and not (self.handle is not None and self.handle.effects)
        )

    @property
    def acts(self) -> bool:
        """Whether it does something beside its results, such as printing: it must run once, on one device."""
        return self.handle is not None and bool(self.handle.effects)

    @property
    def ordered(self) -> bool:
        """Whether its effects must come in the order of the program."""
        return self.acts and bool(self.params.get("ordered", False))


@dataclass(frozen=True, slots=True)
class Program:
    """A traced step: straight-line ops over tensors, in the order of the trace.

    Tensor ids index ``tensors`` and are local to this program (a body numbers its own). ``constants`` pairs a tensor with its
    value (opaque). ``feedback[i]`` is the index of the input whose state output ``i`` replaces, or None. ``offloaded`` are the
    inputs, by number, that lie in host memory, as do the outputs that replace them. ``stacks`` are tensors whose slices along
    dim 0 are arrays of their own when the program runs, as those of microbatches are in a pipeline: no layout splits that dim.
    """

    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    outputs: tuple[Operand, ...]
    constants: tuple[tuple[int, Any], ...] = ()
    input_paths: tuple[str, ...] = ()
    output_paths: tuple[str, ...] = ()
    feedback: tuple[int | None, ...] = ()
    offloaded: frozenset[int] = frozenset()
    stacks: frozenset[int] = frozenset()

    @property
    def hosted(self) -> frozenset[int]:
        """The outputs, by number, that are left in host memory."""
        return frozenset(o for o, i in enumerate(self.feedback) if i in self.offloaded)

    @property
    def returned(self) -> frozenset[int]:
        """The tensors among the outputs, without constants, whose values may be unhashable."""
        return frozenset(o for o in self.outputs if isinstance(o, int))

    @property
    def meshed(self) -> bool:
        """Whether the step itself names axes of a mesh, so that it cannot run on one device."""
        return any(not {"constraint", "manual"}.isdisjoint(op.params) for op in self.every_op())

    @property
    def to_host(self) -> Op | None:
        """The first op that copies a value to host memory, or from there."""
        return next((op for op in self.every_op() if op.moves_memory), None)

    def every_op(self) -> Iterator[Op]:
        """All ops; those of a body follow the op that has it."""
        for op in self.ops:
            yield op
            for body in op.bodies:
                yield from body.every_op()

    def count_ops(self) -> int:
        """Number of ops; ops in bodies count once."""
        return sum(1 for _ in self.every_op())


@dataclass(frozen=True, slots=True)
class Microbatches:
    """How many microbatches a step runs one after the other, and the inputs, by number, that are cut along their dim 0."""

    count: int = 1
    batch: tuple[int, ...] = ()


# -- what a plan chooses -----------------------------------------------------------------------------------------------

Where = tuple[tuple[int, int], ...]
"""The path of a body: (op id, body index) pairs from the outermost program inwards; empty for the program itself."""


@dataclass(frozen=True, slots=True)
class Use:
    """How one op reads its operands and leaves its results.

    ``loops[f]`` is the loop that factor f cuts: -1 for none, below -1 where partial sums are passed on. ``needs[i]`` is the
    layout of operand i (None for literals and for values that depend on no input), ``gives[r]`` that of result r before its
    reduction, ``stored[r]`` the one it is stored in. ``compute_s`` are the seconds of one execution.
    """

    loops: tuple[int, ...]
    needs: tuple[Layout | None, ...]
    gives: tuple[Layout, ...]
    stored: tuple[Layout | None, ...]
    compute_s: float


@dataclass(frozen=True, slots=True)
class Copy:
    """A resharded copy of a tensor that several ops read.

    It is made from the copy number ``source``, or from the stored tensor (None). ``backward``: only the backward pass reads it.
    """

    layout: Layout
    source: int | None = None
    backward: bool = False


@dataclass(frozen=True, slots=True)
class BodyChoices:
    """The choices for one program or body.

    ``layouts`` has the stored layout of each tensor (None: recomputed where it is read), ``uses`` the use of each op that has
    one, and ``reads`` the number of the copy through which an op reads an operand, by (op id, operand).
    """

    layouts: tuple[Layout | None, ...]
    uses: Mapping[int, Use]
    reads: Mapping[tuple[int, int], int]


@dataclass(frozen=True, slots=True)
class Choices:
    """Everything that a plan chooses for a program: the choices of each body, by its path, and the copies that ops share."""

    bodies: Mapping[Where, BodyChoices]
    copies: tuple[Copy, ...] = ()

    def use(self, where: Where, op: int) -> Use | None:
        """The use of an op in a body; None for an op that follows its operands."""
        return self.bodies[where].uses.get(op)
