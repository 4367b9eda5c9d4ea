"""Sums of products are reduced in the order in which they are stored.

A gradient is a product, reduced and then transposed to lie as its weight does. A product writes its result in any order, so the
transpose costs nothing before the collectives. After them, it costs what it moves: a collective leaves its blocks in one order
(`shardplan.schedule.copies`), and the optimizer's update would read in one order and write in another, so not in place. Where
collectives split a dim and join it again, the pass takes the dim that copies least.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardplan.ir import Layout
from shardplan.schedule.copies import Copies
from shardplan.schedule.instructions import Block, Compute, Cut, Instruction, Move, results_of, with_blocks
from shardplan.schedule.passes.prune import reads
from shardplan.schedule.planned import PlannedProgram
from shardplan.tdl.index import loops_of


def transposed_first(block: Block, planned: PlannedProgram) -> Block:
    """A block, and the blocks in it, whose products are transposed before they are reduced, where that copies no more."""
    return _Transposing(planned).block(block)


@dataclass(frozen=True, slots=True)
class _Chain:
    """Moves in a row, by their places: each is the only reader of the one before. ``reader`` is the only reader of the last, if
    it has just one.
    """

    places: tuple[int, ...]
    moves: tuple[Move, ...]
    reader: int | None


class _Transposing:
    def __init__(self, planned: PlannedProgram) -> None:
        self.planned, self.copies = planned, Copies(planned)

    def block(self, block: Block) -> Block:
        """The block with its transposes in their new places."""
        instructions = [with_blocks(i, self.block) for i in block.instructions]
        maker = {v: i for i in instructions for v in results_of(i)}
        changed: dict[int, list[Instruction]] = {}
        for chain in _chains(instructions, block):
            source = maker.get(chain.moves[0].source)
            reader = None if chain.reader is None else instructions[chain.reader]
            new: list[Instruction] = [*self.led(chain.moves)]
            if isinstance(source, Compute) and source.node.signature.contracts and isinstance(reader, Compute):
                swapped = self.swapped(chain.moves, reader)
                if swapped is not None and chain.reader is not None:
                    new, changed[chain.reader] = swapped, []
            *before, last = new[: len(new) - len(chain.moves) + 1]
            changed[chain.places[0]] = [*before, last]
            changed |= {place: [move] for place, move in zip(chain.places[1:], new[len(before) + 1 :], strict=True)}
        return replace(block, instructions=tuple(i for n, old in enumerate(instructions) for i in changed.get(n, [old])))

    def swapped(self, moves: Sequence[Move], reader: Compute) -> list[Instruction] | None:
        """The transpose that reads the last move, then the moves; None if it is none, cannot be there, or the moves copy more."""
        signature, description = reader.node.signature, reader.node.signature.description
        if signature.part != "transpose" or description is None or any(move.extreme is not None for move in moves):
            return None
        ((_, indices),) = description.accesses
        own = [loops_of(ix) for ix in indices]
        order = [own.index(frozenset({loop})) for loop in description.results[0]]
        cuts = [
            Cut(loop, factors, math.prod(self.planned.sizes[f] for f in factors), extent=description.loops[loop].extent)
            for loop, d in zip(description.results[0], order, strict=True)
            if (factors := moves[0].before.dims[d])
        ]
        if any(signature.cut(c.loop, c.ways) is None for c in cuts):
            return None
        cuts.sort(key=lambda c: -c.loop)
        first = replace(reader, inputs=(moves[0].source,), results=(moves[-1].result,), cuts=tuple(cuts))
        names = [moves[-1].result, *(move.result for move in moves[:-1]), reader.results[0]]
        new = [
            replace(_laid(move, order), source=source, result=result, tensor=reader.node.outputs[0])
            for move, (source, result) in zip(moves, itertools.pairwise(names), strict=True)
        ]
        led = self.led(new)
        return None if self.copied_s(led) > self.copied_s(moves) else [first, *led]

    def led(self, moves: Sequence[Move]) -> Sequence[Move]:
        """The moves, which split and join again along the dim that copies least."""
        first, last = moves[0], moves[-1]
        layouts = [step.after for move in moves for step in move.steps][:-1]
        whole = [d for d in range(len(first.shape)) if not first.before.dims[d] and not last.after.dims[d]]
        for d in [d for d in whole if any(layout.dims[d] for layout in layouts)]:
            ways = math.lcm(*(math.prod(self.planned.sizes[f] for f in layout.dims[d]) for layout in layouts))
            for other in whole:
                if any(layout.dims[other] for layout in layouts) or first.shape[other] % ways:
                    continue
                order = list(range(len(first.shape)))
                order[d], order[other] = other, d
                new = [replace(_laid(move, order), shape=move.shape) for move in moves]
                moves = new if self.copied_s(new) < self.copied_s(moves) else moves
        return moves

    def copied_s(self, moves: Sequence[Move]) -> float:
        """The seconds of the copies beside the collectives of some moves."""
        return sum(self.copies.ordering_s(move, step) for move in moves for step in move.steps)


def _chains(instructions: Sequence[Instruction], block: Block) -> list[_Chain]:
    """The chains of moves in a block, each as long as it can be."""
    readers: dict[int, list[int]] = {}
    for n, instruction in enumerate(instructions):
        for v in reads(instruction):
            readers.setdefault(v, []).append(n)
    count = Counter({v: len(places) for v, places in readers.items()})
    count.update(s for s in block.results if isinstance(s, int))
    chains: list[_Chain] = []
    begun: set[int] = set()
    for n, move in enumerate(instructions):
        if not isinstance(move, Move) or n in begun:
            continue
        places, moves, reader = [n], [move], None
        while count[moves[-1].result] == 1 and moves[-1].result in readers:
            reader = readers[moves[-1].result][0]
            following = instructions[reader]
            if not isinstance(following, Move) or following.source != moves[-1].result:
                break
            places.append(reader)
            moves.append(following)
            reader = None
        begun.update(places)
        chains.append(_Chain(tuple(places), tuple(moves), reader if count[moves[0].source] == 1 else None))
    return chains


def _laid(move: Move, order: Sequence[int]) -> Move:
    """A move of the value whose dim i is dim ``order[i]``."""

    def laid(layout: Layout) -> Layout:
        return replace(layout, dims=(*(layout.dims[d] for d in order), *layout.dims[len(order) :]))

    steps = tuple(replace(step, before=laid(step.before), after=laid(step.after)) for step in move.steps)
    shape = tuple(move.shape[d] for d in order)
    return replace(move, shape=shape, before=laid(move.before), after=laid(move.after), steps=steps)
