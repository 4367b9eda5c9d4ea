"""Barriers that later values wait at: their readers come after them, and so do moves that nobody reads before.

The builder moves a value at once. A barrier that waits for the value, as it is before it is moved, must neither wait for the
collective nor be without readers: a compiler drops what a barrier hands to nobody, and then the barrier does not wait for it.
"""

from __future__ import annotations

from dataclasses import replace

from shardplan.schedule.instructions import Barrier, Block, Instruction, Move
from shardplan.schedule.prune import reads
from shardplan.schedule.renaming import Renaming


def waited(block: Block) -> Block:
    """A block in which all that is later than a barrier reads its late values behind it."""
    return _Waiting().block(block)


class _Waiting(Renaming):
    def block(self, block: Block) -> Block:
        """A block with its readers after their barriers."""
        if not any(isinstance(i, Barrier) and i.late for i in block.instructions):
            return super().block(block)
        sunk = _sunk(block)
        after: dict[int, list[Instruction]] = {}
        for place, barrier in sunk.items():
            after.setdefault(barrier, []).append(block.instructions[place])
        kept: list[Instruction] = []
        for place, before in enumerate(block.instructions):
            if place in sunk:
                continue
            instruction = self.renamed(before)
            if isinstance(instruction, Barrier) and isinstance(before, Barrier) and before.late:
                self.same |= dict(zip(before.values[-before.late :], before.results[-before.late :], strict=True))
                kept.append(replace(instruction, late=0))
                kept += [self.renamed(move) for move in after.get(place, ())]
            else:
                kept.append(instruction)
        return Block(block.parameters, tuple(kept), tuple(self.source(s) for s in block.results))


def _sunk(block: Block) -> dict[int, int]:
    """By place of a move: the place of the barrier that it comes after, which waits for the value that it moves."""
    needed = _needed(block)
    origin: dict[int, int] = {}
    barriers: dict[int, list[int]] = {}
    for place, i in enumerate(block.instructions):
        if isinstance(i, Barrier) and i.late:
            for v in i.values[-i.late :]:
                barriers.setdefault(v, []).append(place)
        elif isinstance(i, Move) and i.extreme is None:
            origin[i.result] = origin.get(i.source, i.source)
    result: dict[int, int] = {}
    for place, i in enumerate(block.instructions):
        if isinstance(i, Move) and i.extreme is None:
            at = next((b for b in barriers.get(origin[i.result], ()) if b > place), None)
            if at is not None and needed.get(i.result, place) > at:
                result[place] = at
    return result


def _needed(block: Block) -> dict[int, int]:
    """By value: the place of the first instruction that reads it, or anything that is only moved from it."""
    result = {s: len(block.instructions) for s in block.results if isinstance(s, int)}
    for place, i in reversed(list(enumerate(block.instructions))):
        at = result.get(i.result, len(block.instructions)) if isinstance(i, Move) and i.extreme is None else place
        result |= {v: min(at, result.get(v, at)) for v in reads(i)}
    return result
