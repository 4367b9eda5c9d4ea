"""Transfers between nodes are programs on the devices of both groups, those within a node copies beside what devices compute."""

from __future__ import annotations

from typing import cast

import pytest

import shardplan
from shardplan.regions.schedules import Waiting, started
from shardplan.regions.tasks import Task, Transfer
from shardplan.shell.placed_plan import PlacedPlan
from tests.machines import machine
from tests.regions.test_virtual_stages import residual


def overlaps(cluster: str) -> int:
    """How often a transfer runs while a device of its two groups computes."""
    step, args = residual(layers=4)
    plan = cast(PlacedPlan, shardplan.plan(step, *args, cluster=machine(cluster), axes={"stage": 2}, microbatches=8))
    graph, issues = plan.placed.graph, plan.placed.dispatch.issues
    tasks = [(graph.pieces[i.what.piece].group, i) for i in issues if isinstance(i.what, Task)]
    transfers = [(i.what, i) for i in issues if isinstance(i.what, Transfer)]
    assert transfers
    return sum(
        group in (what.source, what.target) and i.start_s < j.end_s * (1 - 1e-9) and j.start_s < i.end_s * (1 - 1e-9)
        for what, i in transfers
        for group, j in tasks
    )


@pytest.mark.parametrize(("cluster", "beside"), [("4:eager", True), ("2x2:eager", False)])
def test_transfers_between_nodes_wait_for_both_groups(cluster: str, beside: bool) -> None:
    assert (overlaps(cluster) > 0) == beside


def test_a_device_waits_for_the_rendezvous_on_the_longest_way() -> None:
    """Each device has something else to do whenever the other is free, so the first to start would never be the transfer."""
    sends, others, send, last = 0, range(1, 9), 9, 10
    waiting = [Waiting(Task(0, 0, (), ()), 1.0, (), (0,))]
    waiting += [Waiting(Task(n, 0, (), ()), 1.0 if n < 5 else 1.5, (), (int(n >= 5),)) for n in others]
    waiting.append(Waiting(Transfer((0, 0), 0, 1, 0), 0.1, (sends,), (0, 1)))
    waiting.append(Waiting(Task(last, 0, (), ()), 9.0, (send,), (1,)))
    found = {w.what: at for w, at in started(waiting)}
    assert found[waiting[send].what] == 1.0
    assert found[waiting[last].what] == pytest.approx(1.1)
