"""A placed step as segments: ops that one group runs as one program, without waiting for another group in between.

The *level* of an op counts the transfers between groups on the longest path to it. Ops of one group and level form a segment.
An op that no other group waits for moves to the level of its first reader, so that its result is not held for long. Where a
group runs several chunks of layers, each is cut as if it were a group of its own. A segment is cut once more: first the ops
that other groups wait for, then the rest (the gradients of weights, in a pipeline: the two halves of the backward pass of
zero-bubble schedules, Qi et al. 2023, section 2). Ops that only add up values of the first part belong to it, so that these
values are not held until the rest runs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from shardplan.ir import Op
from shardplan.regions.assignment import Assignment


@dataclass(frozen=True, slots=True)
class Segment:
    """Ops of a chunk of a group, by id, in the order of the step. ``awaited``: other groups or chunks wait for its results."""

    group: int
    chunk: int
    level: int
    awaited: bool
    ops: tuple[int, ...]


def segments_of(assignment: Assignment, totals: Collection[int] = (), products: Collection[int] = ()) -> tuple[Segment, ...]:
    """The segments in an order in which each comes after those that it waits for. ``totals`` are tensors that add up terms;
    ``products`` are ops that multiply, by id.
    """
    ops = [op for op in assignment.program.ops if op.id in assignment.of]
    levels = _sunk(assignment, ops, _earliest(assignment, ops))
    awaited = _awaited(assignment, ops, levels)
    cut = {(levels[i], assignment.chunk_of[i]) for i in awaited}  # segments of two parts
    rest = [op for op in ops if op.id not in awaited and (levels[op.id], assignment.chunk_of[op.id]) in cut]
    awaited |= _added_at_once(assignment, rest, levels, totals, products)
    members: dict[tuple[int, int, bool], list[int]] = {}
    for op in ops:
        members.setdefault((levels[op.id], assignment.chunk_of[op.id], op.id not in awaited), []).append(op.id)
    return tuple(
        Segment(assignment.of[own[0]], chunk, level, not rest, tuple(own))
        for (level, chunk, rest), own in sorted(members.items())
    )


def _earliest(assignment: Assignment, ops: list[Op]) -> dict[int, int]:
    """The transfers between chunks on the longest path to each op, from the first op that runs."""
    maker: dict[int, int] = {}
    levels: dict[int, int] = {}
    for op in ops:
        before = [(maker[t], assignment.is_foreign(t, op)) for t in op.tensors if t in maker]
        levels[op.id] = max((levels[p] + foreign for p, foreign in before), default=0)
        maker.update(dict.fromkeys(op.outputs, op.id))
    return levels


def _sunk(assignment: Assignment, ops: list[Op], earliest: dict[int, int]) -> dict[int, int]:
    """The levels after each op that only later segments of its own chunk read has moved to its first reader."""
    returned = assignment.program.returned
    levels = dict(earliest)
    reader: dict[int, int] = {}  # the lowest level of a reader in the own chunk, by tensor
    awaited: set[int] = set()  # tensors that another chunk reads
    for op in reversed(ops):
        readers = [reader[t] for t in op.outputs if t in reader]
        if readers and not op.acts and awaited.isdisjoint(op.outputs) and returned.isdisjoint(op.outputs):
            levels[op.id] = min(readers)
        for t in op.tensors:
            if assignment.is_foreign(t, op):
                awaited.add(t)
            else:
                reader[t] = min(reader.get(t, levels[op.id]), levels[op.id])
    return levels


def _awaited(assignment: Assignment, ops: list[Op], levels: dict[int, int]) -> frozenset[int]:
    """The ops of each segment that another chunk waits for."""
    awaited_at: dict[int, set[int]] = {}  # by tensor, the levels at which awaited ops of its own chunk read it
    foreign: set[int] = set()  # tensors that another chunk reads
    found: set[int] = set()
    for op in reversed(ops):
        level = levels[op.id]
        awaited = any(t in foreign or level in awaited_at.get(t, ()) for t in op.outputs)
        if awaited:
            found.add(op.id)
        for t in op.tensors:
            if assignment.is_foreign(t, op):
                foreign.add(t)
            elif awaited:
                awaited_at.setdefault(t, set()).add(level)
    return frozenset(found)


def _added_at_once(
    assignment: Assignment, ops: list[Op], levels: dict[int, int], totals: Collection[int], products: Collection[int]
) -> frozenset[int]:
    """Among the ops that no other group waits for, those that add values to ``totals`` without a product or a loop, and that
    need none of the remaining ops of their segment.
    """
    rest: dict[int, tuple[int, int]] = {}  # the segment of each tensor that the other ops make
    light: list[Op] = []
    for op in ops:
        at = levels[op.id], assignment.chunk_of[op.id]
        if op.bodies or op.id in products or any(rest.get(t) == at for t in op.tensors):
            rest.update(dict.fromkeys(op.outputs, at))
        else:
            light.append(op)
    wanted, found = set(totals), set[int]()
    for op in reversed(light):
        if not wanted.isdisjoint(op.outputs):
            found.add(op.id)
            wanted.update(op.tensors)
    return frozenset(found)
