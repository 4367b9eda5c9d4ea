"""TDL, the tensor description language (Tofu, section 4.1): one output element as an expression over operand elements.

A description is a Python function of symbolic tensors that returns a lambda over output indices:

    >>> from shardplan import tdl
    >>> @tdl.op
    ... def conv1d(data, filters):
    ...     return lambda b, co, x: tdl.Sum(lambda ci, dx: data[b, ci, x + dx] * filters[ci, co, dx])

Reductions are `Sum`, `Prod`, `Max`, `Min`, `And`, `Or`, `ArgMax`, `ArgMin`; `where` selects; `apply` names any other scalar
function; `Opaque` stands for a function that TDL cannot express, and ``:`` passes it a whole slice.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

from shardplan.errors import DescriptionError, MisfitError
from shardplan.ir import Reducer
from shardplan.tdl.index import Affine, Data, Full, IndexExpr, Loop

Arithmetic = Literal["add", "mul", "div", "neg", "where", "apply", "match"]


class Scalar:
    """One element: a node of the expression tree. Arithmetic on scalars builds larger ones."""

    __slots__ = ()

    def __add__(self, other: object) -> Scalar:
        return Apply("add", (self, scalar(other)))

    __radd__ = __add__

    def __neg__(self) -> Scalar:
        return Apply("neg", (self,))

    def __sub__(self, other: object) -> Scalar:
        return Apply("add", (self, Apply("neg", (scalar(other),))))

    def __rsub__(self, other: object) -> Scalar:
        return Apply("add", (Apply("neg", (self,)), scalar(other)))

    def __mul__(self, other: object) -> Scalar:
        return Apply("mul", (self, scalar(other)))

    __rmul__ = __mul__

    def __truediv__(self, other: object) -> Scalar:
        return Apply("div", (self, scalar(other)))

    def __rtruediv__(self, other: object) -> Scalar:
        return Apply("div", (scalar(other), self))

    def __pow__(self, other: object) -> Scalar:
        return apply("pow", self, other)

    def __abs__(self) -> Scalar:
        return apply("abs", self)

    def __lt__(self, other: object) -> Scalar:
        return apply("lt", self, other)

    def __le__(self, other: object) -> Scalar:
        return apply("le", self, other)

    def __gt__(self, other: object) -> Scalar:
        return apply("gt", self, other)

    def __ge__(self, other: object) -> Scalar:
        return apply("ge", self, other)


@dataclass(frozen=True, slots=True)
class Number(Scalar):
    """A constant."""

    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Access(Scalar):
    """``operand[indices]``."""

    operand: int
    indices: tuple[IndexExpr, ...]


@dataclass(frozen=True, slots=True)
class Apply(Scalar):
    """A scalar function of scalars; ``how`` determines its linearity."""

    how: Arithmetic
    args: tuple[Scalar, ...]
    name: str = ""


@dataclass(frozen=True, slots=True)
class Reduce(Scalar):
    """The reduction of ``body`` over ``loops``."""

    reducer: Reducer
    loops: tuple[int, ...]
    body: Scalar


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A symbolic operand: index it with loops, integers, ``:`` or `DATA`, once per dim."""

    position: int
    shape: tuple[int, ...]
    dtype: str = "float32"

    def __getitem__(self, key: Any) -> Access:
        keys = cast("tuple[Any, ...]", key if isinstance(key, tuple) else (key,))
        if len(keys) != len(self.shape):
            raise MisfitError(
                f"operand {self.position} has rank {len(self.shape)}, {len(keys)} indices given", expression=f"{keys}"
            )
        return Access(self.position, tuple(_index(k) for k in keys))


DATA = Data()
"""The data-dependent index."""


def _index(key: object) -> IndexExpr:
    match key:
        case Loop():
            return key.expr
        case bool():
            raise DescriptionError("a bool is not an index", expression=repr(key))
        case int():
            return Affine((), key)
        case slice() if key == slice(None):
            return Full()
        case Data() | Scalar():
            return DATA
        case _:
            raise DescriptionError("an index is a loop, an integer, ':' or another tensor's element", expression=repr(key))


def scalar(value: object) -> Scalar:
    """``value`` as a node: scalars stay, numbers become constants."""
    if isinstance(value, Scalar):
        return value
    if isinstance(value, int | float):
        return Number(float(value))
    raise DescriptionError("a scalar expression is built from operand elements and numbers", expression=repr(value))


def where(condition: object, then: object, otherwise: object = 0.0) -> Scalar:
    """``then`` where the condition holds, else ``otherwise``: jointly linear in both, not in the condition."""
    return Apply("where", (scalar(condition), scalar(then), scalar(otherwise)))


def apply(name: str, *args: object) -> Scalar:
    """Any scalar function, linear in nothing."""
    return Apply("apply", tuple(scalar(a) for a in args), name)


def given(conditions: object, value: object) -> Scalar:
    """``value``, selected by ``conditions`` (a lookup's indices, the order of a sort): linear in the value only."""
    return Apply("where", (scalar(conditions), scalar(value), Number(0.0)), "given")


def transformed(conditions: object, value: object) -> Scalar:
    """A linear function of ``value``'s whole slice (a transform, a solve); ``conditions`` determine which."""
    return Apply("where", (scalar(conditions), scalar(value), Number(0.0)), "transformed")


def equals(element: object, index: Loop) -> Scalar:
    """1 where an element equals this index, else 0: expresses a lookup as a sum over all rows."""
    return Match(scalar(element), index.expr)


@dataclass(frozen=True, slots=True)
class Match(Scalar):
    """``element == index``."""

    element: Scalar
    index: IndexExpr


class Opaque:
    """A function of its arguments that TDL cannot express; each argument's ``:`` dims stay whole.

    ``lambda b, i, j: Opaque()(mat[b, :, :])[i, j]`` is Tofu's batch Cholesky: the dims indexed after the call stay whole too.

    ``flops`` are those of the matrix products in the whole call, for all elements of all results together: the op is then priced
    at the peak of its first operand's dtype. Without them its memory traffic alone counts. ``attention``: the products and the
    softmax between them are one kernel (Dao 2023, FlashAttention-2), which reaches less of the peak than a product alone.
    """

    def __init__(self, flops: float = 0.0, *, attention: bool = False) -> None:
        self.flops, self.attention = flops, attention

    def __call__(self, *args: Scalar) -> OpaqueResult:
        """The function's value on these elements and slices."""
        return OpaqueResult(args, self.flops, self.attention)


@dataclass(frozen=True, slots=True)
class OpaqueResult(Scalar):
    """An opaque value: index it with the loops that run inside the function, or use it as it is."""

    args: tuple[Scalar, ...]
    flops: float = 0.0
    attention: bool = False

    def __getitem__(self, key: object) -> Scalar:
        keys = cast("tuple[object, ...]", key if isinstance(key, tuple) else (key,))
        hidden = frozenset(loop for k in keys if isinstance(k, Loop) for loop in _loops(k))
        return HiddenLoops(self.args, hidden, self.flops, self.attention)


@dataclass(frozen=True, slots=True)
class HiddenLoops(Scalar):
    """An opaque value whose ``loops`` must stay whole: they index the function's result."""

    args: tuple[Scalar, ...]
    loops: frozenset[int]
    flops: float = 0.0
    attention: bool = False


def _loops(loop: Loop) -> frozenset[int]:
    from shardplan.tdl.index import loops_of

    return loops_of(loop.expr)


class Recorder:
    """Numbers the loops while a description's lambda runs. One recorder serves all lambdas of one description."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.kinds: list[Reducer | None] = []
        self.extents: list[int | None] = []
        self.parallel: dict[str, int] = {}
        self.whole: set[int] = set()
        self.open: list[str] = []  # the indices that the expression being built may use

    def __enter__(self) -> Recorder:
        _recorders.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _recorders.pop()

    def loop(self, name: str, reducer: Reducer | None, extent: int | None) -> int:
        """A new loop's id."""
        self.names.append(name)
        self.kinds.append(reducer)
        self.extents.append(extent)
        return len(self.names) - 1


_recorders: list[Recorder] = []


def current() -> Recorder:
    """The recorder of the description that is being read."""
    if not _recorders:
        raise DescriptionError("a reduction is used outside a description", expression="Sum(...)")
    return _recorders[-1]


@dataclass(frozen=True, slots=True)
class Grouped:
    """The name of a dim whose index is ``size * name + within``: the loop ``name`` counts groups, each of which stays whole."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Named:
    """A lambda whose index names are computed: ``body`` receives the loops named ``names``."""

    names: tuple[str | Grouped, ...]
    body: Callable[..., Any]

    def __call__(self, *loops: Loop) -> Any:
        """The element at these loops."""
        return self.body(*loops)


def lambda_names(function: Callable[..., Any], arity: int | None) -> list[str | Grouped]:
    """The index names of a description's lambda; ``*i`` expands to ``i0``, ``i1``... up to ``arity`` names in all."""
    if isinstance(function, Named):
        return list(function.names)
    code = getattr(function, "__code__", None)
    if code is not None and code.co_flags & inspect.CO_VARARGS and not code.co_argcount and arity is not None:
        stem = code.co_varnames[code.co_kwonlyargcount]
        return [f"{stem}{n}" for n in range(arity)]
    names: list[str | Grouped] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            if arity is None:
                raise DescriptionError("a reduction over *indices needs extents=", expression=f"lambda *{parameter.name}")
            names += [f"{parameter.name}{n}" for n in range(arity - len(names))]
        else:
            names.append(parameter.name)
    return names


def _reduction(reducer: Reducer, body: Callable[..., Any], extents: tuple[int, ...] | None, *, shared: bool = False) -> Scalar:
    names = [str(n) for n in lambda_names(body, None if extents is None else len(extents))]
    if not names or (extents is not None and len(extents) != len(names)):
        if extents == () and not names:
            return scalar(body())
        raise DescriptionError(
            "a reducer needs an index to reduce over", expression=f"{reducer} over {names} with extents {extents}"
        )
    recorder = current()
    shadowed = [n for n in names if n in recorder.open]
    if shadowed:
        raise DescriptionError(
            f"the index {shadowed[0]} of a reduction has the name of an index around it: rename it",
            expression=f"{reducer} over {', '.join(names)} inside {', '.join(recorder.open)}",
        )
    if shared:
        ids = tuple(_shared_loop(recorder, n, reducer, extents[i] if extents else None) for i, n in enumerate(names))
    else:
        ids = tuple(recorder.loop(n, reducer, extents[i] if extents else None) for i, n in enumerate(names))
    recorder.open += names
    term = scalar(body(*(Loop(Affine(((i, 1),))) for i in ids)))
    del recorder.open[-len(names) :]
    return Reduce(reducer, ids, term)


def _shared_loop(recorder: Recorder, name: str, reducer: Reducer, extent: int | None) -> int:
    """The loop of this name that indexes another result, or over which another result is reduced; with an extent, a new one."""
    if name in recorder.parallel:
        return recorder.parallel[name]
    reduced = [i for i, n in enumerate(recorder.names) if n == name and recorder.kinds[i] == reducer]
    if not reduced and extent is None:
        raise DescriptionError(f"a shared sum runs over an index of another result, and none is named {name}", expression=name)
    return reduced[0] if reduced else recorder.loop(name, reducer, extent)


def Sum(  # noqa: N802 (Tofu's name)
    body: Callable[..., Any], extents: tuple[int, ...] | None = None, *, shared: bool = False
) -> Scalar:
    """Sum of ``body`` over its indices; their extents are given, or read off the operand dims that they index alone.

    A ``shared`` sum runs over the indices of those names of other results. One cut of such a loop then splits those results, and
    makes this one a partial sum. With ``extents``, results may share loops that no result is indexed by: one cut makes partial
    sums of all of them.
    """
    return _reduction("sum", body, extents, shared=shared)


def Prod(body: Callable[..., Any], extents: tuple[int, ...] | None = None) -> Scalar:  # noqa: N802
    """Product over the indices of ``body``."""
    return _reduction("prod", body, extents)


def Max(body: Callable[..., Any], extents: tuple[int, ...] | None = None) -> Scalar:  # noqa: N802
    """Maximum over the indices of ``body``."""
    return _reduction("max", body, extents)


def Min(body: Callable[..., Any], extents: tuple[int, ...] | None = None) -> Scalar:  # noqa: N802
    """Minimum over the indices of ``body``."""
    return _reduction("min", body, extents)


def ArgMax(body: Callable[..., Any], extents: tuple[int, ...] | None = None) -> Scalar:  # noqa: N802
    """The first position of the maximum: a reduction of (position, value) pairs."""
    return _reduction("argmax", body, extents)


def ArgMin(body: Callable[..., Any], extents: tuple[int, ...] | None = None) -> Scalar:  # noqa: N802
    """The first position of the minimum."""
    return _reduction("argmin", body, extents)


def And(body: Callable[..., Any], extents: tuple[int, ...] | None = None) -> Scalar:  # noqa: N802
    """Conjunction over the indices of ``body``."""
    return _reduction("and", body, extents)


def Or(body: Callable[..., Any], extents: tuple[int, ...] | None = None) -> Scalar:  # noqa: N802
    """Disjunction over the indices of ``body``."""
    return _reduction("or", body, extents)
