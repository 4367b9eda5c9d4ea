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
class ArrayPart(Generic[D]):
    """A part of an array that goes from one device to another, or stays where both are the same."""

    source: D
    target: D
    box: Box


def pieces(
    held: Sequence[tuple[D, Box]], wanted: Sequence[tuple[D, Box]], near: Collection[D]
) -> tuple[tuple[ArrayPart[D], ...], ...]:
    """The pieces of each wanted block, in row-major order; none if the held blocks do not cover it.

    A piece comes from its target if that holds it, else from a device of ``near``, else from any device. Devices that hold the
    same piece take turns.

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

    result: list[tuple[ArrayPart[D], ...]] = []
    for n, (target, wanted_box) in enumerate(wanted):
        own: list[ArrayPart[D]] = []
        for box, part in parts_of(wanted_box):
            sources = chosen[box]
            own.append(ArrayPart(target if target in holders[box] else sources[n % len(sources)], target, part))
        result.append(tuple(own))
    return tuple(result)


def size_of(box: Box) -> int:
    """The number of elements of a block."""
    return math.prod(b - a for a, b in box)


def in_rounds(parts: Sequence[ArrayPart[D]]) -> tuple[tuple[ArrayPart[D], ...], ...]:
    """The pieces in rounds. In a round all have one shape, and no device sends or receives two: it is one permute.

    >>> columns, rows = [(n, ((0, 2), (n, n + 1))) for n in (0, 1)], [(n, ((n, n + 1), (0, 2))) for n in (0, 1)]
    >>> parts = [p for own in pieces(columns, rows, ()) for p in own]
    >>> [[(p.source, p.target) for p in turn] for turn in in_rounds(parts)]
    [[(0, 0), (1, 1)], [(1, 0), (0, 1)]]
    """
    rounds: list[list[ArrayPart[D]]] = []
    for part in parts:
        for turn in rounds:
            if all(shape_of(p.box) == shape_of(part.box) and p.source != part.source and p.target != part.target for p in turn):
                turn.append(part)
                break
        else:
            rounds.append([part])
    return tuple(map(tuple, rounds))


def shape_of(box: Box) -> tuple[int, ...]:
    """The shape of a block."""
    return tuple(b - a for a, b in box)


def box_of(index: Sequence[slice] | None, shape: Sequence[int]) -> Box:
    """The block of an array of this shape that JAX names by slices, without the last slices, those of a key's words."""
    return tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=False))
