"""The time of a step in which communication hides behind compute.

A collective is *hideable* as far as there is compute that neither waits for it nor is waited for, and *exposed* for the rest.
While a device computes and communicates at once, each slows the other by the factor ``contention`` (Calculon, section 3.3;
Galvatron, section 3.4). With compute C, hideable communication H, exposed communication E and k = contention - 1, the shorter of
C and H runs beside the other, and costs k times its length::

    step = E + max(C + k H, H + k C)

A maximum of two linear functions: for every ``share`` s in [0, 1], E + s (C + k H) + (1 - s) (H + k C) is a lower bound on it,
and is itself a weighted sum of the same three figures. The search minimises such sums (`shardplan.search.strategy.overlap`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

_LEAST_WEIGHT = 0.02
"""The least weight of compute and of hideable communication: with none, plans would differ in what costs nothing."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What a second of compute and one of hideable communication cost in a search; one of exposed communication costs 1."""

    compute: float = 1.0
    hideable: float = 1.0

    def of(self, seconds: NDArray[np.float64], window_s: float) -> NDArray[np.float64]:
        """The cost of collectives of these seconds that can hide behind ``window_s`` seconds of compute."""
        if window_s == 0.0 or self.hideable == 1.0:
            return seconds
        if math.isinf(window_s):
            return self.hideable * seconds
        return seconds - (1 - self.hideable) * np.minimum(seconds, window_s)


SERIAL = Weights()
"""Nothing overlaps: the cost is a plain sum."""


NEARLY_SERIAL = Weights(1.0, 1.0 - 1e-9)
"""The weights of a sum for a step in which communication may hide."""


def weights_at(share: float, contention: float) -> Weights:
    """The weights of the lower bound on the step's time at a share of 0 (communication hides compute) to 1 (the reverse)."""
    k = slowdown(contention)
    compute, hideable = share + k * (1 - share), (1 - share) + k * share
    return Weights(max(compute, _LEAST_WEIGHT), max(hideable, _LEAST_WEIGHT))


def slowdown(contention: float) -> float:
    """What a second of overlap costs: contention - 1, at most 1, where nothing is gained by overlapping."""
    return min(contention - 1, 1.0)


def step_s(compute_s: float, exposed_s: float, hideable_s: float, contention: float) -> float:
    """The seconds of a step with these seconds of compute, of exposed and of hideable communication."""
    k = slowdown(contention)
    return exposed_s + max(compute_s + k * hideable_s, hideable_s + k * compute_s)


class PricedCollective(Protocol):
    """A collective with its price: what `StepCost` adds up."""

    @property
    def times(self) -> float:
        """Executions in one step."""
        ...

    @property
    def seconds(self) -> float:
        """Seconds of one execution."""
        ...

    @property
    def hideable_s(self) -> float:
        """The part of ``seconds`` that can hide behind compute."""
        ...

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends in one execution, in the ring convention."""
        ...


_C = TypeVar("_C", bound=PricedCollective)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost(Generic[_C]):
    """The cost of one step on one device: seconds of compute, and the collectives ``issued`` with their prices.

    ``contention`` is the device's, as in `step_s`.
    """

    issued: tuple[_C, ...]
    compute_s: float
    contention: float = 1.0

    @property
    def communication_s(self) -> float:
        """Seconds of all collectives."""
        return sum(i.seconds * i.times for i in self.issued)

    @property
    def hideable_s(self) -> float:
        """Seconds of communication that can hide behind compute."""
        return sum(i.hideable_s * i.times for i in self.issued)

    @property
    def exposed_s(self) -> float:
        """Seconds of communication that cannot hide behind compute."""
        return self.communication_s - self.hideable_s

    @property
    def step_time_s(self) -> float:
        """Seconds of the step."""
        return step_s(self.compute_s, self.exposed_s, self.hideable_s, self.contention)

    @property
    def communication_bytes(self) -> float:
        """Bytes that the device sends, in the ring convention."""
        return sum(i.wire_bytes * i.times for i in self.issued)


class Concurrency:
    """Which tasks of a program can run beside the movement of a value.

    ``waits_for[i]`` are tasks before i in the program's order, ``work[i]`` the seconds of task i, and ``heavy[i]`` says whether
    it is a stage of the program (a product, a loop). Rows of bits say what each task waits for: n * n / 8 bytes in all.
    """

    def __init__(self, waits_for: Sequence[Sequence[int]], work: Sequence[float], heavy: Sequence[bool]) -> None:
        n = len(work)
        follows: list[list[int]] = [[] for _ in range(n)]
        for i, before in enumerate(waits_for):
            for j in before:
                follows[j].append(i)
        self._work = np.asarray(work, np.float64)
        busy = np.flatnonzero(self._work > 0)
        self._column = np.searchsorted(busy, np.arange(n + 1))  # [n + 1]: the first busy task from each task on
        self._weight = self._work[busy]
        self._until = np.concatenate([[0.0], np.cumsum(self._weight)])
        own = np.zeros((n, -(-len(busy) // 8)), np.uint8)
        at = np.arange(len(busy))
        own[busy, at // 8] = (128 >> (at % 8)).astype(np.uint8)
        self._before = _reached(waits_for, own, range(n))
        self._after = _reached(follows, own, range(n - 1, -1, -1))
        self._last_heavy = _nearest(waits_for, heavy, range(n), -1, max)
        self._next_heavy = _nearest(follows, heavy, range(n - 1, -1, -1), n, min)
        self._heavy = heavy

    def window(self, makers: Sequence[int], readers: Sequence[int]) -> float:
        """The seconds of the tasks that a movement from its makers to its readers (both may be none) can hide behind.

        They are those that neither the makers wait for nor wait for a reader, from the last heavy task before the makers to the
        first heavy one at or after a reader: a scheduler looks no further, since what lies beyond serves other movements.
        """
        n = len(self._work)
        first = min((self._last_heavy[i] for i in makers), default=-1) + 1
        last = min((i + 1 if self._heavy[i] else self._next_heavy[i] for i in readers), default=n)
        last = max(last, first, *(i + 1 for i in makers), 0)
        low, high = int(self._column[first]), int(self._column[last])
        if low == high:
            return 0.0
        begin, end = low // 8, -(-high // 8)
        taken = np.zeros(end - begin, np.uint8)
        for i in makers:
            taken |= self._before[i, begin:end]
        for i in readers:
            taken |= self._after[i, begin:end]
        bits = np.unpackbits(taken)[low - begin * 8 : high - begin * 8]
        own = [int(self._column[i]) for i in (*makers, *readers) if self._work[i] > 0]
        bits[[i - low for i in own if low <= i < high]] = 1
        return float(max(0.0, self._until[high] - self._until[low] - bits @ self._weight[low:high]))


def _reached(neighbours: Sequence[Sequence[int]], own: NDArray[np.uint8], order: range) -> NDArray[np.uint8]:
    """[n, bytes]: the tasks that each reaches through its neighbours, which come before it in this order, as bits."""
    rows = np.zeros_like(own)
    for i in order:
        row = rows[i]
        for j in neighbours[i]:
            row |= rows[j]
            row |= own[j]
    return rows


def _nearest(
    neighbours: Sequence[Sequence[int]],
    heavy: Sequence[bool],
    order: range,
    none: int,
    nearer: Callable[[int, int], int],
) -> list[int]:
    """[n]: the nearest heavy task that each reaches through its neighbours; ``none`` where there is none."""
    result = [none] * len(heavy)
    for i in order:
        for j in neighbours[i]:
            result[i] = nearer(result[i], j if heavy[j] else result[j])
    return result
