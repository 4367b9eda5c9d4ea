"""Index expressions over loops, and the intervals that they sweep.

An index of an operand dim is affine in the loops, with ``//`` and ``%`` by constants (reshape), or a full slice, or depends on
data. `interval` is Tofu's symbolic interval analysis (paper section 4.2, eq. 1 and Figure 4), with one symbol: the worker ``w``
that computes block ``w`` of the cut loop. A region is ``[step*w + lo, step*w + hi]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never

from shardplan.errors import DescriptionError


@dataclass(frozen=True, slots=True)
class Affine:
    """``sum(coefficient * loop) + const``; ``terms`` are sorted by loop and hold no zero."""

    terms: tuple[tuple[int, int], ...] = ()
    const: int = 0


@dataclass(frozen=True, slots=True)
class FloorDiv:
    """``inner // by``."""

    inner: IndexExpr
    by: int


@dataclass(frozen=True, slots=True)
class Exact:
    """``inner / by``, defined only where ``by`` divides (a dilated operand, the windows that cover an element)."""

    inner: IndexExpr
    by: int


@dataclass(frozen=True, slots=True)
class Mod:
    """``inner % by``."""

    inner: IndexExpr
    by: int


@dataclass(frozen=True, slots=True)
class Multiple:
    """``inner * by`` where the inner expression contains ``//`` or ``%``."""

    inner: IndexExpr
    by: int


@dataclass(frozen=True, slots=True)
class Plus:
    """A sum that is not affine: some term contains ``//`` or ``%``."""

    left: IndexExpr
    right: IndexExpr


@dataclass(frozen=True, slots=True)
class Full:
    """All of a dim (``:``)."""


@dataclass(frozen=True, slots=True)
class Data:
    """A data-dependent index: the worker must hold the whole dim."""


IndexExpr = Affine | FloorDiv | Exact | Mod | Multiple | Plus | Full | Data


class Loop:
    """An index variable as a description's lambda receives it; ``+ - * // %`` by integers build an index expression."""

    __slots__ = ("expr",)

    def __init__(self, expr: IndexExpr) -> None:
        self.expr = expr

    def __add__(self, other: object) -> Loop:
        return Loop(_add(self.expr, _expr(other)))

    __radd__ = __add__

    def __neg__(self) -> Loop:
        return Loop(_scale(self.expr, -1))

    def __sub__(self, other: object) -> Loop:
        return Loop(_add(self.expr, _scale(_expr(other), -1)))

    def __rsub__(self, other: object) -> Loop:
        return Loop(_add(_expr(other), _scale(self.expr, -1)))

    def __mul__(self, other: object) -> Loop:
        if not isinstance(other, int):
            raise DescriptionError("a product of two indices is not affine", expression=f"({self!r}) * ({other!r})")
        return Loop(_scale(self.expr, other))

    __rmul__ = __mul__

    def __floordiv__(self, by: object) -> Loop:
        return Loop(floordiv(self.expr, _positive(self, by, "//")))

    def __truediv__(self, by: object) -> Loop:
        return Loop(exact(self.expr, _positive(self, by, "/")))

    def __mod__(self, by: object) -> Loop:
        return Loop(mod(self.expr, _positive(self, by, "%")))

    def __repr__(self) -> str:
        return show(self.expr)


def _positive(left: Loop, by: object, sign: str) -> int:
    if not isinstance(by, int) or by < 1:
        raise DescriptionError("an index is divided only by a positive constant", expression=f"({left!r}) {sign} ({by!r})")
    return by


def _expr(value: object) -> IndexExpr:
    if isinstance(value, Loop):
        return value.expr
    if isinstance(value, int):
        return Affine((), value)
    raise DescriptionError("an index is built from loops and integers", expression=repr(value))


def _add(a: IndexExpr, b: IndexExpr) -> IndexExpr:
    match a, b:
        case Affine(), Affine():
            terms = dict(a.terms)
            for loop, c in b.terms:
                terms[loop] = terms.get(loop, 0) + c
            return Affine(tuple(sorted((v, c) for v, c in terms.items() if c)), a.const + b.const)
        case _, Affine((), 0):
            return a
        case Affine((), 0), _:
            return b
        case _:
            return Plus(a, b)


def _scale(a: IndexExpr, k: int) -> IndexExpr:
    match a:
        case Affine():
            return Affine(tuple((v, c * k) for v, c in a.terms if c * k), a.const * k)
        case _ if k == 1:
            return a
        case _:
            return Multiple(a, k)


def floordiv(a: IndexExpr, by: int) -> IndexExpr:
    """``a // by``, simplified where the result is affine."""
    if by == 1:
        return a
    if isinstance(a, Affine) and a.const % by == 0 and all(c % by == 0 for _, c in a.terms):
        return Affine(tuple((v, c // by) for v, c in a.terms), a.const // by)
    return FloorDiv(a, by)


def exact(a: IndexExpr, by: int) -> IndexExpr:
    """``a / by``, simplified where the result is affine."""
    whole = floordiv(a, by)
    return Exact(a, by) if isinstance(whole, FloorDiv) else whole


def mod(a: IndexExpr, by: int) -> IndexExpr:
    """``a % by``, simplified where the result is a constant."""
    if by == 1:
        return Affine()
    if isinstance(a, Affine):
        a = Affine(tuple((v, c) for v, c in a.terms if c % by), a.const % by)
        if not a.terms:
            return a
    return Mod(a, by)


def show(expr: IndexExpr, names: Mapping[int, str] | None = None) -> str:
    """The expression as a person would write it."""
    match expr:
        case Affine():
            parts = [(f"{c}*" if c != 1 else "") + (names[v] if names else f"i{v}") for v, c in expr.terms]
            if expr.const or not parts:
                parts.append(str(expr.const))
            return " + ".join(parts)
        case FloorDiv(inner, by):
            return f"({show(inner, names)}) // {by}"
        case Exact(inner, by):
            return f"({show(inner, names)}) / {by}"
        case Mod(inner, by):
            return f"({show(inner, names)}) % {by}"
        case Multiple(inner, by):
            return f"{by}*({show(inner, names)})"
        case Plus(left, right):
            return f"{show(left, names)} + {show(right, names)}"
        case Full():
            return ":"
        case Data():
            return "<data>"
        case _:
            assert_never(expr)


def loops_of(expr: IndexExpr) -> frozenset[int]:
    """The loops that the expression reads."""
    match expr:
        case Affine():
            return frozenset(v for v, _ in expr.terms)
        case FloorDiv(inner, _) | Exact(inner, _) | Mod(inner, _) | Multiple(inner, _):
            return loops_of(inner)
        case Plus(left, right):
            return loops_of(left) | loops_of(right)
        case Full() | Data():
            return frozenset()
        case _:
            assert_never(expr)


@dataclass(frozen=True, slots=True)
class Interval:
    """Worker ``w`` reads ``[step*w + lo, step*w + hi]``, both ends included."""

    step: int
    lo: int
    hi: int


def interval(expr: IndexExpr, extents: Mapping[int, int], cut: int, ways: int) -> Interval | None:
    """The interval that ``expr`` sweeps while loop ``cut`` runs over worker w's block of ``extents[cut] / ways`` iterations.

    The other loops run over their whole range. None if no single ``step`` fits all workers (a stride across blocks).
    """
    match expr:
        case Affine():
            step, lo, hi = 0, expr.const, expr.const
            for loop, c in expr.terms:
                n = extents[loop]
                if loop == cut:
                    n //= ways
                    step += c * n
                reach = c * (n - 1)
                if reach < 0:
                    lo += reach
                else:
                    hi += reach
            return Interval(step, lo, hi)
        case FloorDiv(inner, by):
            at = interval(inner, extents, cut, ways)
            if at is None or at.step % by:
                return None
            return Interval(at.step // by, at.lo // by, at.hi // by)
        case Exact(inner, by):
            at = interval(inner, extents, cut, ways)
            if at is None or at.step % by:
                return None
            return Interval(at.step // by, -(-at.lo // by), at.hi // by)
        case Mod(inner, by):
            at = interval(inner, extents, cut, ways)
            return None if at is None else _interval_mod(at, by, ways)
        case Multiple(inner, by):
            at = interval(inner, extents, cut, ways)
            return None if at is None else Interval(at.step * by, *sorted((at.lo * by, at.hi * by)))
        case Plus(left, right):
            a, b = interval(left, extents, cut, ways), interval(right, extents, cut, ways)
            return None if a is None or b is None else Interval(a.step + b.step, a.lo + b.lo, a.hi + b.hi)
        case Full() | Data():
            return Interval(0, 0, 0)
        case _:
            assert_never(expr)


def _interval_mod(at: Interval, by: int, ways: int) -> Interval | None:
    """The interval of remainders; None unless it is all of them, the same for every worker, or free of wrap-around."""
    if at.hi - at.lo >= by - 1:
        return Interval(0, 0, by - 1)
    if at.step % by == 0:
        same = at.lo // by == at.hi // by
        return Interval(0, at.lo % by, at.hi % by) if same else Interval(0, 0, by - 1)
    last = at.step * (ways - 1)
    inside = min(at.lo, at.lo + last) >= 0 and max(at.hi, at.hi + last) < by
    return at if inside else None
