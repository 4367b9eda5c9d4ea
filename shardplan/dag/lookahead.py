"""HEFT with a look ahead: tasks in HEFT's order, each on the device where its end plus the time that follows is earliest. It
follows no rule of FD-DPS, which gives only the idea that the latest start of a task differs between devices (formula 7). The
time after a task on a device is taken as a part of the least that can follow there; see `shardplan.dag.fd_dps` for the paper's
own rules.
"""

from __future__ import annotations

from shardplan.constants import CONSTANTS

from .graph import Dag, best_tails, by_rank, mean_ranks
from .heft import Slots
from .memory import Room
from .schedules import Orders


def lookahead(dag: Dag, room: Room, *, weight: float = CONSTANTS.tail_weight) -> Orders:
    """Orders by the earliest end plus ``weight`` times the least time that follows (`graph.best_tails`), device by device.

    Raises `memory.StuckError` where no device has room for a task.
    """
    best = best_tails(dag)
    slots = Slots(dag)
    for i in by_rank(dag, mean_ranks(dag)):
        ready, tail = slots.ready(i), best[i]
        choices = [slots.earliest(i, d, ready[d]) for d in room.devices(i)]
        _, start, device, place = min(choices, key=lambda c: (c[0] + weight * tail[c[2]], c))
        slots.fill(i, device, place, start)
        room.take(i, device)
    return slots.orders
