"""Bundles: moves that take the same collectives over the same factors travel together, as one flat buffer (Tofu, section 6).

A bundle saves the latency of all moves but one. It waits for its last source, so that what is reduced stays a little longer, and
it brings what is gathered a little earlier: so it takes no more bytes than make its latency a small share of its time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shardplan.collectives.reshard import Resharder
from shardplan.cost import Network
from shardplan.schedule.changes import Change
from shardplan.schedule.instructions import Block, Bundle, Cond, Hop, Instruction, Move, Scan, While, results_of
from shardplan.schedule.planned import PlannedProgram
from shardplan.schedule.prune import reads

LATENCY_SHARE = 0.1
"""A bundle is full when its latency is no more than this share of its time."""


def bundled(block: Block, planned: PlannedProgram) -> Block:
    """A block, and the blocks in it, whose moves travel together where that takes less time."""
    return _Bundling(planned).block(block)


_Key = tuple[str, tuple[Hop, ...]]
"""The dtype of moves, and their chain: the collective, factors and program of each step."""


@dataclass(slots=True)
class _Open:
    """Moves that wait to be sent together."""

    moves: list[Move] = field(default_factory=list[Move])
    nbytes: float = 0.0


class _Bundling:
    def __init__(self, planned: PlannedProgram) -> None:
        self.planned = planned
        self.resharder: Resharder = planned.programs.resharder
        self._full: dict[tuple[Hop, ...], float] = {}

    def block(self, block: Block) -> Block:
        """A block with its bundles."""
        instructions = [self.inside(i) for i in block.instructions]
        keys = [self.key(i) if isinstance(i, Move) else None for i in instructions]
        same: dict[_Key, list[int]] = {}
        for n, key in enumerate(keys):
            if key is not None:
                same.setdefault(key, []).append(n)
        one = _Block(self, instructions, {key: ns for key, ns in same.items() if len(ns) > 1}, keys)
        return replace(block, instructions=tuple(one.run()))

    def inside(self, instruction: Instruction) -> Instruction:
        """An instruction with bundles in its bodies."""
        match instruction:
            case Scan():
                return replace(instruction, body=self.block(instruction.body))
            case While():
                return replace(instruction, test=self.block(instruction.test), body=self.block(instruction.body))
            case Cond():
                return replace(instruction, branches=tuple(self.block(b) for b in instruction.branches))
            case _:
                return instruction

    def key(self, move: Move) -> _Key | None:
        """What moves that may travel together have in common; None for a move that travels alone."""
        if move.reducer != "sum" or move.extents != move.shape or 0 in move.shape:
            return None
        hops: list[Hop] = []
        for step in move.steps:
            change = Change.of(step)
            if change.longer >= len(move.shape) or change.shorter >= len(move.shape):
                return None  # the buffer is split
            match step.kind:
                case "slice":
                    continue
                case "all_reduce":
                    hops.append(Hop(step.kind, step.over, step.program))
                case "reduce_scatter":
                    hops.append(Hop(step.kind, change.gained, step.program))
                case "all_gather":
                    hops.append(Hop(step.kind, change.lost, step.program))
                case _:
                    return None
        return (self.planned.graph.tensors[move.tensor].dtype, tuple(hops)) if hops else None

    def nbytes(self, move: Move) -> float:
        """The most bytes of a device's operand in any step of a move, for a gather of its result."""
        return max(step.nbytes for step in move.steps)

    def seconds(self, bundle: Bundle) -> float:
        """The time of all hops of a bundle, and of the copies."""
        took = 0.0
        for n, hop in enumerate(bundle.hops):
            steps = bundle.steps(n)
            took += self.resharder.seconds_with(hop.kind, steps[0].over, sum(s.nbytes for s in steps), hop.program)
            took += copying_s(bundle, n, self.planned)
        return took

    def full(self, key: _Key) -> float:
        """The bytes at which a bundle has gained what it can."""
        hops = key[1]
        if hops not in self._full:
            wide = 2.0**40
            at_once = sum(self.resharder.seconds(h.kind, tuple(sorted(h.over)), 0.0) for h in hops)
            slope = sum(self.resharder.seconds(h.kind, tuple(sorted(h.over)), wide) for h in hops) / wide
            self._full[hops] = at_once / slope / LATENCY_SHARE if slope > 0 else math.inf
        return self._full[hops]


def copying_s(bundle: Bundle, hop: int, planned: PlannedProgram) -> float:
    """The seconds in which a device packs its blocks before a hop and unpacks them after it: each is read and written."""
    network = planned.programs.resharder.network
    assert isinstance(network, Network)
    copied = 4.0 * sum(step.nbytes for step in bundle.steps(hop))
    return copied / network.cluster.device.memory_bytes_per_s


class _Block:
    """Walks the instructions of one block; moves wait until one of their results is read or enough are there."""

    def __init__(
        self,
        bundling: _Bundling,
        instructions: Sequence[Instruction],
        same: dict[_Key, list[int]],
        keys: Sequence[_Key | None],
    ) -> None:
        self.bundling, self.instructions, self.same, self.keys = bundling, instructions, same, keys
        self.open: dict[_Key, _Open] = {}
        self.waiting: dict[int, _Key] = {}
        self.taken: set[int] = set()
        self.later: set[int] = {r for i in instructions for r in results_of(i)}
        self.out: list[Instruction] = []

    def run(self) -> list[Instruction]:
        """The instructions, with bundles in place of moves that travel together."""
        for n, instruction in enumerate(self.instructions):
            if n in self.taken:
                continue
            for key in sorted({self.waiting[v] for v in reads(instruction) if v in self.waiting}, key=self._first):
                self.send(key, n)
            key = self.keys[n]
            if key in self.same and isinstance(instruction, Move):
                assert key is not None
                self.add(key, n, instruction)
                if self.open[key].nbytes >= self.bundling.full(key):
                    self.send(key, n)
                continue
            self.out.append(instruction)
            self.later.difference_update(results_of(instruction))
        for key in list(self.open):
            self.send(key, len(self.instructions))
        return self.out

    def _first(self, key: _Key) -> int:
        return self.open[key].moves[0].result

    def add(self, key: _Key, n: int, move: Move) -> None:
        """Lets a move wait."""
        bundle = self.open.setdefault(key, _Open())
        bundle.moves.append(move)
        bundle.nbytes += self.bundling.nbytes(move)
        self.waiting[move.result] = key
        self.taken.add(n)

    def send(self, key: _Key, at: int) -> None:
        """Sends what waits, and with it later moves whose source is there already, until the bundle is full."""
        if key not in self.open:
            return
        full = self.bundling.full(key)
        for n in self.same[key]:
            move = self.instructions[n]
            assert isinstance(move, Move)
            if n > at and n not in self.taken and move.source not in self.later:
                if self.open[key].nbytes + self.bundling.nbytes(move) > full:
                    break
                self.add(key, n, move)
        bundle = self.open.pop(key)
        for move in bundle.moves:
            del self.waiting[move.result]
        self.out += self.parts(key, bundle.moves, full)
        self.later.difference_update(move.result for move in bundle.moves)

    def parts(self, key: _Key, moves: Sequence[Move], full: float) -> list[Instruction]:
        """Bundles that are not over-full; a move that fills one alone stays a move."""
        found: list[Instruction] = []
        own: list[Move] = []
        nbytes = 0.0
        for move in moves:
            more = self.bundling.nbytes(move)
            if own and nbytes + more > full:
                found += self.faster(key, own)
                own, nbytes = [], 0.0
            own.append(move)
            nbytes += more
        found += self.faster(key, own)
        return found

    def faster(self, key: _Key, moves: Sequence[Move]) -> list[Instruction]:
        """These moves as a bundle if that takes less time, its copies to and from the buffer included; else as they are."""
        bundle = self.bundle(key, moves)
        if not isinstance(bundle, Bundle):
            return [bundle]
        alone = sum(step.seconds for move in moves for step in move.steps)
        return [bundle] if self.bundling.seconds(bundle) < alone else [*moves]

    def bundle(self, key: _Key, moves: Sequence[Move]) -> Instruction:
        """Moves as one instruction, each collective by the program that is best for all of them together."""
        if len(moves) == 1:
            return moves[0]
        found = Bundle(tuple(moves), key[1])
        hops: list[Hop] = []
        for n, hop in enumerate(key[1]):
            steps = found.steps(n)
            program = self.bundling.resharder.program_for(hop.kind, steps[0].over, sum(s.nbytes for s in steps))
            hops.append(replace(hop, program=program))
        return replace(found, hops=tuple(hops))
