"""The instructions of a device's program. Values have numbers that are unique over all bodies; a body may read outer values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shardplan.collectives.step import Step
from shardplan.graph import Node
from shardplan.ir import Constant, Layout, Op, Reducer

Source = int | Constant
"""A value by its number, or a literal of the program."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One loop of an op cut over some factors, major first.

    ``ways`` is the product of their sizes. ``terms`` are the operands that are terms of a sum, one on each device; ``whole`` the
    operands that every device holds whole and takes its block out of. ``extent`` is the loop's, padded where it does not divide.
    """

    loop: int
    factors: tuple[int, ...]
    ways: int
    terms: frozenset[int] = frozenset()
    whole: frozenset[int] = frozenset()
    extent: int = 0


@dataclass(frozen=True, slots=True)
class Compute:
    """An op on a device's share; a reduction of pairs (argmax) has the extreme of its share as one result more.

    ``once``: the op has effects, so that the first device alone runs it; the others have zeros for results.
    """

    node: Node
    inputs: tuple[Source, ...]
    results: tuple[int, ...]
    cuts: tuple[Cut, ...]
    once: bool = False

    @property
    def scope(self) -> str:
        """The named scope of its exchanges with neighbours, before the number of the cut, the operand, and the side."""
        return f"halo{self.results[0]}"


@dataclass(frozen=True, slots=True)
class Move:
    """A value brought from one layout into another by these steps.

    ``shape`` is the shape of the whole tensor, which has the number ``tensor`` in the flat graph; wherever dim d is split, it is
    padded to ``extents[d]``. ``reducer`` says how terms are reduced where the value is partial; with a reduction of pairs
    ``extreme`` is the value that came with the places.
    """

    source: int
    result: int
    tensor: int
    shape: tuple[int, ...]
    before: Layout
    after: Layout
    steps: tuple[Step, ...]
    line: str
    reducer: Reducer = "sum"
    extreme: int | None = None
    extents: tuple[int, ...] = ()

    @property
    def scope(self) -> str:
        """The named scope of its collectives; step n's has ``.n`` behind it."""
        return f"move{self.result}"


@dataclass(frozen=True, slots=True)
class Bundle:
    """Moves that each take one step, the same collective; their blocks travel as one flat buffer.

    ``step`` is the first move's with the bytes of all, as it carries them.
    """

    moves: tuple[Move, ...]
    step: Step

    @property
    def scope(self) -> str:
        """The named scope of its collective, numbered like the only step of a move."""
        return f"bundle{self.moves[0].result}.0"

    @property
    def steps(self) -> list[Step]:
        """The step of each move."""
        return [move.steps[0] for move in self.moves]


@dataclass(frozen=True, slots=True)
class Reblock:
    """A value whose padded extent of dim ``dim`` changes from ``extents[dim]`` to ``extent``; its layout stays.

    Neighbours exchange the rows that then lie elsewhere.
    """

    source: int
    result: int
    tensor: int
    shape: tuple[int, ...]
    layout: Layout
    extents: tuple[int, ...]
    dim: int
    extent: int
    line: str

    @property
    def scope(self) -> str:
        """The named scope of its exchanges; the scope of the exchange with the n-th neighbour has ``.n`` appended."""
        return f"reblock{self.result}"

    def heads(self, ways: int) -> list[int]:
        """How many rows come from each neighbour, the nearest first: from later neighbours if blocks grow, from earlier ones if
        they shrink.
        """
        n, old, new = self.shape[self.dim], self.extents[self.dim] // ways, self.extent // ways
        if new > old:
            missing = max(min((i + 1) * new, n) - (i + 1) * old for i in range(ways))
        else:
            missing = max(i * (old - new) for i in range(ways) if i * new < n)
        return [min(old, missing - at) for at in range(0, missing, old)]


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A value copied into a memory of JAX's name: from its host's into the device's, or back. It is of tensor ``tensor``."""

    source: int
    result: int
    tensor: int
    memory: Literal["device", "pinned_host"]


@dataclass(frozen=True, slots=True)
class Fill:
    """A value that is known: a literal, or zeros of a block in ``layout`` (a sum that starts, a result without elements)."""

    result: int
    tensor: int
    shape: tuple[int, ...]
    layout: Layout | None
    value: Constant | None = None
    extents: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Barrier:
    """An optimization barrier: the results are the values, and are there only when all values are.

    Every later instruction reads the last ``late`` results instead of their values. Only instructions built to do so read the
    other results.
    """

    values: tuple[int, ...]
    results: tuple[int, ...]
    late: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """Instructions with parameters and results: a body of control flow, or the whole step."""

    parameters: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    results: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Scan:
    """A scan: ``start`` are the carries, ``stacked`` what it takes slice by slice; the body's parameters are a carry each, then a
    slice each, its results likewise. ``results`` are the carries after the last iteration, then the stacks.
    """

    op: Op
    start: tuple[Source, ...]
    stacked: tuple[Source, ...]
    body: Block
    results: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class While:
    """A while loop. With ``batched`` the test is a vector: the loop runs while any element holds, and changes only the elements
    of the carries for which the test holds. The carries have these ``shapes``, ``layouts`` and padded ``extents``.
    """

    op: Op
    start: tuple[Source, ...]
    test: Block
    body: Block
    results: tuple[int, ...]
    batched: bool = False
    shapes: tuple[tuple[int, ...], ...] = ()
    layouts: tuple[Layout | None, ...] = ()
    extents: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Cond:
    """A conditional: each branch leaves its results in the layouts outside. ``index`` is None where the platform decides."""

    op: Op
    index: Source | None
    arguments: tuple[Source, ...]
    branches: tuple[Block, ...]
    results: tuple[int, ...]


Instruction = Compute | Move | Bundle | Reblock | HostCopy | Fill | Barrier | Scan | While | Cond


@dataclass(frozen=True, slots=True)
class Schedule:
    """The program of a device: ``body``'s parameters are the step's arguments in their layouts, its results the step's."""

    body: Block
    results: tuple[Layout | None, ...]


def instructions_of(instructions: Sequence[Instruction]) -> Iterator[Instruction]:
    """All instructions, those of bodies included, in their order."""
    for i in instructions:
        yield i
        for block in blocks_of(i):
            yield from instructions_of(block.instructions)


def results_of(instruction: Instruction) -> tuple[int, ...]:
    """The values that an instruction makes."""
    match instruction:
        case Move() | Reblock() | HostCopy() | Fill():
            return (instruction.result,)
        case Bundle():
            return tuple(move.result for move in instruction.moves)
        case _:
            return instruction.results


def blocks_of(instruction: Instruction) -> tuple[Block, ...]:
    """The bodies of an instruction."""
    match instruction:
        case Scan():
            return (instruction.body,)
        case While():
            return (instruction.test, instruction.body)
        case Cond():
            return instruction.branches
        case _:
            return ()


def with_blocks(instruction: Instruction, change: Callable[[Block], Block]) -> Instruction:
    """An instruction with other bodies."""
    match instruction:
        case Scan():
            return replace(instruction, body=change(instruction.body))
        case While():
            return replace(instruction, test=change(instruction.test), body=change(instruction.body))
        case Cond():
            return replace(instruction, branches=tuple(change(b) for b in instruction.branches))
        case _:
            return instruction


def numbers_of(block: Block) -> Iterator[int]:
    """The numbers of all values that a block, and the blocks in it, take or make."""
    yield from block.parameters
    for i in block.instructions:
        yield from results_of(i)
        for inner in blocks_of(i):
            yield from numbers_of(inner)
