"""Extents of dims that do not divide: blocks of 22 rows over 2 are 11 each, over 8 they are 3, and eight of them gather to 24.

Blocks nest if a dim has one *padded extent* wherever it is split: the least multiple of all numbers of ways in which it is
split, no less than the dim itself. Elements beyond the end are undefined. A dim that is whole on a device has its true extent.
Dims that an op cuts by the same loop have one extent; those that a move connects have one where they can. The step's arguments
and results, and loops that an op reads beside their own index, have the true extent: where such a dim meets a padded one, a
*reblock* moves the rows between neighbours (`Reblock`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardplan.ir import Constant, Layout, Split
from shardplan.schedule.instructions import (
    Barrier,
    Block,
    Compute,
    Cond,
    Cut,
    Fill,
    Instruction,
    Move,
    Reblock,
    Scan,
    Source,
    While,
    blocks_of,
    instructions_of,
    numbers_of,
)

_Place = tuple[str, int, int]
"""Dim d of value v ("value", v, d), cut number c of an op ("cut", the op's first result, c), or dim d inside a move."""


def with_extents(body: Block, sizes: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> Block:
    """A block whose cuts and moves say what extents their blocks have; ``shapes`` are those of its parameters."""
    if _divides(body, sizes):
        return _Writer(None, 0).block(body)
    classes = _Classes(sizes)
    classes.block(body)
    for v, shape in zip(body.parameters, shapes, strict=True):
        for d in range(len(shape)):
            classes.exact(("value", v, d))
    for source in body.results:
        if not isinstance(source, Constant):
            for d in range(_MOST_DIMS):
                classes.exact(("value", source, d))
    return _Writer(classes, 1 + max(numbers_of(body), default=0)).block(body)


_MOST_DIMS = 32
"""The most dims of a value: those of a NumPy array before version 2."""


def _divides(body: Block, sizes: Sequence[int]) -> bool:
    """Whether every dim divides by all the ways that it is cut into, so that nothing is padded."""
    for i in instructions_of(body.instructions):
        match i:
            case Compute() if any(c.extent % c.ways for c in i.cuts):
                return False
            case Move() if any(_remainder(i.shape, layout, sizes) for layout in _layouts(i)):
                return False
            case Fill() if i.layout is not None and _remainder(i.shape, i.layout, sizes):
                return False
            case While() if any(
                at is not None and _remainder(shape, at, sizes) for shape, at in zip(i.shapes, i.layouts, strict=True)
            ):
                return False
            case _:
                pass
    return True


def _remainder(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> bool:
    """Whether some dim does not divide by the ways that it is split."""
    return any(n % math.prod(sizes[f] for f in factors) for n, factors in zip(shape, layout.dims, strict=False))


@dataclass(slots=True)
class _Facts:
    """The facts about a class: the dim's true extent (0: not met yet), the number of ways in which it is cut, whether it is
    exact.
    """

    size: int = 0
    ways: int = 1
    exact: bool = False


class _Classes:
    """Dims that must have the same extent, found by joining them."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.parent: dict[_Place, _Place] = {}
        self.facts: dict[_Place, _Facts] = {}
        self.soft: list[tuple[_Place, _Place]] = []
        self._joined = False

    def find(self, place: _Place) -> _Place:
        """The place that stands for a place's class."""
        if place not in self.parent:
            self.parent[place] = place
            self.facts[place] = _Facts()
        root = place
        while self.parent[root] != root:
            root = self.parent[root]
        while self.parent[place] != root:
            self.parent[place], place = root, self.parent[place]
        return root

    def join(self, a: _Place, b: _Place) -> None:
        """These two have one extent."""
        a, b = self.find(a), self.find(b)
        if a != b:
            mine, other = self.facts[a], self.facts.pop(b)
            self.parent[b] = a
            mine.size, mine.exact = mine.size or other.size, mine.exact or other.exact
            mine.ways = math.lcm(mine.ways, other.ways)

    def cut(self, place: _Place, size: int, ways: int) -> None:
        """Notes that the dim at a place has this extent and is cut this many ways."""
        facts = self.facts[self.find(place)]
        facts.size = size
        facts.ways = math.lcm(facts.ways, ways)

    def exact(self, place: _Place) -> None:
        """A place that has its true extent."""
        self.facts[self.find(place)].exact = True

    def extent(self, place: _Place) -> int:
        """The padded extent of a place that was cut."""
        if not self._joined:
            self._joined = True
            for a, b in self.soft:
                one, other = self.facts[self.find(a)], self.facts[self.find(b)]
                ways = math.lcm(one.ways, other.ways)
                if one.exact == other.exact or (one.size or other.size) % ways == 0:
                    self.join(a, b)
        facts = self.facts[self.find(place)]
        if facts.exact:
            assert facts.size % facts.ways == 0, "what must divide is cut into ways that divide it"
            return facts.size
        return -(-facts.size // facts.ways) * facts.ways

    # -- reading a schedule ------------------------------------------------------------------------------------------

    def ways(self, factors: Sequence[int]) -> int:
        """How many devices there are along some factors."""
        return math.prod(self.sizes[f] for f in factors)

    def block(self, block: Block) -> None:
        """Joins what belongs together in a block."""
        for i in block.instructions:
            match i:
                case Compute():
                    self.compute(i)
                case Move():
                    self.move(i)
                case Fill():
                    self.layout(i.result, i.shape, i.layout)
                case Reblock():
                    raise AssertionError("extents are set once")
                case Barrier():
                    self.pairs(i.values, i.results)
                case Scan():
                    carry = len(i.start)
                    self.pairs(i.start, i.body.parameters[:carry])
                    self.pairs(i.start, i.body.results[:carry])
                    self.pairs(i.start, i.results[:carry])
                    self.pairs(i.stacked, i.body.parameters[carry:], 1)
                    self.pairs(i.results[carry:], i.body.results[carry:], 1)
                case While():
                    for others in (i.test.parameters, i.body.parameters, i.body.results, i.results):
                        self.pairs(i.start, others)
                case Cond():
                    for branch in i.branches:
                        self.pairs(i.arguments, branch.parameters)
                        self.pairs(i.results, branch.results)
            for inner in blocks_of(i):
                self.block(inner)

    def pairs(self, outer: Sequence[Source], inner: Sequence[Source], lift: int = 0) -> None:
        """Values that are the same inside and outside of a body; with ``lift`` the outer ones have leading dims more."""
        for a, b in zip(outer, inner, strict=True):
            if not isinstance(a, Constant) and not isinstance(b, Constant):
                for d in range(_MOST_DIMS):
                    self.join(("value", a, d + lift), ("value", b, d))

    def layout(self, value: int, shape: Sequence[int], layout: Layout | None) -> None:
        """A value that lies in a layout."""
        for d, factors in enumerate(() if layout is None else layout.dims[: len(shape)]):
            if factors:
                self.cut(("value", value, d), shape[d], self.ways(factors))

    def compute(self, compute: Compute) -> None:
        """The dims that an op cuts by one loop have one extent."""
        for number, c in enumerate(compute.cuts):
            place: _Place = ("cut", compute.results[0], number)
            self.cut(place, c.extent, c.ways)
            alone = compute.node.signature.in_step(c.loop)
            if not alone:
                self.exact(place)
            strategy = compute.node.signature.cut(c.loop, c.ways)
            assert strategy is not None, "a plan cuts what may be cut"
            for i, at in enumerate(strategy.operands):
                source = compute.inputs[i]
                if isinstance(at, Split) and i not in c.whole and not isinstance(source, Constant):
                    self.meet(place, ("value", source, at.dim), alone=alone)
            for r, at in enumerate(strategy.results):
                if isinstance(at, Split):
                    self.meet(place, ("value", compute.results[r], at.dim), alone=alone)

    def meet(self, cut: _Place, dim: _Place, *, alone: bool) -> None:
        """A dim that a cut splits: it has the loop's extent if it is read at the loop's own index; else it is exact."""
        if alone:
            self.join(cut, dim)
        else:
            self.exact(dim)

    def move(self, move: Move) -> None:
        """A dim that is split on both sides of a move has one extent, where it can."""
        self.layout(move.source, move.shape, move.before)
        self.layout(move.result, move.shape, move.after)
        for d, n in enumerate(move.shape):
            inside: _Place = ("move", move.result, d)
            for layout in (move.before, *(step.after for step in move.steps)):
                if layout.dims[d]:
                    self.cut(inside, n, self.ways(layout.dims[d]))
            if move.after.dims[d]:
                self.soft.append((inside, ("value", move.result, d)))
            if move.before.dims[d]:
                self.soft.append((inside, ("value", move.source, d)))


class _Writer:
    """Writes the extents into a block's instructions; without ``classes`` all are the true ones."""

    def __init__(self, classes: _Classes | None, count: int) -> None:
        self.classes, self.count = classes, count

    def block(self, block: Block) -> Block:
        """A block with extents."""
        instructions: list[Instruction] = []
        for i in block.instructions:
            match i:
                case Compute() if self.classes is not None:
                    instructions.append(replace(i, cuts=tuple(self.cuts(self.classes, i))))
                case Move():
                    instructions += self.move(i)
                case Fill():
                    instructions.append(replace(i, extents=self.extents("value", i.result, i.shape, i.layout)))
                case Scan():
                    instructions.append(replace(i, body=self.block(i.body)))
                case While():
                    layouts = tuple(
                        self.extents("value", v, shape, layout)
                        for v, shape, layout in zip(i.body.parameters, i.shapes, i.layouts, strict=False)
                    )
                    instructions.append(replace(i, test=self.block(i.test), body=self.block(i.body), extents=layouts))
                case Cond():
                    instructions.append(replace(i, branches=tuple(self.block(b) for b in i.branches)))
                case _:
                    instructions.append(i)
        return replace(block, instructions=tuple(instructions))

    def cuts(self, classes: _Classes, compute: Compute) -> Iterator[Cut]:
        """An op's cuts with the extents of their loops."""
        for number, c in enumerate(compute.cuts):
            yield replace(c, extent=classes.extent(("cut", compute.results[0], number)))

    def extents(self, kind: str, value: int, shape: Sequence[int], layout: Layout | None) -> tuple[int, ...]:
        """The extents of a value: the padded one of every dim that is split."""
        classes = self.classes
        if classes is None:
            return tuple(shape)
        dims = ((),) * len(shape) if layout is None else layout.dims
        return tuple(
            classes.extent((kind, value, d)) if factors else n for d, (n, factors) in enumerate(zip(shape, dims, strict=False))
        )

    def move(self, move: Move) -> Iterator[Instruction]:
        """A move, and reblocks where its ends have other extents."""
        if self.classes is None:
            yield replace(move, extents=move.shape)
            return
        touched = [any(layout.dims[d] for layout in _layouts(move)) for d in range(len(move.shape))]
        inside = tuple(self.classes.extent(("move", move.result, d)) if touched[d] else n for d, n in enumerate(move.shape))
        first = self.extents("value", move.source, move.shape, move.before)
        last = self.extents("value", move.result, move.shape, move.after)
        source = move.source
        for d, factors in enumerate(move.before.dims[: len(move.shape)]):
            if factors and first[d] != inside[d]:
                yield self.reblock(move, source, self.new(), move.before, first, d, inside[d])
                source, first = self.count - 1, (*first[:d], inside[d], *first[d + 1 :])
        later = [d for d, factors in enumerate(move.after.dims[: len(move.shape)]) if factors and last[d] != inside[d]]
        result = self.new() if later else move.result
        yield replace(move, source=source, result=result, extents=inside)
        for d in later:
            after = move.result if d == later[-1] else self.new()
            yield self.reblock(move, result, after, move.after, inside, d, last[d])
            result, inside = after, (*inside[:d], last[d], *inside[d + 1 :])

    def new(self) -> int:
        """The number of a new value."""
        self.count += 1
        return self.count - 1

    def reblock(
        self, move: Move, source: int, result: int, layout: Layout, extents: tuple[int, ...], dim: int, extent: int
    ) -> Reblock:
        """A dim of one end of a move in another extent."""
        return Reblock(source, result, move.tensor, move.shape, layout, extents, dim, extent, move.line)


def _layouts(move: Move) -> Iterator[Layout]:
    yield move.before
    for step in move.steps:
        yield step.after
