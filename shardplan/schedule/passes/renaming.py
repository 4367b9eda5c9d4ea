"""Instructions with other names for the values that they read."""

from __future__ import annotations

from dataclasses import replace

from shardplan.ir import Constant
from shardplan.schedule.instructions import (
    Barrier,
    Block,
    Bundle,
    Compute,
    Cond,
    Fill,
    HostCopy,
    Instruction,
    Move,
    Reblock,
    Scan,
    Source,
    While,
)


class Renaming:
    """Blocks in which some values are read under another name: ``same`` gives it."""

    def __init__(self) -> None:
        self.same: dict[int, int] = {}

    def block(self, block: Block) -> Block:
        """The block, and the blocks in it, renamed."""
        instructions = tuple(self.renamed(i) for i in block.instructions)
        return Block(block.parameters, instructions, tuple(self.source(s) for s in block.results))

    def source(self, source: Source) -> Source:
        """A value by its new name."""
        return source if isinstance(source, Constant) else self.same.get(source, source)

    def number(self, value: int) -> int:
        """A value by its new name."""
        return self.same.get(value, value)

    def renamed(self, instruction: Instruction) -> Instruction:
        """An instruction on values by their new names."""
        sources = lambda own: tuple([self.source(s) for s in own])  # noqa: E731
        match instruction:
            case Compute():
                inputs = sources(instruction.inputs)
                return instruction if inputs == instruction.inputs else replace(instruction, inputs=inputs)
            case Move():
                source, extreme = self.number(instruction.source), instruction.extreme
                extreme = None if extreme is None else self.number(extreme)
                same = (source, extreme) == (instruction.source, instruction.extreme)
                return instruction if same else replace(instruction, source=source, extreme=extreme)
            case Bundle():
                return replace(instruction, moves=tuple(replace(m, source=self.number(m.source)) for m in instruction.moves))
            case Reblock() | HostCopy():
                return replace(instruction, source=self.number(instruction.source))
            case Fill():
                return instruction
            case Barrier():
                return replace(instruction, values=tuple(self.number(v) for v in instruction.values))
            case Scan():
                start, stacked = sources(instruction.start), sources(instruction.stacked)
                return replace(instruction, start=start, stacked=stacked, body=self.block(instruction.body))
            case While():
                test, body = self.block(instruction.test), self.block(instruction.body)
                return replace(instruction, start=sources(instruction.start), test=test, body=body)
            case Cond():
                branches = tuple(self.block(b) for b in instruction.branches)
                index = None if instruction.index is None else self.source(instruction.index)
                return replace(instruction, index=index, arguments=sources(instruction.arguments), branches=branches)
