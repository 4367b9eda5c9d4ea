"""The time of a step in which communication hides behind compute.

The *window* of a collective is the compute that neither makes its operand nor waits for its result. The part of its seconds that
fits into the window is *hideable*, the rest is *exposed*. While a device computes and communicates at once, each slows the other
by the factor ``contention`` (Calculon, section 3.3; Galvatron, section 3.4), so that the shorter of compute C and hideable
communication H, beside the longer, lengthens the step by k = contention - 1 times its seconds. A compiled program hides only a
part of what can hide: ``saved_overlap``, on average. So one second of H saves ``saved_overlap (1 - k)`` seconds. With exposed
communication E::

    step = E + max(C + k' H, H + k' C),  k' = 1 - saved_overlap (1 - k)

This is a maximum of two linear functions. So for every ``share`` s in [0, 1], E + s (C + k H) + (1 - s) (H + k C) is a lower
bound on it, and is itself a weighted sum of C, H and E. The search minimises such sums (`shardplan.planning.multiplier`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardplan.constants import CONSTANTS


@dataclass(frozen=True, slots=True)
class Weights:
    """The cost of a second of compute and of one of hideable communication in a search; one of exposed communication costs 1."""

    compute: float = 1.0
    hideable: float = 1.0

    def of(self, seconds: NDArray[np.float64], window_s: float) -> NDArray[np.float64]:
        """The costs [...] of collectives of these ``seconds`` [...], each with a window of ``window_s`` seconds of compute."""
        if window_s == 0.0 or self.hideable == 1.0:
            return seconds
        if math.isinf(window_s):
            return self.hideable * seconds
        return seconds - (1 - self.hideable) * np.minimum(seconds, window_s)


SERIAL = Weights()
"""Nothing overlaps: the cost is a plain sum."""


def weights_at(share: float, contention: float) -> Weights:
    """The weights of the lower bound on a step at a ``share`` from 0 (communication hides compute) to 1 (the reverse).

    No weight is below ``least_weight``, so the sum may exceed the bound by that part of the compute or the communication.
    """
    k = slowdown(contention)
    compute, hideable = share + k * (1 - share), (1 - share) + k * share
    return Weights(max(compute, CONSTANTS.least_weight), max(hideable, CONSTANTS.least_weight))


def contended(contention: float) -> float:
    """k: by how many seconds one second of overlap lengthens the step. At 1, overlap gains nothing over taking turns."""
    return min(contention - 1, 1.0)


def slowdown(contention: float) -> float:
    """k': the seconds that one second of hideable communication adds to the step, since a program hides only a part of it."""
    return 1 - CONSTANTS.saved_overlap * (1 - contended(contention))


def step_s(compute_s: float, exposed_s: float, hideable_s: float, contention: float) -> float:
    """The seconds of a step, by the formula of this module, from its compute and its exposed and hideable communication."""
    k = slowdown(contention)
    return exposed_s + max(compute_s + k * hideable_s, hideable_s + k * compute_s)


class Window(NamedTuple):
    """The compute that a movement can hide behind, in ``seconds``.

    If nothing heavy comes before it ("early"), or nothing after it ("late"), it can wait for others and travel with them:
    ``company`` is the number of bytes of all such values that something heavy makes or reads; 0 for a movement that travels
    alone.
    """

    seconds: float = 0.0
    pool: Literal["", "early", "late"] = ""
    company: float = 0.0


POOLS = ("early", "late")
"""The pools: movements of one pool may travel together (`Window`)."""

NO_WINDOW = Window()
"""It hides behind nothing and travels alone."""


class Concurrency:
    """The windows of movements in a program of n tasks.

    ``waits_for[i]`` are the tasks that task i waits for, all before it in the program's order. ``work[i]`` are its seconds of
    compute, and ``heavy[i]`` says whether it is a stage of the program (a product, a loop). Memory: two bits for each pair of a
    task and a task with work.
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
        bits = np.full(n, -1)
        bits[busy] = np.arange(len(busy))
        self._before = _reached(waits_for, bits.tolist(), len(busy), range(n))
        self._after = _reached(follows, bits.tolist(), len(busy), range(n - 1, -1, -1))
        self._last_heavy = _nearest(waits_for, heavy, range(n), -1, max)
        self._next_heavy = _nearest(follows, heavy, range(n - 1, -1, -1), n, min)
        self._heavy = heavy

    def heavy_before(self, makers: Sequence[int]) -> bool:
        """Whether a heavy task is among the ``makers`` of a value, or comes before them."""
        return any(self._heavy[i] or self._last_heavy[i] >= 0 for i in makers)

    def heavy_after(self, readers: Sequence[int]) -> bool:
        """Whether a heavy task is among the ``readers`` of a value, or comes after them."""
        return any(self._heavy[i] or self._next_heavy[i] < len(self._work) for i in readers)

    def window(self, makers: Sequence[int], readers: Sequence[int]) -> float:
        """The seconds of compute beside which a value can move from its ``makers`` to its ``readers`` (tasks, or none).

        A task counts if no maker waits for it and it waits for no reader. It must lie between the last heavy task before the
        makers and the first heavy task at or after a reader: the compute beyond is left to other movements.
        """
        n = len(self._work)
        first = min((self._last_heavy[i] for i in makers), default=-1) + 1
        last = min((i + 1 if self._heavy[i] else self._next_heavy[i] for i in readers), default=n)
        last = max(last, first, *(i + 1 for i in makers), 0)
        low, high = int(self._column[first]), int(self._column[last])
        if low == high:
            return 0.0
        # what makers wait for lies before the last of them, and what waits for readers after the first of them
        made = min(high, int(self._column[max(makers) + 1])) if makers else low
        read = max(low, int(self._column[min(readers)])) if readers else high
        if made > read:
            taken_s = self._taken_s(makers, readers, low, high)
        else:
            taken_s = self._taken_s(makers, (), low, made) + self._taken_s((), readers, read, high)
        return float(max(0.0, self._until[high] - self._until[low] - taken_s))

    def _taken_s(self, makers: Sequence[int], readers: Sequence[int], low: int, high: int) -> float:
        """The seconds of these tasks, of what the makers wait for, and of what waits for the readers, among busy tasks."""
        if low >= high:
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
        return float(bits @ self._weight[low:high])


def _reached(neighbours: Sequence[Sequence[int]], bits: Sequence[int], count: int, order: range) -> NDArray[np.uint8]:
    """[n, bytes]: the tasks that each task reaches through its neighbours, which come before it in ``order``, as ``count`` bits.

    ``bits[i]`` is the bit of task i (-1: it has none).
    """
    rows = np.zeros((len(bits), -(-count // 8)), np.uint8)
    for i in order:
        row = rows[i]
        for n, j in enumerate(neighbours[i]):
            if n:
                row |= rows[j]
            else:
                row[:] = rows[j]
            at = bits[j]
            if at >= 0:
                row[at >> 3] |= 128 >> (at & 7)
    return rows


def _nearest(
    neighbours: Sequence[Sequence[int]],
    heavy: Sequence[bool],
    order: range,
    none: int,
    nearer: Callable[[int, int], int],
) -> list[int]:
    """[n]: the nearest heavy task that each task reaches through its neighbours; ``none`` if there is none."""
    result = [none] * len(heavy)
    for i in order:
        for j in neighbours[i]:
            result[i] = nearer(result[i], j if heavy[j] else result[j])
    return result
