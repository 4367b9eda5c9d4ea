"""Blocks of an array made of pieces of other blocks, which any devices hold."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar

D = TypeVar("D", bound=Hashable)
"""A device: itself, or its number."""

Box = tuple[tuple[int, int], ...]
"""A block of an array: (first, end) of each dim."""


@dataclass(frozen=True, slots=True)
class Piece(Generic[D]):
    """A part of an array that goes from one device to another, or stays where both are the same."""

    source: D
    target: D
    box: Box


def pieces(
    held: Sequence[tuple[D, Box]], wanted: Sequence[tuple[D, Box]], near: Collection[D]
) -> tuple[tuple[Piece[D], ...], ...]:
    """For each wanted block the pieces that it is made of, in row-major order; none where they do not make up the block.

    Every piece comes from its target itself where that holds it, else from a device of ``near``, else from any; the devices that
    hold the same take turns.

    >>> halves, quarters = [(0, ((0, 4),)), (1, ((4, 8),))], [(0, ((0, 2),)), (2, ((2, 6),))]
    >>> [[(p.source, p.box) for p in own] for own in pieces(halves, quarters, ())]
    [[(0, ((0, 2),))], [(0, ((2, 4),)), (1, ((4, 6),))]]
    """
    holders: dict[Box, list[D]] = {}
    for device, box in held:
        holders.setdefault(box, []).append(device)
    near = frozenset(near)
    chosen = {box: [d for d in own if d in near] or own for box, own in holders.items()}

    @cache
    def parts_of(wanted_box: Box) -> tuple[tuple[Box, Box], ...]:
        """(what is held, its part of the block), row-major."""
        if wanted_box in holders:
            return ((wanted_box, wanted_box),)
        common = ((box, tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, wanted_box, strict=True))) for box in holders)
        found = sorted(((box, part) for box, part in common if all(a < b for a, b in part)), key=lambda row: row[1])
        whole = sum(size_of(part) for _, part in found) == size_of(wanted_box)
        return tuple(found) if whole else ()

    result: list[tuple[Piece[D], ...]] = []
    for n, (target, wanted_box) in enumerate(wanted):
        own: list[Piece[D]] = []
        for box, part in parts_of(wanted_box):
            sources = chosen[box]
            own.append(Piece(target if target in holders[box] else sources[n % len(sources)], target, part))
        result.append(tuple(own))
    return tuple(result)


def size_of(box: Box) -> int:
    """The number of elements of a block."""
    return math.prod(b - a for a, b in box)
