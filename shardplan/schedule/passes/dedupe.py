"""Equal instructions are run once: the same op on the same values, the same value brought into the same layout.

A compiler would find them as well, and what is predicted must be what is sent. Barriers keep apart what a plan wants made twice;
two barriers before the same values are one.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from shardplan.ir import Constant
from shardplan.schedule.instructions import (
    Barrier,
    Block,
    Compute,
    Fill,
    Instruction,
    Move,
    Source,
    results_of,
)
from shardplan.schedule.passes.renaming import Renaming


def shared(block: Block) -> Block:
    """A block, and the blocks in it, each without what it has made before."""
    return _Sharing().block(block)


class _Sharing(Renaming):
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
