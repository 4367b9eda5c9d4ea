"""Leaving out what nobody reads: an instruction without effects whose results reach no result of the step.

A compiler would leave it out as well, and what is predicted must be what is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

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
    blocks_of,
)

_T = TypeVar("_T")


def pruned(block: Block, kept: Sequence[bool] | None = None) -> Block:
    """A block without its dead instructions; of its results those that are not ``kept`` may be anything."""
    live = {s for n, s in enumerate(block.results) if isinstance(s, int) and (kept is None or kept[n])}
    instructions: list[Instruction] = []
    for instruction in reversed(block.instructions):
        left = _left(instruction, live)
        if left is not None:
            instructions.append(left)
            live |= reads(left)
    return replace(block, instructions=tuple(reversed(instructions)))


def _left(instruction: Instruction, live: set[int]) -> Instruction | None:
    """What is left of an instruction of whose results these are read."""
    match instruction:
        case Compute():
            return instruction if instruction.once or not live.isdisjoint(instruction.results) else None
        case Move() | Reblock() | Fill():
            return instruction if instruction.result in live else None
        case Barrier():
            pairs = [(v, r) for v, r in zip(instruction.values, instruction.results, strict=True) if r in live]
            return Barrier(tuple(v for v, _ in pairs), tuple(r for _, r in pairs)) if pairs else None
        case Cond():
            kept = [r in live for r in instruction.results]
            picked = [replace(b, results=_picked(b.results, kept)) for b in instruction.branches]
            branches = tuple(map(pruned, picked))
            left = replace(instruction, branches=branches, results=_picked(instruction.results, kept))
            return left if any(kept) or any(map(_acts, branches)) else None
        case Scan():
            return _scan(instruction, live)
        case While():
            left = replace(instruction, body=pruned(instruction.body), test=pruned(instruction.test))
            return left if not live.isdisjoint(instruction.results) or _acts(left.body) or _acts(left.test) else None


def _scan(scan: Scan, live: set[int]) -> Scan | None:
    """A scan without what feeds only results that nobody reads; a carry is read where a live result needs it."""
    carry = len(scan.start)
    kept = [r in live for r in scan.results]
    while True:
        body = pruned(scan.body, kept)
        needed = {s for s, k in zip(body.results, kept, strict=True) if k and isinstance(s, int)}
        needed |= {v for i in body.instructions for v in reads(i)}
        grown = [k or (n < carry and scan.body.parameters[n] in needed) for n, k in enumerate(kept)]
        if grown == kept:
            break
        kept = grown
    # a carry that nobody reads stays as it is, a stack that nobody reads is not filled
    stacks = [n < carry or k for n, k in enumerate(kept)]
    handed = [s if k or n >= carry else scan.body.parameters[n] for n, (s, k) in enumerate(zip(body.results, kept, strict=True))]
    body = replace(body, results=_picked(handed, stacks))
    return replace(scan, body=body, results=_picked(scan.results, stacks)) if any(kept) or _acts(body) else None


def _picked(values: Sequence[_T], kept: Sequence[bool]) -> tuple[_T, ...]:
    return tuple(v for v, k in zip(values, kept, strict=True) if k)


def _acts(block: Block) -> bool:
    """Whether anything in a block has effects."""
    return any((isinstance(i, Compute) and i.once) or any(map(_acts, blocks_of(i))) for i in block.instructions)


def reads(instruction: Instruction) -> set[int]:
    """The values that an instruction reads, those that its bodies read from outside included."""
    sources: list[Source] = []
    match instruction:
        case Compute():
            sources += instruction.inputs
        case Move():
            sources += [instruction.source, *([instruction.extreme] if instruction.extreme is not None else [])]
        case Bundle():
            sources += [move.source for move in instruction.moves]
        case Reblock():
            sources.append(instruction.source)
        case Fill():
            pass
        case Barrier():
            sources += instruction.values
        case Scan():
            sources += [*instruction.start, *instruction.stacked]
        case While():
            sources += instruction.start
        case Cond():
            sources += [*instruction.arguments, *([] if instruction.index is None else [instruction.index])]
    found = {s for s in sources if not isinstance(s, Constant)}
    for block in blocks_of(instruction):
        found |= {v for i in block.instructions for v in reads(i)} | {s for s in block.results if isinstance(s, int)}
    return found
