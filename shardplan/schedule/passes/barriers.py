"""Delays the readers of a value until after the barrier that waits for it, and those of its moves that nothing reads earlier.

The builder emits a move at once. The barrier must wait for the unmoved value, not for the collective. It also needs a reader of
that value: a compiler drops what a barrier hands to nobody, and then the barrier does not wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardplan.schedule.instructions import Barrier, Block, Compute, Instruction, Move
from shardplan.schedule.passes.prune import reads
from shardplan.schedule.passes.renaming import Renaming


def waited(block: Block) -> Block:
    """A block in which every instruction after a barrier reads the barrier's results instead of its late values."""
    return _Waiting().block(block)


class _Waiting(Renaming):
    def block(self, block: Block) -> Block:
        """A block with its readers after their barriers."""
        if not any(isinstance(i, Barrier) and i.late for i in block.instructions):
            return super().block(block)
        instructions, sunk = _sunk(block)
        outside = dict(self.same)
        after: dict[int, list[Instruction]] = {}
        for place, barrier in sunk.items():
            after.setdefault(barrier, []).append(instructions[place])
        kept: list[Instruction] = []
        for place, before in enumerate(instructions):
            if place in sunk:
                continue
            instruction = self.renamed(before)
            if isinstance(instruction, Barrier) and isinstance(before, Barrier) and before.late:
                self.same |= dict(zip(before.values[-before.late :], before.results[-before.late :], strict=True))
                kept.append(replace(instruction, late=0))
                kept += [self.renamed(step) for step in after.get(place, ())]
            else:
                kept.append(instruction)
        renamed = Block(block.parameters, tuple(kept), tuple(self.source(s) for s in block.results))
        self.same = outside  # names inside a body do not hold around it
        return renamed


def _sunk(block: Block) -> tuple[list[Instruction], dict[int, int]]:
    """(the instructions, with barriers that wait for unmoved values; the place of its barrier, by the place of a step)."""
    needed = _needed(block)
    steps: dict[int, tuple[int, int]] = {}  # by value that a step makes: (the value that it reads, its place)
    readers: dict[int, list[int]] = {}  # by value: the places of the steps that read it
    for place, i in enumerate(block.instructions):
        if (step := step_of(i)) is not None:
            steps[step[1]] = step[0], place
            readers.setdefault(step[0], []).append(place)
    instructions, sunk = list(block.instructions), dict[int, int]()

    def may_sink(value: int, place: int) -> bool:
        """Whether a value is made by a step that may come after the barrier at this place."""
        first = min((sunk[r] for r in readers.get(value, ()) if r in sunk), default=place)
        return value in steps and needed.get(value, place) > place and steps[value][1] not in sunk and first >= place

    for place, i in enumerate(block.instructions):
        if not isinstance(i, Barrier) or not i.late:
            continue
        origins: list[int] = []
        for v in i.values[-i.late :]:
            chain, path, moved = list[int](), [v], 0
            while may_sink(path[-1], place):
                before, at = steps[path[-1]]
                chain.append(at)
                path.append(before)
                moved = len(chain) if isinstance(block.instructions[at], Move) else moved
            origins.append(path[moved])
            sunk |= dict.fromkeys(chain[:moved], place)
            for value in path[:moved]:  # other values made of these wait with them: nothing reads them before
                sunk |= _after(value, place, readers, block)
        instructions[place] = replace(i, values=(*i.values[: -i.late], *origins))
    return instructions, dict(sorted(sunk.items()))


def _after(value: int, place: int, readers: Mapping[int, Sequence[int]], block: Block) -> dict[int, int]:
    """The steps before a place that read a value, or what they make of it."""
    result: dict[int, int] = {}
    for reader in readers.get(value, ()):
        step = step_of(block.instructions[reader])
        if reader < place and step is not None:
            result |= {reader: place, **_after(step[1], place, readers, block)}
    return result


def _needed(block: Block) -> dict[int, int]:
    """By value: the place of the first instruction that reads it, or that reads a value that steps make of it.

    Steps, and barriers that wait for the value, do not count.
    """
    end = len(block.instructions)
    result = {s: end for s in block.results if isinstance(s, int)}
    for place, i in reversed(list(enumerate(block.instructions))):
        step = step_of(i)
        at = place if step is None else result.get(step[1], end)
        read = i.values[: len(i.values) - i.late] if isinstance(i, Barrier) else reads(i)
        result |= {v: min(at, result.get(v, at)) for v in read}
    return result


def step_of(instruction: Instruction) -> tuple[int, int] | None:
    """(the value that goes in, the value that comes out) of a move, or of an op that only moves elements; None for others."""
    match instruction:
        case Move(extreme=None):
            return instruction.source, instruction.result
        case Compute(inputs=(int() as source,), results=(result,)) if instruction.node.signature.moves and not instruction.once:
            return source, result
        case _:
            return None
