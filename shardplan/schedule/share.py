"""Equal instructions are run once: the same op on the same values, the same value brought into the same layout.

A compiler would find them as well, and what is predicted must be what is sent. Barriers keep apart what a plan wants made twice;
two barriers before the same values are one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np

from shardplan.ir import Constant
from shardplan.schedule.instructions import (
    Barrier,
    Block,
    Bundle,
    Compute,
    Cond,
    Fill,
    Instruction,
    Move,
    Reblock,
    Scan,
    Source,
    While,
    results_of,
)


def shared(block: Block) -> Block:
    """A block, and the blocks in it, each without what it has made before."""
    return _Sharing({}).block(block)


class _Sharing:
    def __init__(self, same: dict[int, int]) -> None:
        self.same = same  # by value the earlier one that equals it

    def block(self, block: Block) -> Block:
        """A block in which equal instructions are one."""
        known: dict[tuple[object, ...], tuple[int, ...]] = {}
        kept: list[Instruction] = []
        for before in block.instructions:
            instruction = self.renamed(before)
            if isinstance(instruction, Compute) and _hands_on(instruction):
                self.same[instruction.results[0]] = cast(int, instruction.inputs[0])
                continue
            key = _key(instruction)
            if key is not None:
                if key in known:
                    self.same.update(zip(results_of(instruction), known[key], strict=True))
                    continue
                known[key] = results_of(instruction)
            kept.append(instruction)
        return Block(block.parameters, tuple(kept), tuple(self.source(s) for s in block.results))

    def source(self, source: Source) -> Source:
        """A value by its first name."""
        return source if isinstance(source, Constant) else self.same.get(source, source)

    def number(self, value: int) -> int:
        """A value by its first name."""
        return self.same.get(value, value)

    def renamed(self, instruction: Instruction) -> Instruction:
        """An instruction on values by their first names."""
        sources = lambda own: tuple(self.source(s) for s in own)  # noqa: E731
        match instruction:
            case Compute():
                inputs = sources(instruction.inputs)
                return instruction if inputs == instruction.inputs else replace(instruction, inputs=inputs)
            case Move():
                extreme = None if instruction.extreme is None else self.number(instruction.extreme)
                return replace(instruction, source=self.number(instruction.source), extreme=extreme)
            case Bundle():
                raise AssertionError("moves are bundled last")
            case Reblock():
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


def _hands_on(compute: Compute) -> bool:
    """Whether an op says where its operand lies and no more: that operand was moved there."""
    taken = {slot for c in compute.cuts for slot in c.whole}
    return compute.node.signature.constraint is not None and isinstance(compute.inputs[0], int) and not taken


def _key(instruction: Instruction) -> tuple[object, ...] | None:
    """What equal instructions have in common; None for one that is never shared."""
    match instruction:
        case Compute():
            if not instruction.node.op.repeatable:
                return None
            return "compute", instruction.node.signature.id, tuple(map(_plain, instruction.inputs)), instruction.cuts
        case Move():
            return "move", instruction.source, instruction.before, instruction.after, instruction.reducer, instruction.extreme
        case Fill(value=Constant() as value):
            return "fill", _plain(value)
        case Barrier():
            return "barrier", instruction.values
        case _:
            return None


def _plain(source: Source) -> object:
    """A value by its number, a literal by its type and content; random keys are equal only to themselves."""
    if not isinstance(source, Constant):
        return source
    if source.dtype.startswith("key"):
        return source.dtype, id(source.value)
    array = np.asarray(source.value)
    return source.dtype, array.shape, array.tobytes()
