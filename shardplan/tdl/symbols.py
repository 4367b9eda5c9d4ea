"""Symbolic numbers: an analysis that is run once on symbols is replayed on any numbers that answer its questions alike.

A rule, and the interval analysis after it, meet extents as `Extent`: arithmetic on them is written to a tape, and whatever the
code decides by them (does it divide? is it larger?) is a question, whose answer is that of the numbers at hand. The questions are
the side conditions of what comes out; the same code serves symbols and numbers.

An extent that the code uses as a plain integer (as an index, in a set, by `int`) is asked for its value: the analysis then holds
for this number only.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping
from typing import Any, cast

Number = Callable[[Any, Any], Any]
Step = tuple[Number | None, Any, Any]
"""One entry of a tape: ``function(tape[a], tape[b])``, or the constant ``a`` where there is no function."""


def _floordiv(a: Any, b: Any) -> Any:
    return a // b


def _value(a: Any, _: Any) -> Any:
    return a


class Extent:
    """A number on the tape of an analysis: ``value`` is what it is this time, ``least`` what it is at least each time.

    It counts as an `int` to `isinstance`, so that rules need not know of it; what asks for a true one gets its value.
    """

    __slots__ = ("at", "least", "symbol", "value")
    __class__ = property(lambda _: int)  # pyright: ignore[reportIncompatibleMethodOverride]

    def __init__(self, at: int, value: int, least: int | None, symbol: bool = False) -> None:
        self.at, self.value, self.least, self.symbol = at, value, least, symbol

    def __index__(self) -> int:
        return current().ask(_value, self, self)

    __int__ = __trunc__ = __floor__ = __ceil__ = __index__

    def __hash__(self) -> int:
        return hash(self.__index__())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__index__(), name)

    def __float__(self) -> float:
        return float(self.__index__())

    def __repr__(self) -> str:
        return repr(self.__index__() if _trails else self.value)

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(self.__index__(), spec)

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __eq__(self, other: object) -> Any:
        if type(other) is int and self.least is not None and other < self.least:
            return False
        if type(other) is Extent and (other.at == self.at or (self.symbol and other.symbol)):
            return other.at == self.at
        return _decided(operator.eq, self, other)

    def __lt__(self, other: Any) -> Any:
        if type(other) is int and self.least is not None and other <= self.least:
            return False
        return _decided(operator.lt, self, other)

    def __ge__(self, other: Any) -> Any:
        return _not(self.__lt__(other))

    def __gt__(self, other: Any) -> Any:
        if type(other) is int:
            return self.__ge__(other + 1)
        return _decided(operator.lt, other, self)

    def __le__(self, other: Any) -> Any:
        return _not(self.__gt__(other))

    def __add__(self, other: Any) -> Any:
        return self if type(other) is int and other == 0 else _made(operator.add, self, other)

    __radd__ = __add__

    def __neg__(self) -> Any:
        return _made(operator.mul, self, -1)

    def __pos__(self) -> Extent:
        return self

    def __abs__(self) -> Any:
        return -self if self < 0 else self

    def __sub__(self, other: Any) -> Any:
        if type(other) is Extent and other.at == self.at:
            return 0
        return self if type(other) is int and other == 0 else _made(operator.sub, self, other)

    def __rsub__(self, other: Any) -> Any:
        return _made(operator.sub, other, self)

    def __mul__(self, other: Any) -> Any:
        if type(other) is int and other in (0, 1):
            return self if other else 0
        return _made(operator.mul, self, other)

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        return self if type(other) is int and other == 1 else _divided(_floordiv, self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _divided(_floordiv, other, self)

    def __mod__(self, other: Any) -> Any:
        return 0 if type(other) is int and other == 1 else _divided(operator.mod, self, other)

    def __rmod__(self, other: Any) -> Any:
        return _divided(operator.mod, other, self)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self


def _on_numbers(how: Number) -> tuple[Callable[[Extent, Any], Any], Callable[[Extent, Any], Any]]:
    """What is not written to a tape, from both sides: the number itself is asked for."""

    def forward(self: Extent, other: Any) -> Any:
        return how(plain(self), plain(other))

    def backward(self: Extent, other: Any) -> Any:
        return how(plain(other), plain(self))

    return forward, backward


for _name in "truediv pow lshift rshift and or xor".split():
    for _side, _function in zip(("", "r"), _on_numbers(getattr(operator, f"__{_name}__")), strict=True):
        setattr(Extent, f"__{_side}{_name}__", _function)


def plain(value: Any) -> Any:
    """The number itself, of an extent or of anything else."""
    return value.__index__() if type(value) is Extent else value


def integer(value: Any) -> int:
    """``int(value)``, an extent as it is."""
    return cast("int", value) if type(value) is Extent else int(value)


def _not(value: Any) -> Any:
    return value if value is NotImplemented else not value


_WHOLE = (int, Extent)


def _apart(how: Number, a: Any, b: Any) -> Any:
    """With a float, only a number can be computed; what else the other is must know for itself."""
    return how(plain(a), plain(b)) if {type(a), type(b)} <= {Extent, float, complex, bool} else NotImplemented


def _decided(how: Number, a: Any, b: Any) -> Any:
    return current().ask(how, a, b) if type(a) in _WHOLE and type(b) in _WHOLE else _apart(how, a, b)


def _made(how: Number, a: Any, b: Any) -> Any:
    return current().make(how, a, b) if type(a) in _WHOLE and type(b) in _WHOLE else _apart(how, a, b)


def _divided(how: Number, a: Any, b: Any) -> Any:
    if type(b) is Extent and (b.least is None or b.least < 1) and b == 0:
        raise ZeroDivisionError("integer division or modulo by zero")
    return _made(how, a, b)


def _least(how: Number, a: Any, b: Any, smaller: bool | None) -> int | None:
    """What a result is at least: None where nothing is known. ``smaller``: whether a < b, where that was asked."""
    x = a.least if type(a) is Extent else a
    y = b.least if type(b) is Extent else b
    if x is None or y is None:
        return None
    if how is operator.add:
        return x + y
    if how is operator.sub:
        return None if type(b) is Extent else x - y
    if how is operator.mul:
        return x * y if x >= 0 and y >= 0 else None
    if x < 0 or y < 1:
        return None
    return 1 if how is _floordiv and smaller is False else 0


class Trail:
    """One run of an analysis: its tape, and the questions on the way with their answers.

    ``segments`` alternate: the steps up to a question, the question, its answer. ``known`` keeps a question from being asked
    twice.
    """

    __slots__ = ("at", "known", "numbers", "open", "segments", "tape")

    def __init__(self, tape: list[Extent], at: Mapping[Any, int], known: Mapping[Any, Any]) -> None:
        self.tape = tape
        self.at, self.known = dict(at), dict(known)
        self.open: list[Step] = []
        self.segments: list[tuple[tuple[Step, ...], Any, Hashable]] = []

    def symbol(self, value: int, *, own: bool = True) -> Extent:
        """A further input of at least 2; ``own``: it differs from all others that are."""
        self.tape.append(Extent(len(self.tape), value, 2, symbol=own))
        return self.tape[-1]

    def place(self, n: Any) -> int:
        """Where a number stands on the tape; a constant is written to it."""
        if type(n) is Extent:
            return n.at
        found = self.at.get(n)
        if found is None:
            found = self.at[n] = len(self.tape)
            self.open.append((None, n, 0))
            self.tape.append(Extent(found, n, n))
        return found

    def make(self, how: Number, a: Any, b: Any) -> Extent:
        """``how(a, b)``, the same extent each time."""
        x = a.at if type(a) is Extent else self.place(a)
        y = b.at if type(b) is Extent else self.place(b)
        key = (how, x, y)
        found = self.at.get(key)
        if found is not None:
            return self.tape[found]
        least = _least(how, a, b, self.known.get((operator.lt, x, y)))
        made = Extent(len(self.tape), how(self.tape[x].value, self.tape[y].value), least)
        self.at[key] = made.at
        self.open.append(key)
        self.tape.append(made)
        return made

    def ask(self, how: Number, a: Any, b: Any) -> Any:
        """The answer to ``how(a, b)``, by which the run goes on."""
        key = (how, self.place(a), self.place(b))
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = how(self.tape[key[1]].value, self.tape[key[2]].value)
            self.answered(key, found)
        return found

    def answered(self, question: Any, answer: Hashable) -> None:
        """Notes a question."""
        self.segments.append((tuple(self.open), question, answer))
        self.open = []


_trails: list[Trail] = []


def current() -> Trail:
    """The run that is going on: an extent means nothing outside one."""
    assert _trails, "a symbolic number has left its analysis"
    return _trails[-1]


def running(trail: Trail, run: Callable[[], Any]) -> Any:
    """What ``run`` returns, with this as the current run."""
    _trails.append(trail)
    try:
        return run()
    finally:
        _trails.pop()
