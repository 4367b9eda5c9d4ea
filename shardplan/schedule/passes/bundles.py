"""Bundles: moves that take the same collectives over the same factors travel together, as one flat buffer (Tofu, section 6).

A bundle saves the latency of all moves but one. It waits for its last source, so values to be reduced are held a little longer,
and it brings gathered values a little earlier. So it takes only as many bytes as make its latency a small share of its time. For
the same reason less compute can hide it: moves travel together only if that gains more than it exposes.
"""

from __future__ import annotations

import functools
import heapq
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from shardplan.collectives.reshard import Resharder
from shardplan.collectives.step import BUNDLED, StepKind
from shardplan.constants import CONSTANTS
from shardplan.cost import Network
from shardplan.cost.overlap import SERIAL, Weights, weights_at
from shardplan.schedule.changes import DimChange
from shardplan.schedule.copies import Copies
from shardplan.schedule.instructions import Block, Bundle, Instruction, Move, results_of, with_blocks
from shardplan.schedule.movement_windows import BlockWindows
from shardplan.schedule.passes.prune import reads
from shardplan.schedule.planned import PlannedProgram


def bundled(block: Block, planned: PlannedProgram) -> Block:
    """A block, and the blocks in it, whose moves travel together where that costs less.

    If communication hides, a hideable second is priced as in a step that computes longer than it communicates.
    """
    network = planned.programs.resharder.network
    assert isinstance(network, Network), "schedules are priced in seconds"
    weights = weights_at(1.0, network.cluster.device.contention) if planned.overlaps else SERIAL
    return _Bundling(planned, weights).block(block)


class _Key(NamedTuple):
    """The properties that moves of one bundle share; ``over`` are the factors in the order of the blocks."""

    dtype: str
    kind: StepKind
    over: tuple[int, ...]
    program: str


@dataclass(frozen=True, slots=True)
class _Group:
    """Moves that travel together, from these ``places`` in their block.

    ``cost`` is the cost of their collective with the copies into one buffer and out of it, ``apart`` their cost one by one, each
    with the copies beside it. Copies never hide.
    """

    key: _Key
    members: tuple[Move, ...]
    places: tuple[int, ...]
    nbytes: float
    cost: float
    apart: float


class _Bundling:
    def __init__(self, planned: PlannedProgram, weights: Weights) -> None:
        self.planned, self.weights = planned, weights
        self.resharder: Resharder = planned.programs.resharder
        self.op_s = planned.op_seconds
        self.copies = Copies(planned)

    def block(self, block: Block) -> Block:
        """A block with its bundles."""
        instructions = tuple(with_blocks(i, self.block) for i in block.instructions)
        bundles = [self.bundle(group.members) for group in self.groups(replace(block, instructions=instructions))]
        return replace(block, instructions=tuple(_ordered(instructions, bundles)) if bundles else instructions)

    def groups(self, block: Block) -> list[_Group]:
        """Moves with one key, until they are full, in the order of the instructions. No two groups wait for each other."""
        after: dict[int, int] = {}  # by value the groups, as a mask, that it depends on
        current: dict[_Key, int] = {}  # the number of the group that takes the next move
        groups: list[_Group] = []
        waits: list[int] = []  # by group the groups, as a mask, that it waits for
        windows = BlockWindows(block, self.op_s)
        for n, instruction in enumerate(block.instructions):
            before = functools.reduce(operator.or_, (after.get(v, 0) for v in reads(instruction)), 0)
            key = self.key(instruction) if isinstance(instruction, Move) else None
            if key is not None and isinstance(instruction, Move):
                alone = self.alone(key, instruction, n, windows)
                if self.gains(alone, windows):
                    g, held = current.get(key), _all_before(before, waits)
                    together = None if g is None or held >> g & 1 else self.together(groups[g], alone, windows)
                    if g is None or together is None:
                        g = current[key] = len(groups)
                        groups.append(alone)
                        waits.append(held)
                    else:
                        groups[g] = together
                        waits = [w | held if k == g or w >> g & 1 else w for k, w in enumerate(waits)]
                    before |= 1 << g
            after.update((v, before) for v in results_of(instruction))
        return [group for group in groups if len(group.members) > 1 and group.cost < group.apart]

    def alone(self, key: _Key, move: Move, place: int, windows: BlockWindows) -> _Group:
        """A move as a group of one."""
        seconds = sum(step.seconds for step in move.steps)
        copied_s = sum(self.copies.ordering_s(move, step) for step in move.steps)
        apart = self.cost(seconds, [place], windows) + copied_s
        return self.packed(key, (move,), (place,), apart, windows)

    def gains(self, alone: _Group, windows: BlockWindows) -> bool:
        """Whether a move costs less as its part of a full bundle, with its copies into the buffer and out of it, than alone."""
        step = alone.members[0].steps[0]
        part_s = self.resharder.bundled_s(step.kind, tuple(sorted(step.over)), step.nbytes, math.inf)
        copied_s = self.copies.packing_s(self.bundle(alone.members)) - self.copies.device.launch_s
        return math.isfinite(part_s) and self.cost(part_s, alone.places, windows) + copied_s < alone.apart

    def packed(
        self, key: _Key, members: tuple[Move, ...], places: tuple[int, ...], apart: float, windows: BlockWindows
    ) -> _Group:
        """Moves as a group; ``apart`` is what they cost one by one."""
        bundle = self.bundle(members)
        cost = self.cost(bundle.step.seconds, places, windows) + self.copies.packing_s(bundle)
        return _Group(key, members, places, bundle.step.nbytes, cost, apart)

    def together(self, one: _Group, other: _Group, windows: BlockWindows) -> _Group | None:
        """A group with another move; None if it would be too large, or cost more than the packed group and the move alone."""
        if one.nbytes + other.nbytes > self.resharder.full_bytes(one.key.kind, tuple(sorted(one.key.over))):
            return None
        members, places = (*one.members, *other.members), (*one.places, *other.places)
        both = self.packed(one.key, members, places, one.apart + other.apart, windows)
        return both if both.cost <= (one.cost + other.apart) * (1 + CONSTANTS.rounding) else None

    def cost(self, seconds: float, places: Sequence[int], windows: BlockWindows) -> float:
        """The cost of a collective for the moves at these places: less than its seconds where it can hide."""
        if self.weights.hideable == 1.0:
            return seconds
        return float(self.weights.of(np.array(seconds), windows.of(places)))

    def key(self, move: Move) -> _Key | None:
        """The properties that moves of one bundle share; None for a move that travels alone."""
        if move.reducer != "sum" or move.extents != move.shape or 0 in move.shape or len(move.steps) != 1:
            return None  # moves with several steps split the buffer
        step = move.steps[0]
        if step.kind not in BUNDLED:
            return None
        change = DimChange.of(step)
        over = change.gained or change.lost or step.over  # in the order in which they split a dim, if they do
        return _Key(self.planned.graph.tensors[move.tensor].dtype, step.kind, over, step.program)

    def bundle(self, moves: Sequence[Move]) -> Bundle:
        """Moves as one instruction, by the program that is best for all of them together."""
        first, nbytes = moves[0].steps[0], sum(move.steps[0].nbytes for move in moves)
        program = self.resharder.program_for(first.kind, first.over, nbytes)
        seconds = self.resharder.seconds_with(first.kind, first.over, nbytes, program)
        return Bundle(tuple(moves), replace(first, nbytes=nbytes, seconds=seconds, program=program))


def _all_before(groups: int, waits: Sequence[int]) -> int:
    """These groups and all that they wait for, as a mask."""
    result = groups
    while groups:
        low = groups & -groups
        result |= waits[low.bit_length() - 1]
        groups ^= low
    return result


def _ordered(instructions: Sequence[Instruction], bundles: Sequence[Bundle]) -> list[Instruction]:
    """The instructions with bundles in place of their moves: each as soon as what it reads is there, the earliest first."""
    of = {move.result: bundle for bundle in bundles for move in bundle.moves}
    nodes: list[Instruction] = []
    for i in instructions:
        bundle = of.get(i.result) if isinstance(i, Move) else None
        if bundle is None:
            nodes.append(i)
        elif isinstance(i, Move) and i.result == bundle.moves[0].result:
            nodes.append(bundle)
    maker = {v: n for n, node in enumerate(nodes) for v in results_of(node)}
    needs = [{maker[v] for v in reads(node) if v in maker} for node in nodes]
    readers: list[list[int]] = [[] for _ in nodes]
    for n, before in enumerate(needs):
        for m in before:
            readers[m].append(n)
    waits = [len(before) for before in needs]
    ready = [n for n, count in enumerate(waits) if not count]
    heapq.heapify(ready)
    found: list[Instruction] = []
    while ready:
        n = heapq.heappop(ready)
        found.append(nodes[n])
        for m in readers[n]:
            waits[m] -= 1
            if not waits[m]:
                heapq.heappush(ready, m)
    assert len(found) == len(nodes), "no bundles wait for each other"
    return found
