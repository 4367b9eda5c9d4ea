"""HEFT: tasks by falling upward rank, each on the device that ends it first, in the first gap that holds it.

Source: Topcuoglu, Hariri and Wu, Performance-effective and low-complexity task scheduling for heterogeneous computing (2002).
"""

from __future__ import annotations

from collections.abc import Sequence

from .graph import Dag, by_rank, mean_ranks
from .memory import Room
from .schedules import Orders, arrival_s


def heft(dag: Dag, room: Room) -> Orders:
    """The orders of HEFT. Devices without room for a task are left out; `memory.StuckError` where none has room."""
    slots = Slots(dag)
    for i in by_rank(dag, mean_ranks(dag)):
        ready = slots.ready(i)
        _, start, device, place = min(slots.earliest(i, d, ready[d]) for d in room.devices(i))
        slots.fill(i, device, place, start)
        room.take(i, device)
    return slots.orders


class Slots:
    """Orders that are filled without moving a placed task."""

    __slots__ = ("finish_s", "orders", "start_s")

    def __init__(self, dag: Dag) -> None:
        self.orders = Orders(dag)
        self.start_s = [0.0] * dag.tasks
        self.finish_s = [0.0] * dag.tasks

    def ready(self, task: int) -> list[float]:
        """[devices]: when the task's inputs are on each device."""
        return arrival_s(self.orders.dag, self.orders.device, self.finish_s, task)

    def earliest(self, task: int, device: int, ready_s: float) -> tuple[float, float, int, int]:
        """The first gap that holds a task on a device: its end, its start, the device, its position among the device's tasks."""
        seconds = self.orders.dag.times_s[task][device]
        row = self.orders.sequences[device]
        place, at = first_gap(row, self.start_s, self.finish_s, ready_s, seconds)
        return at + seconds, at, device, place

    def fill(self, task: int, device: int, place: int, start_s: float) -> None:
        """Places a task there."""
        self.orders.insert(task, device, place)
        self.start_s[task] = start_s
        self.finish_s[task] = start_s + self.orders.dag.times_s[task][device]


def first_gap(
    row: Sequence[int], start_s: Sequence[float], finish_s: Sequence[float], ready_s: float, seconds: float
) -> tuple[int, float]:
    """The position in ``row`` of the first gap of so many seconds after ``ready_s``, and the start in it."""
    place = len(row)
    # from the end: tasks that end before the inputs arrive hold no gap of interest
    while place and finish_s[row[place - 1]] > ready_s:
        place -= 1
    at = max(ready_s, finish_s[row[place - 1]]) if place else ready_s
    for k in range(place, len(row)):
        following = row[k]
        if at + seconds <= start_s[following]:
            return k, at
        if finish_s[following] > at:
            at = finish_s[following]
    return len(row), at
