"""The types that cross stages. Read these first.

A step is traced to a `Program`; a description of each of its ops gives a `Graph`; `Choices` say how each tensor lies on the
devices and how each op is cut. All of them are frozen, and none of them knows JAX: what only emission needs (the equation behind
an op) travels as an opaque ``handle``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

Reducer = Literal["sum", "prod", "max", "min", "and", "or", "argmax", "argmin"]
"""How terms make a whole. The last two reduce pairs: a place, and the extreme that was found there."""

PAIRS: tuple[Reducer, ...] = ("argmax", "argmin")
"""The reducers of pairs."""


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
"""What a PartitionSpec says of one dim."""


def spec_text(entries: Iterable[object]) -> str:
    """A PartitionSpec, or its entries, as it is written.

    >>> spec_text(("node", None, ("gpu", "core")))
    "P('node', None, ('gpu', 'core'))"
    """
    return "P(" + ", ".join(repr(e) for e in entries) + ")"


@dataclass(frozen=True, slots=True)
class Layout:
    """How a stored tensor lies on the factors.

    ``dims[d]`` lists, major first, the indices of the factors that split dim ``d``; ``partial`` those over which the tensor is a
    sum of terms (reduced by ``reducer``). A factor that stands nowhere replicates.
    """

    dims: tuple[tuple[int, ...], ...]
    partial: tuple[int, ...] = ()
    reducer: Reducer = "sum"

    @property
    def used(self) -> tuple[int, ...]:
        """The factors that split a dim, sorted."""
        return tuple(sorted(f for dim in self.dims for f in dim))

    def entries(self, names: Sequence[str]) -> tuple[Entry, ...]:
        """The entries of a PartitionSpec over axes named like the factors; trailing whole dims are left out.

        >>> Layout(((1,), (0, 2), ())).entries(("node", "gpu", "core"))
        ('gpu', ('node', 'core'))
        """
        found = [None if not fs else names[fs[0]] if len(fs) == 1 else tuple(names[f] for f in fs) for fs in self.dims]
        while found and found[-1] is None:
            found.pop()
        return tuple(found)


_KEYS = {"key<fry>": 8, "key<rbg>": 16, "key<urbg>": 16}


@cache
def itemsize(dtype: str) -> int:
    """Bytes of one element of a dtype by its name; none of a literal, which has none. Sizes below a byte take one.

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
    """A value of the program: ``shape`` in elements, ``dtype`` by name (``float32``, ``key<fry>``), ``itemsize`` in bytes."""

    id: int
    shape: tuple[int, ...]
    dtype: str
    itemsize: int

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
class Constant:
    """A scalar constant written into the program."""

    value: Any
    dtype: str


Operand = int | Constant

Control = Literal["scan", "while", "cond", "remat"]
"""What an op with bodies does with them."""

_CONTROL: Mapping[str, Control] = {"scan": "scan", "while": "while", "cond": "cond", "remat2": "remat", "checkpoint": "remat"}
_DRAWS = frozenset({"rng_uniform"})
"""Primitives that give something else each time; random bits that are made from a key do not."""

RECOMPUTED = "rematted_computation"
"""Stands in the scope of an op that is computed again in the backward pass, as under `jax.checkpoint`."""

_TRANSPOSED = "transpose("


@dataclass(frozen=True, slots=True)
class Op:
    """One primitive application.

    ``inputs`` are tensor ids or literals, ``outputs`` tensor ids. ``bodies`` are the sub-programs of control flow with their
    roles in ``params``; ``trips`` how often a body runs (None where nobody knows). ``source`` is the user's line, ``scope`` the
    name stack. ``handle`` is the equation that emission evaluates again.
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
    def control(self) -> Control | None:
        """What it does with its bodies; None for an op without bodies, or of a kind that is not known."""
        return _CONTROL.get(self.primitive) if self.bodies else None

    @property
    def recomputed(self) -> bool:
        """Whether it computes a value of the forward pass again: JAX says so in its scope."""
        return RECOMPUTED in self.scope

    @property
    def backward(self) -> bool:
        """Whether it belongs to the backward pass: JAX says so in its scope, or marks its bodies as differentiated."""
        return _TRANSPOSED in self.scope or self.recomputed or bool(self.bodies and self.params.get("differentiated"))

    @property
    def repeatable(self) -> bool:
        """Whether it may run twice: it makes the same again, and has no effects; control flow is left as it is."""
        return not self.bodies and self.primitive not in _DRAWS and not (self.handle is not None and self.handle.effects)


@dataclass(frozen=True, slots=True)
class Program:
    """A traced step: straight-line ops over tensors, in the order of the trace.

    Tensor ids index ``tensors`` and are local to this program (a body numbers its own). ``constants`` pairs a tensor with its
    value (opaque). ``feedback[i]`` is the index of the input whose state output ``i`` replaces, or None.
    """

    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    outputs: tuple[Operand, ...]
    constants: tuple[tuple[int, Any], ...] = ()
    input_paths: tuple[str, ...] = ()
    output_paths: tuple[str, ...] = ()
    feedback: tuple[int | None, ...] = ()

    @property
    def returned(self) -> frozenset[int]:
        """The tensors among the outputs; constants may be of a type that knows no hash."""
        return frozenset(o for o in self.outputs if isinstance(o, int))

    def count_ops(self) -> int:
        """Number of ops, those in bodies included once."""
        return len(self.ops) + sum(body.count_ops() for op in self.ops for body in op.bodies)


# -- what a plan chooses -----------------------------------------------------------------------------------------------

Where = tuple[tuple[int, int], ...]
"""The path of a body: (op id, body index) pairs from the outermost program inwards; empty for the program itself."""


@dataclass(frozen=True, slots=True)
class Use:
    """How one op reads its operands and leaves its results.

    ``loops[f]`` is the loop that factor f cuts: -1 for none, below -1 where partial sums are handed on. ``needs[i]`` is the
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
    """The choices for one program or body: the stored layout of each of its tensors (None: made anew where it is read), the use
    of each op that has one, and by (op id, operand) the number of the copy through which an op reads an operand.
    """

    layouts: tuple[Layout | None, ...]
    uses: Mapping[int, Use]
    reads: Mapping[tuple[int, int], int]


@dataclass(frozen=True, slots=True)
class Choices:
    """Everything that a plan chooses for a program: by the path of each body, and the copies that ops share."""

    bodies: Mapping[Where, BodyChoices]
    copies: tuple[Copy, ...] = ()

    def use(self, where: Where, op: int) -> Use | None:
        """How an op of a body is run; None for one that follows its operands."""
        return self.bodies[where].uses.get(op)
