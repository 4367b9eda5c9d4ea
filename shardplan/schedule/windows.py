"""The windows of a schedule: the compute that each movement can hide behind (`shardplan.cost.overlap`).

They follow from the instructions of the schedule, in the layouts of the plan. The body of a loop has windows of its own. Barriers
delay nothing: XLA removes them before it schedules.
"""

from __future__ import annotations

from collections.abc import Mapping

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
from shardplan.schedule.op_seconds import op_seconds
from shardplan.schedule.planned import PlannedProgram
from shardplan.schedule.prune import reads


def windows(schedule: Schedule, planned: PlannedProgram) -> Mapping[int, float]:
    """The window of each move, bundle and reblock, by the number of its first result: seconds of compute in one execution."""
    result: dict[int, float] = {}
    _Windows(planned, result).block(schedule.body)
    return result


class _Windows:
    def __init__(self, planned: PlannedProgram, result: dict[int, float]) -> None:
        self.op_seconds, self.result = op_seconds(planned), result

    def block(self, block: Block) -> float:
        """Adds the windows of a body, and returns its seconds of compute."""
        made: dict[int, int] = {}
        same: dict[int, int] = {}  # the value behind each result of a barrier
        read: dict[int, list[int]] = {}
        waits_for: list[list[int]] = []
        work: list[float] = []
        heavy: list[bool] = []
        for at, instruction in enumerate(block.instructions):
            sources: list[int] = []
            if isinstance(instruction, Barrier):
                same |= {r: same.get(v, v) for v, r in zip(instruction.values, instruction.results, strict=True)}
            else:
                sources = sorted({same.get(v, v) for v in reads(instruction)})
            for value in sources:
                read.setdefault(value, []).append(at)
            waits_for.append(sorted({made[v] for v in sources if v in made}))
            work.append(self.seconds(instruction))
            heavy.append(bool(blocks_of(instruction)) or (isinstance(instruction, Compute) and _is_product(instruction)))
            made |= dict.fromkeys(results_of(instruction), at)
        moving = [at for at, i in enumerate(block.instructions) if isinstance(i, Move | Bundle | Reblock)]
        if moving:
            concurrency = Concurrency(waits_for, work, heavy)
            for at in moving:
                results = results_of(block.instructions[at])
                readers = [reader for value in results for reader in read.get(value, ())]
                self.result[results[0]] = concurrency.window(waits_for[at], readers)
        return sum(work)

    def seconds(self, instruction: Instruction) -> float:
        """The seconds of compute of one execution of an instruction, with all iterations of a loop."""
        match instruction:
            case Compute(node=node):
                return self.op_seconds[node.id]
            case Scan():
                return self.block(instruction.body) * float(instruction.op.params["length"])
            case While():
                return self.block(instruction.test) + self.block(instruction.body)
            case Cond():
                return max(map(self.block, instruction.branches), default=0.0)
            case _:
                return 0.0


def _is_product(compute: Compute) -> bool:
    return compute.node.signature.contracts
