"""What is known while a body of the step is spelled out."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardplan.ir import Layout, Op, Where
from shardplan.schedule.instructions import Instruction, Source


@dataclass(frozen=True, slots=True)
class Later:
    """A value that depends on no input: made when it is read."""

    op: Op
    result: int


@dataclass(slots=True)
class Frame:
    """One body being spelled out into ``out``.

    ``copies`` are the resharded copies by number and tensor, ``free`` the values that depend on no input, by tensor and layout.
    ``moved`` says of each value and layout whether the backward pass has moved it there.
    """

    where: Where
    ids: tuple[int, ...]
    out: list[Instruction]
    values: dict[int, Source | Later] = field(default_factory=dict[int, "Source | Later"])
    copies: dict[tuple[int | None, int], int] = field(default_factory=dict[tuple["int | None", int], int])
    moved: dict[tuple[int, Layout], bool] = field(default_factory=dict[tuple[int, Layout], bool])
    free: dict[tuple[int, Layout | None], Source] = field(default_factory=dict[tuple[int, "Layout | None"], Source])
