"""The change that a step of a resharding makes to the dims of a tensor, and to its buffer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from shardplan.collectives.step import Step
from shardplan.ir import Collective
from shardplan.schedule.instructions import Block, Instruction, Move, numbers_of, with_blocks


@dataclass(frozen=True, slots=True)
class DimChange:
    """Dim ``shorter`` loses its minormost factors ``lost``, dim ``longer`` gains ``gained`` as its minormost ones; -1 for none.

    The buffer counts as the dim behind the last.
    """

    shorter: int
    lost: tuple[int, ...]
    longer: int
    gained: tuple[int, ...]

    @classmethod
    def of(cls, step: Step) -> DimChange:
        """The change that a step makes; a permute makes none."""
        rank = max(len(step.before.dims), len(step.after.dims))
        before, after = (list(layout.dims) + [()] * (rank - len(layout.dims)) for layout in (step.before, step.after))
        shorter = next((d for d in range(rank) if len(after[d]) < len(before[d])), -1)
        longer = next((d for d in range(rank) if len(after[d]) > len(before[d])), -1)
        lost = before[shorter][len(after[shorter]) :] if shorter >= 0 else ()
        gained = after[longer][len(before[longer]) :] if longer >= 0 else ()
        return cls(shorter, lost, longer, gained)


def in_single_steps(block: Block) -> Block:
    """A block, and the blocks in it, with its moves as `single_steps`."""
    new = itertools.count(1 + max(numbers_of(block), default=0)).__next__

    def apart(inner: Block) -> Block:
        instructions: list[Instruction] = []
        for i in inner.instructions:
            instructions += single_steps(i, new) if isinstance(i, Move) else [with_blocks(i, apart)]
        return replace(inner, instructions=tuple(instructions))

    return apart(block)


def single_steps(move: Move, new: Callable[[], int]) -> Iterator[Move]:
    """A move for each step, so that moves that begin alike share them; steps on a split buffer stay together."""
    source, before, start = move.source, move.before, 0
    for n, step in enumerate(move.steps, 1):
        if len(step.after.dims) > len(move.shape):
            continue
        last = n == len(move.steps)
        result, after = (move.result, move.after) if last else (new(), step.after)
        extreme = None if start else move.extreme
        yield replace(move, source=source, result=result, before=before, after=after, steps=move.steps[start:n], extreme=extreme)
        source, before, start = result, after, n


def splits_buffer(step: Step, move: Move) -> bool:
    """Whether a step splits the tensor's buffer."""
    return step.kind == Collective.REDUCE_SCATTER and DimChange.of(step).longer == len(move.shape)


def later_splits(move: Move, start: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(dim, factors) of the splits of dims that follow step ``start`` until the buffer is whole again."""
    for step in move.steps[start + 1 :]:
        change = DimChange.of(step)
        if step.kind in (Collective.SLICE, Collective.REDUCE_SCATTER):
            yield change.longer, change.gained
        if len(step.after.dims) == len(move.shape):
            return
