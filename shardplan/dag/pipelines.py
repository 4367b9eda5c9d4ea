"""A pipeline as a value: which device runs each chunk of the layers, in which order each device works, and when it does.

A chunk is a run of consecutive layers; with ``v`` chunks a device there are ``v`` times as many chunks as devices (the virtual
stages of Narayanan et al. 2021, section 2.2). Each chunk works on each microbatch: forward, then the gradients that the chunk
before waits for, then those of its weights (Qi et al. 2023, section 2), or both of them as one task.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

PassKind = Literal["forward", "backward", "weight", "both"]
"""The work of a task: ``backward`` is the gradients that the chunk before waits for, ``weight`` the gradients of weights,
``both`` all of them.
"""


class PipelineTask(NamedTuple):
    """A task of a pipeline: one chunk, one microbatch."""

    kind: PassKind
    chunk: int
    microbatch: int


class Seconds(NamedTuple):
    """The seconds of the tasks of a chunk; ``both`` takes the sum of the last two."""

    forward: float
    backward: float
    weight: float

    def of(self, kind: PassKind) -> float:
        """The seconds of a task of this kind."""
        return self.backward + self.weight if kind == "both" else self[("forward", "backward", "weight").index(kind)]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """An order of tasks for each device. ``name`` says where it comes from.

    ``paired`` are tasks that run at once with the one after them, so that the results of both are there when that one ends.
    """

    name: str
    device: tuple[int, ...]  # [chunks]
    orders: tuple[tuple[PipelineTask, ...], ...]  # [devices]
    paired: frozenset[PipelineTask] = frozenset()

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return len(self.device)

    @property
    def most_held(self) -> tuple[int, ...]:
        """[devices]: the most microbatches of a chunk that are in flight at once, counted for each chunk.

        A microbatch is in flight from the start of its forward pass to the end of the gradients of the weights. The memory of a
        device depends only on its order.
        """
        return tuple(max_held(order) for order in self.orders)


def max_held(order: Sequence[PipelineTask]) -> int:
    """The most microbatches in flight on a device that works in this order."""
    held = most = 0
    for work in order:
        held += held_change(work)
        most = max(most, held)
    return most


def held_change(work: PipelineTask) -> int:
    """The number that a task adds to the microbatches in flight on its device."""
    return {"forward": 1, "backward": 0, "weight": -1, "both": -1}[work.kind]


def looped(devices: int, each: int) -> tuple[int, ...]:
    """[chunks]: chunks that go round the devices, ``each`` on every one (Narayanan et al. 2021, section 2.2)."""
    return tuple(range(devices)) * each


def folded(devices: int) -> tuple[int, ...]:
    """[chunks]: two chunks a device, down the devices and up again, like a V (Qi et al. 2024, section 3)."""
    return (*range(devices), *reversed(range(devices)))


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """When the tasks of a pipeline start, on each device in its order, and when they end."""

    start_s: tuple[tuple[float, ...], ...]  # [devices][tasks]
    end_s: tuple[tuple[float, ...], ...]  # [devices][tasks]

    @property
    def makespan_s(self) -> float:
        """When the last task ends."""
        return max(ends[-1] for ends in self.end_s)

    @property
    def bubble_s(self) -> float:
        """The seconds that a device waits between its first and its last task, on the device that waits longest.

        So the papers count: a device that is done waits for no other to begin its optimizer (Qi et al. 2023, section 5.3).
        """
        return max(
            end[-1] - start[0] - sum(b - a for a, b in zip(start, end, strict=True))
            for start, end in zip(self.start_s, self.end_s, strict=True)
        )


def run(pipeline: Pipeline, seconds: Sequence[Seconds], send_s: float = 0.0) -> PipelineRun:
    """When each task starts, as early as the orders allow.

    ``seconds`` [chunks] are the seconds of the tasks, ``send_s`` those of a transfer between two devices, which work meanwhile.

    >>> order = (PipelineTask("forward", 0, 0), PipelineTask("both", 0, 0))
    >>> run(Pipeline("alone", (0,), (order,)), [Seconds(1.0, 1.0, 1.0)]).makespan_s
    3.0
    """
    tasks = {work for order in pipeline.orders for work in order}
    sent: dict[PipelineTask, float] = {}  # when the results of a task are on other devices
    starts: list[list[float]] = [[] for _ in pipeline.orders]
    ends: list[list[float]] = [[] for _ in pipeline.orders]
    moved = True
    while moved:
        moved = False
        for d, order in enumerate(pipeline.orders):
            while len(ends[d]) < len(order):
                work = order[len(ends[d])]
                needed = [p for p in needs(work, pipeline.chunks, tasks) if pipeline.device[p.chunk] != d]
                if any(p not in sent for p in needed):
                    break
                start = max([ends[d][-1] if ends[d] else 0.0, *(sent[p] for p in needed)])
                starts[d].append(start)
                ends[d].append(start + seconds[work.chunk].of(work.kind))
                moved = True
                own = [work] if work not in pipeline.paired else []
                own += [p for p in order[len(ends[d]) - 2 : len(ends[d]) - 1] if p in pipeline.paired]
                sent.update(dict.fromkeys(own, ends[d][-1] + send_s))
    assert sum(map(len, ends)) == len(tasks), f"the orders of {pipeline.name} wait for each other"
    return PipelineRun(tuple(map(tuple, starts)), tuple(map(tuple, ends)))


def needs(work: PipelineTask, chunks: int, tasks: Container[PipelineTask]) -> list[PipelineTask]:
    """The tasks of a pipeline that a task waits for."""
    kind, chunk, k = work
    if kind == "forward":
        return [PipelineTask("forward", chunk - 1, k)] if chunk else []
    if kind == "weight":
        return [PipelineTask("backward", chunk, k)]
    own = PipelineTask("forward", chunk, k)
    if chunk == chunks - 1:
        return [own]
    both = PipelineTask("both", chunk + 1, k)
    return [own, both if both in tasks else PipelineTask("backward", chunk + 1, k)]
