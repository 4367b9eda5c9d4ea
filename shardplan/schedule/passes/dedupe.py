"""Equal instructions are run once: the same op on the same values, the same value brought into the same layout.

A compiler would find them as well, and what is predicted must be what is sent. An op that adds or subtracts zeros (the mean of a
norm that has none) is dropped too: its result is its operand. Barriers keep instructions apart that a plan runs twice on
purpose; two barriers before the same values are one.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from shardplan.graph.equal_values import content
from shardplan.graph.nodes import Signature
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
from shardplan.tdl import linear_sets


def shared(block: Block) -> Block:
    """A block, and the blocks in it, each without what it has made before."""
    return _Sharing().block(block)


class _Sharing(Renaming):
    def block(self, block: Block) -> Block:
        """A block in which equal instructions are one."""
        known: dict[tuple[object, ...], tuple[int, ...]] = {}
        kept: list[Instruction] = []
        zeros: set[int] = set()
        for before in block.instructions:
            instruction = self.renamed(before)
            if _is_zero(instruction, zeros):
                zeros.update(results_of(instruction))
            if isinstance(instruction, Compute) and _hands_on(instruction, zeros):
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


def _hands_on(compute: Compute, zeros: set[int]) -> bool:
    """Whether an op's result is its first operand: it says where that lies and no more, or adds zeros to it."""
    signature, taken = compute.node.signature, {slot for c in compute.cuts for slot in c.whole}
    if not compute.inputs or not isinstance(compute.inputs[0], int) or 0 in taken:
        return False
    if signature.constraint is not None:
        return not taken
    return signature.kept_by_zero and _zero(compute.inputs[1], zeros)


def _is_zero(instruction: Instruction, zeros: set[int]) -> bool:
    """Whether an instruction makes nothing but zeros: it fills with them, or all that it reads are zeros."""
    match instruction:
        case Fill():
            return instruction.value is None or _zero(instruction.value, zeros)
        case Compute():
            operands = instruction.inputs
            return bool(operands) and all(_zero(o, zeros) for o in operands) and _is_linear(instruction.node.signature)
        case Move():
            return instruction.source in zeros
        case _:
            return False


def _is_linear(signature: Signature) -> bool:
    """Whether an op is linear in all of its operands together: zeros give zeros."""
    description = signature.description
    return description is not None and tuple(range(len(signature.call.operands))) in linear_sets(description)


def _zero(source: Source, zeros: set[int]) -> bool:
    if isinstance(source, Constant):
        return not source.dtype.startswith("key") and not np.any(np.asarray(source.value))
    return source in zeros


def _key(instruction: Instruction) -> tuple[object, ...] | None:
    """The key that equal instructions share; None for an instruction that is never shared."""
    match instruction:
        case Compute():
            if not instruction.node.op.repeatable:
                return None
            return "compute", instruction.node.signature.id, tuple(map(content, instruction.inputs)), instruction.cuts
        case Move():
            return "move", instruction.source, instruction.before, instruction.after, instruction.reducer, instruction.extreme
        case Fill(value=Constant() as value):
            return "fill", content(value)
        case Barrier():
            return "barrier", instruction.values
        case _:
            return None
