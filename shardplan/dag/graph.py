"""A DAG of tasks: seconds of each task on each device, seconds of each transfer between two devices, and memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

# Seconds between any two different devices, or [from][to] for each pair, with zeros on the diagonal.
Transfer = float | tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Dag:
    """A user's tables after `shardplan.dag.validation.checked`.

    ``order`` is a topological order of the tasks. ``parents`` and ``children`` hold pairs of a task and the transfer between
    the two, by task id. A task holds its ``sizes`` on its device from the first second to the last, in the unit of ``memory``.
    ``ready_s`` is the earliest start that is allowed for a task on a device, beside what its parents ask for.
    """

    times_s: tuple[tuple[float, ...], ...]  # [tasks][devices]
    parents: tuple[tuple[tuple[int, Transfer], ...], ...]  # [tasks]
    children: tuple[tuple[tuple[int, Transfer], ...], ...]  # [tasks]
    order: tuple[int, ...]  # [tasks]
    sizes: tuple[float, ...]  # [tasks]
    memory: tuple[float, ...]  # [devices]
    ready_s: tuple[tuple[float, ...], ...]  # [tasks][devices]

    @property
    def tasks(self) -> int:
        """The number of tasks; their ids count from 0."""
        return len(self.times_s)

    @property
    def devices(self) -> int:
        """The number of devices; their ids count from 0."""
        return len(self.memory)

    def reversed(self) -> Dag:
        """The same tasks with every edge turned round. Earliest starts are dropped: they do not hold backwards."""
        return replace(
            self,
            parents=tuple(tuple((j, _transposed(t)) for j, t in row) for row in self.children),
            children=tuple(tuple((j, _transposed(t)) for j, t in row) for row in self.parents),
            order=self.order[::-1],
            ready_s=((0.0,) * self.devices,) * self.tasks,
        )


def between(transfer: Transfer, source: int, target: int) -> float:
    """The seconds of a transfer between two devices; none on one device."""
    if source == target:
        return 0.0
    return transfer[source][target] if isinstance(transfer, tuple) else transfer


def mean_s(transfer: Transfer) -> float:
    """The mean seconds of a transfer over all pairs of different devices; none where there is one device."""
    if not isinstance(transfer, tuple):
        return transfer
    pairs = len(transfer) * (len(transfer) - 1)
    return math.fsum(seconds for row in transfer for seconds in row) / pairs if pairs else 0.0


def mean_time_s(dag: Dag, task: int) -> float:
    """The mean seconds of a task over all devices. Rounded correctly, as Python's releases differ in `sum`, and ties in this."""
    return math.fsum(dag.times_s[task]) / dag.devices


def mean_ranks(dag: Dag) -> list[float]:
    """[tasks]: mean seconds from a task's start to the end of the graph: HEFT's upward rank.

    Source: Topcuoglu, Hariri and Wu, Performance-effective and low-complexity task scheduling (2002), equation 8.
    """
    ranks, several = [0.0] * dag.tasks, dag.devices > 1  # nothing travels on one device
    for i in reversed(dag.order):
        after = max(((mean_s(t) if several else 0.0) + ranks[j] for j, t in dag.children[i]), default=0.0)
        ranks[i] = mean_time_s(dag, i) + after
    return ranks


def by_rank(dag: Dag, ranks: list[float]) -> list[int]:
    """The tasks by falling rank, which is by rising LST; ranks that differ by rounding alone are equal. Parents come first."""
    position = {i: k for k, i in enumerate(dag.order)}
    unit = max(ranks, default=0.0) or 1.0
    return sorted(dag.order, key=lambda i: (-round(ranks[i] / unit, 12), position[i]))


def best_tails(dag: Dag) -> list[list[float]]:
    """[tasks][devices]: seconds from a task's end to the end of the graph, if every later task runs where that is soonest.

    No schedule does better: other tasks and memory are left out. With it, formula 7 holds for tasks whose children have no
    device yet. It is the optimistic cost table of Arabnejad and Barbosa, List scheduling algorithm for heterogeneous systems by
    an optimistic cost table (2014), equation 2.
    """
    tails = np.zeros((dag.tasks, dag.devices))
    times = np.array(dag.times_s).reshape(tails.shape)
    for i in reversed(dag.order):
        for j, transfer in dag.children[i]:
            after = times[j] + tails[j]
            if isinstance(transfer, tuple):
                least = (np.array(transfer) + after).min(1)
            else:
                least = np.minimum(after, transfer + after.min())
            np.maximum(tails[i], least, out=tails[i])
    return tails.tolist()


def _transposed(transfer: Transfer) -> Transfer:
    return tuple(zip(*transfer, strict=True)) if isinstance(transfer, tuple) else transfer
