"""The dependences of tasks and transfers: their own, and those that pipeline schedules add."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from shardplan.constants import CONSTANTS
from shardplan.dag.pipeline_orders import known_on
from shardplan.dag.pipeline_search import PipelineProblem, best_order
from shardplan.dag.pipelines import PassKind, Pipeline, Seconds
from shardplan.placement.device_topology import DeviceTopology
from shardplan.regions.tasks import Key, PlacedTaskGraph, Task, Transfer


class Waiting(NamedTuple):
    """A task or transfer with what it waits for, by number, and the devices that it keeps busy.

    Devices in the same groups always do the same, and share one number.
    """

    what: Task | Transfer
    seconds: float
    before: tuple[int, ...]
    devices: tuple[int, ...]


def waiting_tasks(graph: PlacedTaskGraph, machine: DeviceTopology) -> list[Waiting]:
    """The tasks and then the transfers of a step, each with what it waits for.

    A transfer within a node is a copy that runs beside compute. One between nodes, and so between processes, is a program on
    the devices of both groups (`shardplan.emit.crossings`): a rendezvous, which starts once both groups are free.
    """
    made: dict[tuple[int, Key], int] = {}
    for n, task in enumerate(graph.tasks):
        made.update(dict.fromkeys(((graph.pieces[task.piece].group, key) for key in task.makes), n))
    for n, transfer in enumerate(graph.transfers, len(graph.tasks)):
        made.setdefault((transfer.target, transfer.key), n)
    found: list[Waiting] = []
    alike = _alike(graph)
    for task in graph.tasks:
        piece = graph.pieces[task.piece]
        before = {made[piece.group, key] for key in task.reads if (piece.group, key) in made}
        found.append(Waiting(task, piece.seconds, tuple(sorted(before)), alike[piece.group]))
    for transfer in graph.transfers:
        at = transfer.source, transfer.key
        both = {*graph.groups[transfer.source].devices, *graph.groups[transfer.target].devices}
        within = len({d // machine.cluster.shape[-1] for d in both}) == 1
        devices = () if within else tuple(sorted({*alike[transfer.source], *alike[transfer.target]}))
        found.append(Waiting(transfer, transfer_s(graph, transfer, machine), (made[at],) if at in made else (), devices))
    return found


def _alike(graph: PlacedTaskGraph) -> list[tuple[int, ...]]:
    """The devices of each group; devices in the same groups share one number."""
    groups_of: dict[int, list[int]] = {}
    for n, group in enumerate(graph.groups):
        for d in group.devices:
            groups_of.setdefault(d, []).append(n)
    numbers: dict[tuple[int, ...], int] = {}
    for own in groups_of.values():
        numbers.setdefault(tuple(own), len(numbers))
    return [tuple(number for own, number in numbers.items() if n in own) for n in range(len(graph.groups))]


def transfer_s(graph: PlacedTaskGraph, transfer: Transfer, machine: DeviceTopology) -> float:
    """Seconds of a transfer: the devices of the smaller group move their shares at once, over the first pair's connection."""
    source, target = graph.groups[transfer.source].devices, graph.groups[transfer.target].devices
    a, b = next(((a, b) for a in source for b in target if a != b), (source[0], target[0]))
    if a == b:
        return 0.0
    nbytes = graph.tensors[transfer.key[0]].nbytes
    return float(machine.latency_s[a, b] + nbytes / min(len(source), len(target)) / machine.bytes_per_s[a, b])


# -- restrictions ------------------------------------------------------------------------------------------------------


def restricted(graph: PlacedTaskGraph, waiting: Sequence[Waiting]) -> Iterator[list[Waiting]]:
    """The same tasks with limits on the microbatches in flight, and in the orders of pipelines; none without microbatches.

    The limit of a chunk is ``slack`` times the number of chunks from it on (1F1B: Narayanan et al. 2021, section 2.2), the same
    number for all chunks (ZB-H1: Qi et al. 2023, section 2.3), or the smaller of both. Orders are those of the literature and,
    for each limit, the best found for the seconds of the chunks (`shardplan.dag.pipeline_search`).
    """
    chunks = chunks_of(graph)
    count = max((len(chunk.tasks) for chunk in chunks), default=0)
    if count < 2:
        return
    numbers = _numbers(count)
    limits = [tuple(min(slack * (len(chunks) - place), count) for place in range(len(chunks))) for slack in numbers]
    limits += [(most,) * len(chunks) for most in numbers if most < count]
    limits += [tuple(min(most, n) for n in limits[0]) for most in numbers if most < limits[0][0]]
    for most in dict.fromkeys(limits):
        yield _limited(chunks, waiting, most)
    groups = sorted({chunk.group for chunk in chunks})
    device = tuple(groups.index(chunk.group) for chunk in chunks)
    for pipeline in known_on(device, count):
        yield _ordered(chunks, waiting, pipeline)
    each = len(device) // len(groups)
    for most in numbers if each == 1 else (len(device), each * count):
        wanted = PipelineProblem(device, tuple(chunk.seconds for chunk in chunks), count, most)
        pipeline, run = best_order(wanted)
        yield _ordered(chunks, waiting, pipeline)
        if run.makespan_s <= wanted.least_s * (1 + CONSTANTS.rounding):
            return  # no larger limit is of use


def _numbers(count: int) -> list[int]:
    """Numbers up to ``count``, each larger than the one before by a fifth, or by one.

    >>> _numbers(16)
    [1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 16]
    """
    found = [1]
    while found[-1] < count:
        found.append(min(count, max(found[-1] + 1, math.ceil(found[-1] * 1.2))))
    return found


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of layers on its group: its tasks by microbatch, in the order of their pieces, the kinds of the pieces by task, and
    the seconds of a microbatch.
    """

    group: int
    tasks: Mapping[int, list[int]]
    kinds: Mapping[int, PassKind]
    seconds: Seconds


def chunks_of(graph: PlacedTaskGraph) -> list[Chunk]:
    """The chunks of a pipeline."""
    runs: dict[tuple[int, int], dict[int, list[int]]] = {}
    for n, task in enumerate(graph.tasks):
        piece = graph.pieces[task.piece]
        if piece.kind is not None:
            runs.setdefault((piece.chunk, piece.group), {}).setdefault(task.microbatch, []).append(n)
    found: list[Chunk] = []
    for (_, group), own in sorted(runs.items()):
        kinds: dict[int, PassKind] = {}
        for tasks in own.values():
            kinds |= {n: kind for n in tasks if (kind := graph.pieces[graph.tasks[n].piece].kind) is not None}
        took: dict[PassKind, float] = {"forward": 0.0, "backward": 0.0, "weight": 0.0, "both": 0.0}
        for n in next(iter(own.values())):
            took[kinds[n]] += graph.pieces[graph.tasks[n].piece].seconds
        seconds = Seconds(took["forward"], took["backward"] + took["both"], took["weight"])
        found.append(Chunk(group, own, kinds, seconds))
    return found


def _limited(chunks: Sequence[Chunk], waiting: Sequence[Waiting], most: Sequence[int]) -> list[Waiting]:
    """The tasks with at most ``most`` [chunks] microbatches in flight: a forward pass waits for the end of an earlier one."""
    found = list(waiting)
    for chunk, limit in zip(chunks, most, strict=True):
        for k, tasks in chunk.tasks.items():
            for n in tasks if k >= limit else ():
                if chunk.kinds[n] == "forward":
                    found[n] = _after(found[n], chunk.tasks[k - limit][-1])
    return found


_RUN_AT: Mapping[PassKind, tuple[PassKind, ...]] = {
    "forward": ("forward",),
    "backward": ("backward", "both"),
    "weight": ("weight",),
    "both": ("backward", "both", "weight"),
}
"""The kinds of pieces that run at each kind of task of a pipeline."""


def _ordered(chunks: Sequence[Chunk], waiting: Sequence[Waiting], pipeline: Pipeline) -> list[Waiting]:
    """The tasks of each group wait for each other in the order of a pipeline."""
    found = list(waiting)
    for order in pipeline.orders:
        own = [
            n
            for work in order
            for n in chunks[work.chunk].tasks[work.microbatch]
            if chunks[work.chunk].kinds[n] in _RUN_AT[work.kind]
        ]
        for a, b in pairwise(own):
            found[b] = _after(found[b], a)
    return found


def _after(waiting: Waiting, task: int) -> Waiting:
    return waiting._replace(before=(*waiting.before, task))


# -- list schedules ----------------------------------------------------------------------------------------------------


def started(tasks: Sequence[Waiting]) -> list[tuple[Waiting, float]]:
    """The tasks in the order in which they are issued, with their starts."""
    after: list[list[int]] = [[] for _ in tasks]
    for n, task in enumerate(tasks):
        for m in task.before:
            after[m].append(n)
    tails = _tails(tasks, after)
    waiting = [len(t.before) for t in tasks]
    ready_s = [0.0] * len(tasks)  # when all that it waits for has ended
    free_s: dict[int, float] = {}
    queues = {t.devices: _Queue([], []) for t in tasks}
    for n, count in enumerate(waiting):
        if not count:
            heappush(queues[tasks[n].devices].coming, (0.0, -tails[n], n))
    found: list[tuple[Waiting, float]] = []
    while choices := [
        first for devices, q in queues.items() if (first := q.first(max((free_s.get(d, 0.0) for d in devices), default=0.0)))
    ]:
        start, _, n = _first(choices, tasks)
        queues[tasks[n].devices].pop()
        end = start + tasks[n].seconds
        found.append((tasks[n], start))
        free_s.update(dict.fromkeys(tasks[n].devices, end))
        for m in after[n]:
            waiting[m] -= 1
            ready_s[m] = max(ready_s[m], end)
            if not waiting[m]:
                heappush(queues[tasks[m].devices].coming, (ready_s[m], -tails[m], m))
    assert len(found) == len(tasks), "what waits for itself never runs"
    return found


def _first(choices: Sequence[tuple[float, float, int]], tasks: Sequence[Waiting]) -> tuple[float, float, int]:
    """The task to issue, among the (start, -tail, number) of those that are next on their devices.

    It is the one that starts first, unless a transfer needs one of its devices and the longest path to the end is shorter if
    the device waits for that transfer: otherwise a rendezvous, for which all of its devices wait, is overtaken again and again.
    """
    first = min(choices)
    best, best_s = first, math.inf
    own = tasks[first[2]]
    for other in choices:
        start, tail, n = other
        if n == first[2] or not isinstance(tasks[n].what, Transfer) or not set(own.devices) & set(tasks[n].devices):
            continue
        after = max(first[0] + own.seconds, start) - tail
        before = start + tasks[n].seconds - first[1]
        if before < max(after, first[0] - first[1]) and before < best_s:
            best, best_s = other, before
    return best


@dataclass(frozen=True, slots=True)
class _Queue:
    """Tasks that wait only for their devices, as heaps of (ready, -tail, number); ``there`` are the ready ones, with 0."""

    coming: list[tuple[float, float, int]]
    there: list[tuple[float, float, int]]

    def first(self, free_s: float) -> tuple[float, float, int] | None:
        """(start, -tail, number) of the next task, if its devices are free from ``free_s`` on."""
        while self.coming and self.coming[0][0] <= free_s:
            heappush(self.there, (0.0, *heappop(self.coming)[1:]))
        if self.there:
            return free_s, *self.there[0][1:]
        return self.coming[0] if self.coming else None

    def pop(self) -> None:
        """Removes the next task."""
        heappop(self.there or self.coming)


def _tails(tasks: Sequence[Waiting], after: Sequence[Sequence[int]]) -> list[float]:
    """[tasks]: the seconds from the start of a task to the end of the step, along the longest path."""
    waiting = [len(own) for own in after]
    tails = [t.seconds for t in tasks]
    ends = [n for n, count in enumerate(waiting) if not count]
    while ends:
        n = ends.pop()
        for m in tasks[n].before:
            tails[m] = max(tails[m], tasks[m].seconds + tails[n])
            waiting[m] -= 1
            if not waiting[m]:
                ends.append(m)
    return tails
