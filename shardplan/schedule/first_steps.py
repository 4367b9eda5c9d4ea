"""Moves of one value that begin alike make their first steps once: gathered over one axis, it may go two ways from there.

A compiler would find them equal as well, and what is predicted must be what is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardplan.schedule.changes import splits_buffer
from shardplan.schedule.instructions import Block, Cond, Instruction, Move, Scan, While, numbers_of


def with_first_steps_shared(body: Block) -> Block:
    """A block, and the blocks in it, in which moves have their first steps in common; padded extents are known."""
    return _Sharing(1 + max(numbers_of(body), default=0)).block(body)


class _Sharing:
    def __init__(self, count: int) -> None:
        self.count = count

    def block(self, block: Block) -> Block:
        """A block whose moves share what they can, as long as any can."""
        instructions = [self.inner(i) for i in block.instructions]
        while True:
            shared = list(self.pass_over(instructions))
            if shared == instructions:
                return replace(block, instructions=tuple(instructions))
            instructions = shared

    def inner(self, instruction: Instruction) -> Instruction:
        """An instruction with its bodies done."""
        match instruction:
            case Scan():
                return replace(instruction, body=self.block(instruction.body))
            case While():
                return replace(instruction, test=self.block(instruction.test), body=self.block(instruction.body))
            case Cond():
                return replace(instruction, branches=tuple(self.block(b) for b in instruction.branches))
            case _:
                return instruction

    def pass_over(self, instructions: list[Instruction]) -> Iterator[Instruction]:
        """The instructions, with one step taken off moves that share it. A move of that step alone makes it for all."""
        alike: dict[object, list[Move]] = {}
        for i in instructions:
            if isinstance(i, Move) and (key := _first_step(i)) is not None:
                alike.setdefault(key, []).append(i)
        made: dict[object, int] = {}
        for i in instructions:
            key = _first_step(i) if isinstance(i, Move) else None
            if not isinstance(i, Move) or key is None or len(alike[key]) < 2:
                yield i
                continue
            if key not in made:
                made[key] = self.named(alike[key])
                yield replace(i, result=made[key], after=i.steps[0].after, steps=i.steps[:1])
            if len(i.steps) > 1:
                yield replace(i, source=made[key], before=i.steps[0].after, steps=i.steps[1:])
            elif i.result != made[key]:
                yield i

    def named(self, moves: list[Move]) -> int:
        """The number of a step's result: that of the move that ends with it, else a new one."""
        self.count += 1
        return next((m.result for m in moves if len(m.steps) == 1), self.count - 1)


def _first_step(move: Move) -> object:
    """What moves that begin alike have in common; None for one that begins on its buffer."""
    if splits_buffer(move.steps[0], move):
        return None
    first = move.steps[0]
    return move.source, move.before, move.extents, move.reducer, move.extreme, first.kind, first.over, first.after, first.program
