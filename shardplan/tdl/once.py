# pyright: reportUnknownVariableType=false
"""Each analysis once: a tree of the questions that it asks, at whose leaves stand its results in symbols.

On new numbers the questions are asked again, which is a few integer operations; where the answers lead to a leaf, its result is
filled in with these numbers. Where they do not, the analysis is run, on symbols, and its way becomes a branch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from numbers import Integral
from operator import itemgetter
from typing import Any, cast

from shardplan.errors import DescriptionError
from shardplan.ir import Partial, Replicated, Split
from shardplan.tdl.index import Affine
from shardplan.tdl.symbols import Extent, Step, Trail, running

FEW = 4
"""So many times an analysis is run on numbers: on symbols it takes several times as long, and then next to no time."""

Fill = Callable[[Sequence[Any]], Any]
_ATOMS = {int, str, bool, float, list, type(None), frozenset, Replicated, Partial}
_FIELDS: dict[type, tuple[str, ...]] = {}


def fill(made: Any) -> Fill | None:
    """How to make this value (tuples and dataclasses, with extents in them) again from a tape; None if it holds no extent.

    Lists are not looked into.
    """
    kind: type[Any] = type(made)
    if kind in _ATOMS:
        return None
    if kind is Extent:
        return itemgetter(made.at)
    if kind is tuple:
        return _filled(made, _tuple)
    if kind is Affine and type(made.const) is int and all(type(c) is int for _, c in made.terms):
        return None
    if kind is Split and type(made.halo[0]) is type(made.halo[1]) is int:
        return None
    names = _FIELDS.get(kind)
    if names is None:
        names = _FIELDS[kind] = tuple(getattr(kind, "__dataclass_fields__", ()))
    return _filled([getattr(made, name) for name in names], kind) if names else None


def _tuple(*parts: Any) -> tuple[Any, ...]:
    return parts


def _filled(parts: Sequence[Any], make: Callable[..., Any]) -> Fill | None:
    fills = [None if type(part) in _ATOMS else fill(part) for part in parts]
    if not any(fills):
        return None
    pairs = list(zip(parts, fills, strict=True))
    return lambda tape: make(*[part if f is None else f(tape) for part, f in pairs])


class Leaf:
    """A result in symbols, and what was found out on the way to it; ``more`` are the analyses that start from here."""

    __slots__ = ("at", "fill", "known", "made", "more", "tape")

    def __init__(self, trail: Trail, made: Any) -> None:
        self.made = made
        self.fill: Fill | None = fill(made)
        self.at, self.known = trail.at, trail.known
        self.tape = trail.tape
        self.more: dict[Hashable, Tree] = {}

    def filled(self, tape: Sequence[Any]) -> Any:
        """The result for the numbers on this tape."""
        return self.made if self.fill is None else self.fill(tape)

    def symbols(self, tape: Sequence[int]) -> list[Extent]:
        """The tape's numbers as the extents that they were."""
        return [Extent(i, n, old.least, old.symbol) for i, (n, old) in enumerate(zip(tape, self.tape, strict=True))]


class _Node:
    """Steps, and then a question with a branch for each answer, or a leaf."""

    __slots__ = ("branches", "leaf", "question", "steps")

    def __init__(self, steps: tuple[Step, ...]) -> None:
        self.steps = steps
        self.question: Any = None
        self.branches: dict[Hashable, _Node] = {}
        self.leaf: Leaf | None = None


class Tree:
    """All ways through one analysis. ``runs`` counts how often it was run on symbols."""

    __slots__ = ("_asked", "root")
    runs = 0

    def __init__(self) -> None:
        self.root: _Node | None = None
        self._asked = 0

    def seldom(self) -> bool:
        """Whether it was asked for so few times, with this one, that to run it on the numbers takes less time."""
        self._asked += 1
        return self.root is None and self._asked <= FEW

    def find(self, tape: list[int], read: Callable[[str, list[int]], Hashable] | None = None) -> Leaf | None:
        """The leaf that these numbers lead to; the tape then holds all that is computed on the way.

        ``read`` answers questions about what is no number.
        """
        node = self.root
        while node is not None:
            for how, a, b in node.steps:
                tape.append(a if how is None else how(tape[a], tape[b]))
            question = node.question
            if question is None:
                return node.leaf
            if type(question) is str:
                assert read is not None
                node = node.branches.get(read(question, tape))
            else:
                how, a, b = question
                node = node.branches.get(how(tape[a], tape[b]))
        return None

    def grow(self, trail: Trail, run: Callable[[], Any]) -> Leaf:
        """Runs the analysis and adds its way."""
        made = running(trail, run)
        Tree.runs += 1
        leaf = Leaf(trail, made)
        ways = [*trail.segments, (tuple(trail.open), None, None)]
        if self.root is None:
            self.root = _Node(ways[0][0])
        node = self.root
        for (_, question, answer), (steps, _, _) in pairwise(ways):
            if node.question not in (None, question):
                raise DescriptionError(
                    "a description decides by something else than its call: the same call was read otherwise before"
                )
            node.question = question
            node = node.branches.setdefault(answer, _Node(steps))
        node.leaf = leaf
        return leaf


# -- shapes and parameters -----------------------------------------------------------------------------------------------


class Numbering:
    """Equal numbers are one symbol; what is less than 2 stays the number that it is (an empty dim, a broadcast one)."""

    __slots__ = ("of",)

    def __init__(self) -> None:
        self.of: dict[int, int] = {}

    def code(self, value: Any, tape: list[int]) -> Hashable:
        """What a value looks like with its numbers left out: symbols as (their place,), all else as it is.

        A number that is new is appended to the tape.
        """
        kind: type[Any] = type(value)
        if kind is int or (kind is not bool and isinstance(value, Integral)):
            n = int(value)
            if n < 2:
                return n
            at = self.of.get(n)
            if at is None:
                at = self.of[n] = len(tape)
                tape.append(n)
            return (at,)
        if kind is tuple or kind is list:
            return kind, tuple([self.code(part, tape) for part in value])
        return _constant(value)

    def shapes(self, shapes: tuple[tuple[int, ...], ...], tape: list[int]) -> Hashable:
        """`code` of shapes, in less time: symbols as their place, numbers less than 2 as what they lack to it."""
        of, found = self.of, list[int | None]()
        for shape in shapes:
            for n in shape:
                if n < 2:
                    found.append(n - 2)
                    continue
                at = of.get(n)
                if at is None:
                    at = of[n] = len(tape)
                    tape.append(n)
                found.append(at)
            found.append(None)
        return tuple(found)


class _Same:
    """A value that has no equality of its own."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


def _constant(value: Any) -> Hashable:
    kind: type[Any] = type(value)
    try:
        hash(value)
    except TypeError:
        return _Same(value)
    if value != value:
        return "nan", kind
    return kind, value


_ABSENT = object()
_NAMES = "*"


def asked(params: Mapping[str, Any], numbering: Numbering) -> Callable[[str, list[int]], Hashable]:
    """Answers the questions that `Lifted` asks."""

    def read(name: str, tape: list[int]) -> Hashable:
        if name == _NAMES:
            return tuple(params)
        value = params.get(name, _ABSENT)
        return _ABSENT if value is _ABSENT else numbering.code(value, tape)

    return read


class Lifted(Mapping[str, Any]):
    """A call's parameters with their integers as symbols. What is not read does not matter to what comes out."""

    def __init__(self, params: Mapping[str, Any], numbering: Numbering, trail: Trail) -> None:
        self.params, self.numbering, self.trail = params, numbering, trail
        self.read = asked(params, numbering)
        self.seen: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self.seen:
            self._ask(name)
            self.seen[name] = lifted(self.params[name], self.numbering, self.trail) if name in self.params else _ABSENT
        if self.seen[name] is _ABSENT:
            raise KeyError(name)
        return self.seen[name]

    def __iter__(self) -> Iterator[str]:
        if _NAMES not in self.seen:
            self._ask(_NAMES)
            self.seen[_NAMES] = None
        return iter(self.params)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def _ask(self, name: str) -> None:
        """Asks, and takes the numbers that are new as symbols."""
        numbers = [n.value for n in self.trail.tape]
        known = len(numbers)
        self.trail.answered(name, self.read(name, numbers))
        for n in numbers[known:]:
            self.trail.symbol(n)


def lifted(value: Any, numbering: Numbering, trail: Trail) -> Any:
    """A value whose integers are the symbols that `Numbering.code` made of them."""
    kind: type[Any] = type(value)
    if kind is tuple or kind is list:
        return cast("object", kind([lifted(part, numbering, trail) for part in value]))
    if kind is int or (kind is not bool and isinstance(value, Integral)):
        n = int(value)
        return n if n < 2 else trail.tape[numbering.of[n]]
    return value
