"""What is computed again, and what the ops of a program are to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shardplan.ir import Program, Where

Policy = Literal["all", "light"]
"""What of a body is computed again: all of it, or all but its contractions, whose results are kept."""

IsHeavy = Callable[[Where, int], bool]
"""Whether the op of this id in the program there is a contraction."""


@dataclass(frozen=True, slots=True)
class Part:
    """Ops that are computed again together, in the program at ``where``.

    ``ops`` are their ids, in order. ``loop`` is (forward scan, backward scan) where they are ops of the forward scan's body, by
    their ids at ``where``; else they stand at ``where`` itself. ``saved_bytes``: so many fewer are kept between the passes, of
    whole values, over all iterations.
    """

    where: Where
    ops: tuple[int, ...]
    loop: tuple[int, int] | None
    saved_bytes: int


@dataclass(frozen=True, slots=True)
class Without:
    """The best plan that computes nothing again: seconds of a step, bytes of a device, and whether these fit."""

    step_time_s: float
    peak_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class Remat:
    """What a plan computes again in the backward pass; ``without`` is there where the search looked for it."""

    parts: tuple[Part, ...] = ()
    policy: Policy = "all"
    without: Without | None = None
    note: str = ""

    @property
    def loops(self) -> int:
        """How many scans have bodies that are computed again."""
        return sum(part.loop is not None for part in self.parts)

    @property
    def blocks(self) -> int:
        """How many stretches of straight-line code are computed again."""
        return len(self.parts) - self.loops

    @property
    def operators(self) -> int:
        """How many ops are, those of loops once."""
        return sum(len(part.ops) for part in self.parts)

    @property
    def saved_bytes(self) -> int:
        """Bytes, of whole values, that are not kept between the passes."""
        return sum(part.saved_bytes for part in self.parts)


def made_by(program: Program) -> Mapping[int, int]:
    """For each tensor that an op makes the op's place."""
    return {t: i for i, op in enumerate(program.ops) for t in op.outputs}


def readers(program: Program) -> Mapping[int, list[int]]:
    """For each tensor the places of the ops that read it, in order."""
    found: dict[int, list[int]] = {}
    for i, op in enumerate(program.ops):
        for t in dict.fromkeys(op.tensors):
            found.setdefault(t, []).append(i)
    return found


def closure(program: Program, wanted: Sequence[int], kept: Callable[[int], bool]) -> tuple[list[int], frozenset[int]]:
    """(places of the ops that make these tensors, in order; the kept tensors that they read)."""
    maker = made_by(program)
    places: set[int] = set()
    inputs: set[int] = set()
    stack = list(wanted)
    while stack:
        t = stack.pop()
        if kept(t):
            inputs.add(t)
        elif maker[t] not in places:
            places.add(maker[t])
            stack.extend(program.ops[maker[t]].tensors)
    return sorted(places), frozenset(inputs)


def free(program: Program) -> frozenset[int]:
    """Tensors that depend on no input of the program: constants and what is made of them, random bits left out."""
    found = {t for t, _ in program.constants}
    for op in program.ops:
        keyed = any(program.tensors[t].dtype.startswith("key") for t in (*op.tensors, *op.outputs))
        if op.repeatable and not keyed and all(t in found for t in op.tensors):
            found.update(op.outputs)
    return frozenset(found)


def program_at(program: Program, where: Where) -> Program:
    """The body there."""
    for op_id, body in where:
        program = next(op for op in program.ops if op.id == op_id).bodies[body]
    return program


def inner(program: Program, where: Where = ()) -> Iterator[tuple[Where, Program]]:
    """The program and all bodies in which a forward and a backward pass may stand, innermost first.

    Not those of `jax.checkpoint`, nor of the backward pass itself.
    """
    for op in program.ops:
        if op.bodies and "differentiated" not in op.params and not op.backward:
            for b, body in enumerate(op.bodies):
                yield from inner(body, (*where, (op.id, b)))
    yield where, program
