"""The parts of a program that are recomputed, and helpers to find them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shardplan.ir import Program, Where

Policy = Literal["all", "light"]
"""Which ops are recomputed: all, or all except contractions, whose results are kept."""

IsHeavy = Callable[[Where, int], bool]
"""Whether the op with this id, in the program at this path, is a contraction."""


@dataclass(frozen=True, slots=True)
class RecomputedPart:
    """Ops that are recomputed together, in the program at ``where``.

    ``ops`` are their ids, in order. If they belong to the body of a scan, ``loop`` is (forward scan, backward scan), by their ids
    at ``where``; if they belong to the program at ``where`` itself, it is None. ``saved_bytes`` are the bytes, of whole values,
    that are no longer kept between the passes, over all iterations.
    """

    where: Where
    ops: tuple[int, ...]
    loop: tuple[int, int] | None
    saved_bytes: int


@dataclass(frozen=True, slots=True)
class Without:
    """The best plan without recomputation: seconds of a step, peak bytes of a device, and whether these fit."""

    step_time_s: float
    peak_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class Remat:
    """The parts that a plan recomputes in the backward pass; ``without`` is set if the search looked for that plan."""

    parts: tuple[RecomputedPart, ...] = ()
    policy: Policy = "all"
    without: Without | None = None
    note: str = ""

    @property
    def loops(self) -> int:
        """How many scans have bodies that are recomputed."""
        return sum(part.loop is not None for part in self.parts)

    @property
    def blocks(self) -> int:
        """How many blocks of straight-line code are recomputed."""
        return len(self.parts) - self.loops

    @property
    def operators(self) -> int:
        """How many ops are recomputed; those of a loop count once."""
        return sum(len(part.ops) for part in self.parts)

    @property
    def saved_bytes(self) -> int:
        """Bytes, of whole values, that are no longer kept between the passes."""
        return sum(part.saved_bytes for part in self.parts)


def made_by(program: Program) -> Mapping[int, int]:
    """The position of the op that computes each tensor."""
    return {t: i for i, op in enumerate(program.ops) for t in op.outputs}


def readers(program: Program) -> Mapping[int, list[int]]:
    """The positions of the ops that read each tensor, in order."""
    result: dict[int, list[int]] = {}
    for i, op in enumerate(program.ops):
        for t in dict.fromkeys(op.tensors):
            result.setdefault(t, []).append(i)
    return result


def closure(program: Program, wanted: Sequence[int], kept: Callable[[int], bool]) -> tuple[list[int], frozenset[int]]:
    """(positions of the ops that compute these tensors from kept ones, in order; the kept tensors that they read)."""
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
    """Tensors that depend on no input of the program: constants and values computed from them, random bits left out."""
    result = {t for t, _ in program.constants}
    for op in program.ops:
        keyed = any(program.tensors[t].dtype.startswith("key") for t in (*op.tensors, *op.outputs))
        if op.repeatable and not keyed and all(t in result for t in op.tensors):
            result.update(op.outputs)
    return frozenset(result)


def program_at(program: Program, where: Where) -> Program:
    """The body at this path."""
    for op_id, body in where:
        program = next(op for op in program.ops if op.id == op_id).bodies[body]
    return program


def changed_at(program: Program, where: Where, change: Callable[[Program], Program]) -> Program:
    """The program with its body at this path changed."""
    if not where:
        return change(program)
    (op_id, at), *rest = where
    ops = tuple(
        replace(op, bodies=tuple(changed_at(b, tuple(rest), change) if n == at else b for n, b in enumerate(op.bodies)))
        if op.id == op_id
        else op
        for op in program.ops
    )
    return replace(program, ops=ops)


def inner(program: Program, where: Where = ()) -> Iterator[tuple[Where, Program]]:
    """The program and all bodies that may hold a forward and a backward pass, innermost first.

    Bodies of `jax.checkpoint` and of backward ops are left out.
    """
    for op in program.ops:
        if op.bodies and "differentiated" not in op.params and not op.backward:
            for b, body in enumerate(op.bodies):
                yield from inner(body, (*where, (op.id, b)))
    yield where, program
