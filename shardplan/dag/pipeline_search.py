"""The order of a pipeline's tasks, found for its seconds and its memory: FD-DPS with given devices and a limit on what they hold.

The starts are the schedules of the literature that keep the limit, their backward passes split, and list schedules. Each start is
shortened as FD-DPS shortens a schedule (`critical`): tasks on the longest path move to better slots of their device, where the
microbatches in flight stay within the limit. So the result is never longer than a schedule of the literature that keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from shardplan.constants import CONSTANTS

from .critical import shorten
from .graph import Dag
from .memory import Room
from .pipeline_orders import known_on
from .pipelines import PassKind, Pipeline, PipelineRun, PipelineTask, Seconds, folded, held_change, looped, needs, run
from .schedules import Orders
from .validation import checked

KINDS: tuple[PassKind, ...] = ("forward", "backward", "weight")

PREFERENCES: tuple[tuple[PassKind, PassKind, PassKind], ...] = (
    ("backward", "forward", "weight"),
    ("forward", "backward", "weight"),
    ("backward", "weight", "forward"),
)
"""The kinds that a list schedule prefers, best first: as 1F1B, GPipe, and where memory is short."""


@dataclass(frozen=True, slots=True)
class PipelineProblem:
    """A question: the device and the seconds of each chunk, the microbatches, how many of them a device may have in flight, each
    counted for each of its chunks (at least its chunks), and the seconds of a transfer between devices.
    """

    device: tuple[int, ...]  # [chunks]
    seconds: tuple[Seconds, ...]  # [chunks]
    microbatches: int
    most: int
    send_s: float = 0.0

    @property
    def least_s(self) -> float:
        """No pipeline is shorter: a device waits for its first task, works, and others work on after its last backward pass."""
        found = 0.0
        for d in set(self.device):
            own = [chunk for chunk, at in enumerate(self.device) if at == d]
            busy = self.microbatches * sum(sum(self.seconds[chunk]) for chunk in own)
            earlier = self.seconds[: own[0]]
            sends = self.send_s * sum(a != b for a, b in pairwise(self.device[: own[0] + 1]))
            found = max(found, sum(s.forward for s in earlier) + sends + busy)
        return found

    def runs(self, pipeline: Pipeline) -> PipelineRun:
        """When the tasks of a pipeline run."""
        return run(pipeline, self.seconds, self.send_s)


def best_pipeline(halves: Sequence[Seconds], microbatches: int, most: int, send_s: float = 0.0) -> tuple[Pipeline, PipelineRun]:
    """The shortest pipeline found for layers in two parts for each device: looped, folded, or two consecutive ones a device.

    ``halves`` [2 devices] are the seconds of the parts in the order of the layers, and a device has at most ``most`` >= 2
    microbatches in flight, each counted for each part.
    """
    devices = len(halves) // 2
    whole = tuple(Seconds(*map(sum, zip(*pair, strict=True))) for pair in zip(halves[::2], halves[1::2], strict=True))
    questions = [
        PipelineProblem(folded(devices), tuple(halves), microbatches, most, send_s),
        PipelineProblem(looped(devices, 2), tuple(halves), microbatches, most, send_s),
        PipelineProblem(looped(devices, 1), whole, microbatches, most // 2, send_s),
    ]
    best: tuple[Pipeline, PipelineRun] | None = None
    for wanted in questions:
        if best is None or wanted.least_s < best[1].makespan_s * (1 - CONSTANTS.rounding):
            found = best_order(wanted)
            best = found if best is None or found[1].makespan_s < best[1].makespan_s else best
    assert best is not None
    return best


def best_order(wanted: PipelineProblem) -> tuple[Pipeline, PipelineRun]:
    """The shortest pipeline found for chunks on given devices."""
    found = _starts(wanted)
    best, least_s = found[0], wanted.least_s * (1 + CONSTANTS.rounding)
    tasks = _Tasks(wanted)
    for start, _ in found[: CONSTANTS.shortened_starts]:
        if best[1].makespan_s > least_s:
            other = tasks.shortened(start)
            best = min(best, (other, wanted.runs(other)), key=lambda pair: pair[1].makespan_s)
    return best


def shortest_start(wanted: PipelineProblem) -> float:
    """The seconds of the shortest pipeline from which `best_order` starts: an upper bound on those of its result."""
    return _starts(wanted)[0][1].makespan_s


def _starts(wanted: PipelineProblem) -> list[tuple[Pipeline, PipelineRun]]:
    """The schedules of the literature that keep the limit, and list schedules, the shortest first."""
    starts = [own for own in _known(wanted) if max(own.most_held) <= wanted.most]
    starts += _listed(wanted)
    return sorted(((own, wanted.runs(own)) for own in starts), key=lambda pair: pair[1].makespan_s)


def _known(wanted: PipelineProblem) -> Iterator[Pipeline]:
    """The schedules of the literature on these devices, with their backward passes split: none is longer for it."""
    for own in known_on(wanted.device, wanted.microbatches):
        yield Pipeline(own.name, own.device, tuple(tuple(_split(order)) for order in own.orders))


def _split(order: Sequence[PipelineTask]) -> Iterator[PipelineTask]:
    for work in order:
        if work.kind == "both":
            yield work._replace(kind="backward")
            yield work._replace(kind="weight")
        else:
            yield work


# -- list schedules ----------------------------------------------------------------------------------------------------


def _listed(wanted: PipelineProblem) -> Iterator[Pipeline]:
    several = len(set(wanted.device)) < len(wanted.device)
    for kinds in PREFERENCES:
        for late in (True, False) if several else (True,):

            def key(work: PipelineTask, kinds: Sequence[PassKind] = kinds, late: bool = late) -> tuple[int, ...]:
                return kinds.index(work.kind), -work.chunk if late else work.chunk, work.microbatch

            yield _list_schedule(wanted, key)


def _list_schedule(wanted: PipelineProblem, key: Callable[[PipelineTask], tuple[int, ...]]) -> Pipeline:
    """The task that can start first is next, of several the one of the smallest key. Each kind takes microbatches in turn.

    A forward pass leaves room for one microbatch in each later chunk of its device: those end without it, so none waits for ever.
    """
    device, chunks = wanted.device, len(wanted.device)
    later = [sum(device[c] == device[chunk] for c in range(chunk + 1, chunks)) for chunk in range(chunks)]
    next_of: dict[tuple[PassKind, int], int] = {(kind, chunk): 0 for kind in KINDS for chunk in range(chunks)}
    end_s: dict[PipelineTask, float] = {}
    free_s, held = [0.0] * (max(device) + 1), [0] * (max(device) + 1)
    orders: list[list[PipelineTask]] = [[] for _ in free_s]
    while next_of:
        choices: list[tuple[float, tuple[int, ...], PipelineTask]] = []
        for (kind, chunk), k in next_of.items():
            work, d = PipelineTask(kind, chunk, k), device[chunk]
            if kind == "forward" and held[d] + 1 + later[chunk] > wanted.most:
                continue
            needed = needs(work, chunks, ())
            if all(p in end_s for p in needed):
                ready = (end_s[p] + (wanted.send_s if device[p.chunk] != d else 0.0) for p in needed)
                choices.append((max([free_s[d], *ready]), key(work), work))
        start, _, work = min(choices)
        d = device[work.chunk]
        end_s[work] = free_s[d] = start + wanted.seconds[work.chunk].of(work.kind)
        held[d] += held_change(work)
        orders[d].append(work)
        next_of[work[:2]] += 1
        if work.microbatch + 1 == wanted.microbatches:
            del next_of[work[:2]]
    return Pipeline("list schedule", device, tuple(map(tuple, orders)))


# -- shorter ones ------------------------------------------------------------------------------------------------------


class _Tasks:
    """The tasks of a pipeline as a graph of `dag`."""

    def __init__(self, wanted: PipelineProblem) -> None:
        self.wanted, chunks = wanted, len(wanted.device)
        self.works = [
            PipelineTask(kind, chunk, k) for k in range(wanted.microbatches) for chunk in range(chunks) for kind in KINDS
        ]
        self.number = {work: n for n, work in enumerate(self.works)}
        times = [[wanted.seconds[w.chunk].of(w.kind)] * (max(wanted.device) + 1) for w in self.works]
        edges = {(self.number[p], n): wanted.send_s for n, w in enumerate(self.works) for p in needs(w, chunks, ())}
        self.dag = checked(times, edges)

    def shortened(self, start: Pipeline) -> Pipeline:
        """The same with critical tasks in better slots."""
        device = self.wanted.device
        orders = Orders(self.dag)
        for d, order in enumerate(start.orders):
            orders.sequences[d] = [self.number[w] for w in order]
        orders.device = [device[w.chunk] for w in self.works]
        shorten(
            orders,
            _InFlight(self.dag, device, self.works, self.wanted.most),
            trials_per_task=CONSTANTS.pipeline_effort / len(self.works) ** 2,
        )
        return Pipeline("ours", device, tuple(tuple(_in_turn(self.works[n] for n in row)) for row in orders.sequences))


def _in_turn(order: Iterable[PipelineTask]) -> Iterator[PipelineTask]:
    """The same order with the microbatches of each kind and chunk in turn. All take equally long, so nothing ends later."""
    done: dict[tuple[PassKind, int], int] = {}
    for work in order:
        k = done.get(work[:2], 0)
        done[work[:2]] = k + 1
        yield work._replace(microbatch=k)


class _InFlight(Room):
    """Room for microbatches in flight: ``most`` on each device, in any order of its tasks."""

    __slots__ = ("_changes", "_most")

    def __init__(self, dag: Dag, device: Sequence[int], works: Sequence[PipelineTask], most: int) -> None:
        super().__init__(dag, tuple(device[w.chunk] for w in works))
        self._changes = [held_change(w) for w in works]
        self._most = most

    def positions(self, task: int, row: Sequence[int], first: int, last: int) -> Iterator[int]:
        """The positions at which a task keeps the microbatches of a device in flight within the limit."""
        change = self._changes[task]
        held = list(accumulate((self._changes[i] for i in row), initial=0))  # before each position
        before = list(accumulate(held, max))
        after = list(accumulate(reversed(held), max))[::-1]
        for k in range(first, last + 1):
            if max(before[k], after[k] + change) <= self._most:
                yield k
