"""The state of the builder inside one body of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardplan.ir import Layout, Op, Program, Tensor, Where
from shardplan.schedule.instructions import Instruction, Source
from shardplan.schedule.prefetch import Ties


@dataclass(frozen=True, slots=True)
class Later:
    """A value that depends on no input: made when it is read."""

    op: Op
    result: int


@dataclass(slots=True)
class Frame:
    """One body being spelled out into ``out``.

    ``copies`` are the resharded copies by number and tensor, ``free`` the values that depend on no input, by tensor and layout.
    ``moved`` says of each value and layout whether the backward pass has moved it there. ``waiting`` is what the
    function `waiting` returns for its program. ``ties`` are the barriers of ``out``.
    """

    where: Where
    ids: tuple[int, ...]
    out: list[Instruction]
    values: dict[int, Source | Later] = field(default_factory=dict[int, "Source | Later"])
    copies: dict[tuple[int | None, int], int] = field(default_factory=dict[tuple["int | None", int], int])
    moved: dict[tuple[int, Layout], bool] = field(default_factory=dict[tuple[int, Layout], bool])
    waiting: Mapping[int, Sequence[int]] = field(default_factory=dict[int, Sequence[int]])
    free: dict[tuple[int, Layout | None], Source] = field(default_factory=dict[tuple[int, "Layout | None"], Source])
    ties: Ties = field(default_factory=Ties)


def waiting(program: Program) -> dict[int, list[int]]:
    """For each op that computes values again: what the backward pass made since the one before it, and is still read later."""
    last = {t: i for i, op in enumerate(program.ops) for t in op.tensors} | dict.fromkeys(program.returned, len(program.ops))
    result: dict[int, list[int]] = {}
    since: list[int] = []
    for i, op in enumerate(program.ops):
        if op.again:
            result[op.id] = [t for t in since if last.get(t, -1) >= i]
            since = []
        since += op.outputs if op.backward else ()
    return result


def only_empty(op: Op, results: Sequence[Tensor]) -> bool:
    """Whether an op only makes arrays without elements."""
    return not op.acts and all(0 in t.shape and not t.dtype.startswith("key") for t in results)
