"""Removes instructions without effects whose results reach no result of the step.

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
    HostCopy,
    Instruction,
    Move,
    Reblock,
    Scan,
    Source,
    While,
    blocks_of,
)

_T = TypeVar("_T")


def pruned(block: Block) -> Block:
    """A block without its dead instructions."""
    live = {s for s in block.results if isinstance(s, int)}
    instructions: list[Instruction] = []
    for instruction in reversed(block.instructions):
        left = _left(instruction, live)
        if left is not None:
            instructions.append(left)
            live |= reads(left)
    return replace(block, instructions=tuple(reversed(instructions)))


def _left(instruction: Instruction, live: set[int]) -> Instruction | None:
    """The rest of an instruction if only these of its results are read."""
    match instruction:
        case Compute():
            return instruction if instruction.once or not live.isdisjoint(instruction.results) else None
        case Move() | Reblock() | Fill():
            return instruction if instruction.result in live else None
        case Bundle():
            raise AssertionError("moves are bundled last")
        case Barrier():
            pairs = [(v, r) for v, r in zip(instruction.values, instruction.results, strict=True) if r in live]
            return Barrier(tuple(v for v, _ in pairs), tuple(r for _, r in pairs)) if pairs else None
        case Cond():
            return _cond(instruction, live)
        case Scan():
            return _scan(instruction, live)
        case While():
            return _while(instruction, live)


def _cond(cond: Cond, live: set[int]) -> Cond | None:
    """A conditional without the results that nobody reads, and the arguments that only those need."""
    kept = [r in live for r in cond.results]
    branches = [pruned(replace(b, results=_picked(b.results, kept))) for b in cond.branches]
    read = [any(b.parameters[n] in _needs(b) for b in branches) for n in range(len(cond.arguments))]
    branches = [replace(b, parameters=_picked(b.parameters, read)) for b in branches]
    results, arguments = _picked(cond.results, kept), _picked(cond.arguments, read)
    left = replace(cond, branches=tuple(branches), results=results, arguments=arguments)
    return left if any(kept) or any(map(_acts, branches)) else None


def _scan(scan: Scan, live: set[int]) -> Scan | None:
    """A scan without the values that feed only unread results; a carry is read if a live result needs it."""
    carry = len(scan.start)
    kept = [r in live for r in scan.results]
    while True:
        body = pruned(replace(scan.body, results=_picked(scan.body.results, kept)))
        needed = _needs(body)
        grown = [k or (n < carry and scan.body.parameters[n] in needed) for n, k in enumerate(kept)]
        if grown == kept:
            break
        kept = grown
    stacked = [p in needed for p in scan.body.parameters[carry:]]
    body = replace(body, parameters=_picked(body.parameters, [*kept[:carry], *stacked]))
    start, slices, results = _picked(scan.start, kept[:carry]), _picked(scan.stacked, stacked), _picked(scan.results, kept)
    left = replace(scan, start=start, stacked=slices, body=body, results=results)
    return left if any(kept) or _acts(body) else None


def _while(loop: While, live: set[int]) -> While | None:
    """A while loop without the carries that neither its test nor a live result needs."""
    test = pruned(loop.test)
    kept = [r in live or p in _needs(test) for r, p in zip(loop.results, test.parameters, strict=True)]
    while True:
        body = pruned(replace(loop.body, results=_picked(loop.body.results, kept)))
        needed = _needs(body)
        grown = [k or p in needed for k, p in zip(kept, body.parameters, strict=True)]
        if grown == kept:
            break
        kept = grown
    left = replace(
        loop,
        start=_picked(loop.start, kept),
        test=replace(test, parameters=_picked(test.parameters, kept)),
        body=replace(body, parameters=_picked(body.parameters, kept)),
        results=_picked(loop.results, kept),
        shapes=_picked(loop.shapes, kept) if loop.batched else (),
        layouts=_picked(loop.layouts, kept) if loop.batched else (),
    )
    return left if not live.isdisjoint(loop.results) or _acts(body) or _acts(test) else None


def _needs(block: Block) -> set[int]:
    """The values that a block reads: for its instructions, and for its results."""
    return {s for s in block.results if isinstance(s, int)} | {v for i in block.instructions for v in reads(i)}


def _picked(values: Sequence[_T], kept: Sequence[bool]) -> tuple[_T, ...]:
    return tuple(v for v, k in zip(values, kept, strict=True) if k)


def _acts(block: Block) -> bool:
    """Whether anything in a block has effects."""
    return any((isinstance(i, Compute) and i.once) or any(map(_acts, blocks_of(i))) for i in block.instructions)


def reads(instruction: Instruction) -> set[int]:
    """The values that an instruction reads, those that its bodies read from outside included."""
    if isinstance(instruction, Compute):  # nearly all are
        return {s for s in instruction.inputs if not isinstance(s, Constant)}
    sources: list[Source] = []
    match instruction:
        case Move():
            sources += [instruction.source, *([instruction.extreme] if instruction.extreme is not None else [])]
        case Bundle():
            sources += [move.source for move in instruction.moves]
        case Reblock() | HostCopy():
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
        found |= _needs(block)
    return found
