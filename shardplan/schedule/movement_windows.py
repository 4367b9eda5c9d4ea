"""The windows of a schedule: the compute that each movement can hide behind (`shardplan.cost.overlap`).

They follow from the instructions of the schedule, in the layouts of the plan. The body of a loop has windows of its own. Barriers
delay nothing: XLA removes them before it schedules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from shardplan.cost.overlap import Concurrency
from shardplan.schedule.instructions import (
    Barrier,
    Block,
    Bundle,
    Compute,
    Cond,
    Instruction,
    Move,
    Reblock,
    Scan,
    Schedule,
    While,
    blocks_of,
    results_of,
)
from shardplan.schedule.passes.prune import reads
from shardplan.schedule.planned import PlannedProgram


def windows(schedule: Schedule, planned: PlannedProgram) -> Mapping[int, float]:
    """The window of each move, bundle and reblock, by the number of its first result: seconds of compute in one execution."""
    result: dict[int, float] = {}
    op_s = planned.op_seconds
    left = [schedule.body]
    while left:
        block = left.pop()
        own = BlockWindows(block, op_s)
        left += [body for instruction in block.instructions for body in blocks_of(instruction)]
        for at, instruction in enumerate(block.instructions):
            if isinstance(instruction, Move | Bundle | Reblock):
                result[results_of(instruction)[0]] = own.of([at])
    return result


class BlockWindows:
    """The windows of one block, without those of its loops' bodies. ``op_s`` are `PlannedProgram.op_seconds`."""

    def __init__(self, block: Block, op_s: Sequence[float]) -> None:
        self._block, self._op_s = block, op_s
        self._of: dict[tuple[int, ...], float] = {}

    @cached_property
    def _read(self) -> tuple[Mapping[int, Sequence[int]], Sequence[Sequence[int]]]:
        """(by value the places of its readers, by place the places that it waits for)."""
        made: dict[int, int] = {}
        same: dict[int, int] = {}  # the value behind each result of a barrier
        readers: dict[int, list[int]] = {}
        waits_for: list[list[int]] = []
        for at, instruction in enumerate(self._block.instructions):
            sources: list[int] = []
            if isinstance(instruction, Barrier):
                same |= {r: same.get(v, v) for v, r in zip(instruction.values, instruction.results, strict=True)}
            else:
                sources = sorted({same.get(v, v) for v in reads(instruction)})
            for value in sources:
                readers.setdefault(value, []).append(at)
            waits_for.append(sorted({made[v] for v in sources if v in made}))
            made |= dict.fromkeys(results_of(instruction), at)
        return readers, waits_for

    @cached_property
    def _concurrency(self) -> Concurrency:
        instructions = self._block.instructions
        work = [_seconds(i, self._op_s) for i in instructions]
        heavy = [bool(blocks_of(i)) or (isinstance(i, Compute) and _is_product(i)) for i in instructions]
        return Concurrency(self._read[1], work, heavy)

    def of(self, places: Sequence[int]) -> float:
        """The window of the movements at these places if they travel together: seconds of compute in one execution."""
        key = tuple(places)
        if key not in self._of:
            self._of[key] = self._window(places)
        return self._of[key]

    def _window(self, places: Sequence[int]) -> float:
        readers, waits_for = self._read
        makers = {maker for at in places for maker in waits_for[at]}
        results = [value for at in places for value in results_of(self._block.instructions[at])]
        return self._concurrency.window(sorted(makers), sorted({r for value in results for r in readers.get(value, ())}))


def _seconds(instruction: Instruction, op_s: Sequence[float]) -> float:
    """The seconds of compute of one execution of an instruction, with all iterations of a loop."""

    def of(block: Block) -> float:
        return sum(_seconds(i, op_s) for i in block.instructions)

    match instruction:
        case Compute(node=node):
            return op_s[node.id]
        case Scan():
            return of(instruction.body) * float(instruction.op.params["length"])
        case While():
            return of(instruction.test) + of(instruction.body)
        case Cond():
            return max(map(of, instruction.branches), default=0.0)
        case _:
            return 0.0


def _is_product(compute: Compute) -> bool:
    return compute.node.signature.contracts
