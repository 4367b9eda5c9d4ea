"""The four synthesis hierarchies of a parallelism matrix (P2, section 3.4 and Table 1), and their programs on all devices.

(a) the system's levels, (b) the matrix column by column, (c) row by row, (d) only the rows that are reduced, where factors of
one level may be collapsed. A hierarchy is a list of entries, each a list of the matrix's factors (axis, level). Lowering turns
its groups into groups of devices of the whole system. The theorem is that (d) expresses every correct program of (c), (c) every
one of (b), and (b) every one of (a).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from shardplan.collectives.dsl import Instruction, Refusal, advance, groups, instructions
from shardplan.collectives.states import Context, P2Collective, StateSpace
from shardplan.mesh.matrix import Matrix

Letter = Literal["a", "b", "c", "d"]
Groups = tuple[tuple[int, ...], ...]
Lowered = tuple[tuple[P2Collective, Groups], ...]


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Entries under a root, each a tuple of (axis, level), and their sizes."""

    entries: tuple[tuple[tuple[int, int], ...], ...]
    sizes: tuple[int, ...]


def hierarchy(matrix: Matrix, letter: Letter, reduced: Sequence[int] = (), *, collapse: bool = False) -> Hierarchy:
    """One of the paper's hierarchies. ``reduced`` are the axes of (d); ``collapse`` joins its factors of the same level.

    >>> from shardplan.mesh.matrix import parse
    >>> m = parse("1 1 2 2 / 1 2 1 2")
    >>> [hierarchy(m, letter, [1]).sizes for letter in "bcd"]
    [(1, 1, 1, 2, 2, 1, 2, 2), (1, 1, 2, 2, 1, 2, 1, 2), (1, 2, 1, 2)]
    """
    axes, levels = range(len(matrix.rows)), range(len(matrix.shape))
    match letter:
        case "a":
            found = tuple(tuple((i, j) for i in axes) for j in levels)
        case "b":
            found = tuple(((i, j),) for j in levels for i in axes)
        case "c":
            found = tuple(((i, j),) for i in axes for j in levels)
        case "d" if collapse:
            found = tuple(tuple((i, j) for i in reduced) for j in levels)
        case "d":
            found = tuple(((i, j),) for i in reduced for j in levels)
    return Hierarchy(found, tuple(math.prod(matrix.rows[i][j] for i, j in entry) for entry in found))


def lowered_groups(matrix: Matrix, of: Hierarchy, step: Instruction) -> Groups:
    """An instruction's groups as devices of the whole system, repeated for each setting of the factors outside the hierarchy."""
    members = _members(matrix, of)
    return tuple(sorted(tuple(block[d] for d in group) for block in members for group in groups(of.sizes, step)))


def programs(matrix: Matrix, of: Hierarchy, reduced: Sequence[int], max_size: int) -> set[Lowered]:
    """Every correct program of a hierarchy for a reduction over these axes, as a sequence of lowered steps on all devices."""
    (cluster,) = _members(matrix, hierarchy(matrix, "a"))
    space = StateSpace(len(cluster))
    goal: list[int] = [0] * len(cluster)
    for block in _members(matrix, hierarchy(matrix, "d", reduced)):
        for device in block:
            goal[device] = space.column(sum(1 << d for d in block))
    moves: dict[tuple[P2Collective, Groups], None] = {}
    for step in _all_instructions(len(of.sizes)):
        if among := lowered_groups(matrix, of, step):
            moves[step.collective, among] = None
    walks = _walks(space, tuple(moves), space.initial(), tuple(goal), max_size, {})
    return {tuple((collective, _unordered(among)) for collective, among in walk) for walk in walks}


def _walks(
    space: StateSpace,
    moves: Sequence[tuple[P2Collective, Groups]],
    at: Context,
    goal: Context,
    steps_left: int,
    memo: dict[object, list[Lowered]],
) -> list[Lowered]:
    if at == goal:
        return [()]
    if steps_left == 0:
        return []
    if (at, steps_left) not in memo:
        found: list[Lowered] = []
        for move in moves:
            after = advance(space, *move, at)
            if not isinstance(after, Refusal):
                found += [(move, *tail) for tail in _walks(space, moves, after, goal, steps_left - 1, memo)]
        memo[at, steps_left] = found
    return memo[at, steps_left]


def _unordered(among: Groups) -> Groups:
    """Groups with their members sorted, as the order only numbers the chunks; the first member, the root, stays first."""
    return tuple(sorted((group[0], *sorted(group[1:])) for group in among))


def _all_instructions(depth: int) -> Iterator[Instruction]:
    """All instructions of a hierarchy; where some entries have size one, patterns can coincide."""
    yield from instructions(depth)


def _members(matrix: Matrix, of: Hierarchy) -> tuple[tuple[int, ...], ...]:
    """For each setting of the factors outside a hierarchy, the devices in the hierarchy's order."""
    shape = [row[j] for j in range(len(matrix.shape)) for row in matrix.rows]  # devices are numbered in the order of (b)
    place = {(i, j): j * len(matrix.rows) + i for j in range(len(matrix.shape)) for i in range(len(matrix.rows))}
    inside = [place[factor] for entry in of.entries for factor in entry]
    outside = [p for p in range(len(shape)) if p not in inside]
    result: list[tuple[int, ...]] = []
    for fixed in itertools.product(*(range(shape[p]) for p in outside)):
        block: list[int] = []
        for moving in itertools.product(*(range(shape[p]) for p in inside)):
            at = dict(zip(outside, fixed, strict=True)) | dict(zip(inside, moving, strict=True))
            device = 0
            for p, size in enumerate(shape):
                device = device * size + at[p]
            block.append(device)
        result.append(tuple(block))
    return tuple(result)
