"""Room on devices: what is left while tasks are placed, and a packing where placing one task after another gets stuck."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from shardplan.errors import ScheduleError

from .graph import Dag

# Sums of sizes may round: a device holds so much more than its memory, relative to it.
SLACK = 1e-9
# The most nodes of the integer program: 60 tasks that fill 5 devices to a thousandth are packed by then, in 6 s.
NODES = 500


class StuckError(Exception):
    """No device has room left for ``task``: this order of placing leads nowhere."""

    def __init__(self, task: int) -> None:
        super().__init__(task)
        self.task = task


class Room:
    """The memory that is left on each device. With ``pins`` [tasks], a task may lie on one device alone."""

    __slots__ = ("_left", "_pins", "_sizes")

    def __init__(self, dag: Dag, pins: tuple[int, ...] | None = None) -> None:
        self._left = [m * (1 + SLACK) for m in dag.memory]
        self._pins = pins
        self._sizes = dag.sizes

    def devices(self, task: int) -> list[int]:
        """The devices with room for a task; `StuckError` if there is none."""
        if self._pins is not None:
            return [self._pins[task]]
        size = self._sizes[task]
        roomy = [d for d, left in enumerate(self._left) if size <= left]
        if not roomy:
            raise StuckError(task)
        return roomy

    def has(self, device: int, *tasks: int) -> bool:
        """Whether a device has room for all of these tasks, and none of them is pinned elsewhere."""
        pinned = self._pins is not None and any(self._pins[i] != device for i in tasks)
        return not pinned and sum(self._sizes[i] for i in tasks) <= self._left[device]

    def positions(self, task: int, row: Sequence[int], first: int, last: int) -> Iterable[int]:
        """The positions from ``first`` to ``last`` at which a task may come into the order ``row`` of a device."""
        return range(first, last + 1)

    def take(self, task: int, device: int) -> None:
        """A task is placed."""
        self._left[device] -= self._sizes[task]

    def release(self, task: int, device: int) -> None:
        """A task is taken away."""
        self._left[device] += self._sizes[task]


def packing(dag: Dag) -> tuple[int, ...]:
    """[tasks]: a device for each task, within all memories up to a millionth of each, with a small sum of seconds.

    The sum is the least unless the integer program ends after `NODES`. `ScheduleError` where no packing is found.
    """
    n, devices = dag.tasks, dag.devices
    once, held = lil_array((n, n * devices)), lil_array((devices, n * devices))
    scale = [m if 0 < m < np.inf else max(dag.sizes, default=0.0) or 1.0 for m in dag.memory]  # HiGHS's tolerance is absolute
    for i in range(n):
        for d in range(devices):
            once[i, i * devices + d] = 1.0
            held[d, i * devices + d] = dag.sizes[i] / scale[d]
    cost = np.array(dag.times_s).ravel()
    memory = np.array(dag.memory) / scale
    answer = milp(
        cost / max(cost.max(initial=0.0), 1e-300),
        integrality=np.ones(len(cost), int),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(once.tocsr(), 1.0, 1.0), LinearConstraint(held.tocsr(), -np.inf, memory)],
        options={"node_limit": NODES},
    )
    if answer.x is None:
        proven = answer.status == 2
        raise ScheduleError(
            f"the {n} tasks {'cannot be' if proven else 'were not'} packed into the memory of the {devices} devices"
            f"{'' if proven else f' in {NODES} nodes of search'}: their sizes add up to {sum(dag.sizes):g}, "
            f"the memories to {sum(dag.memory):g}: give devices more memory, add devices or split large tasks"
        )
    return tuple(int(d) for d in np.reshape(answer.x, (n, devices)).argmax(1))
