"""The compute that each movement of a schedule can hide behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.schedule import windows
from shardplan.schedule.instructions import Barrier, Compute, Cond, Instruction, Move, Scan
from tests.search import steps

CLUSTER = steps.cluster("4", gbps=(1.0,), gflops=1000.0)
PINS = {"x": P("gpu"), "ws": P(), "v": P("gpu")}


def products(x: Any, ws: Any) -> Any:
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]


def planned(front: Any, length: int = 3) -> Any:
    """What ``front`` makes of a split batch, times a weight that is stored split and so is gathered."""
    args = steps.array(4096, 256), steps.array(length, 256, 256), steps.array(256, 256)
    return shardplan.plan(lambda x, ws, v: front(x, ws) @ v, *args, cluster=CLUSTER, factors={}, pins=PINS)


def the_gather(plan: Any, instructions: tuple[Instruction, ...]) -> Move:
    (move,) = (i for i in instructions if isinstance(i, Move) and i.source == plan.schedule.body.parameters[2])
    return move


def compute_s(plan: Any, instructions: tuple[Instruction, ...]) -> float:
    seconds = plan.planned.op_seconds
    return sum(seconds[i.node.id] for i in instructions if isinstance(i, Compute))


@pytest.mark.parametrize("length", [3, 10])
def test_a_gather_hides_behind_all_iterations_of_the_scan_before_its_reader(length: int) -> None:
    plan = planned(products, length)
    body = plan.schedule.body.instructions
    (scan,) = (i for i in body if isinstance(i, Scan))
    iteration_s = compute_s(plan, scan.body.instructions)
    assert iteration_s > 0
    found = windows(plan.schedule, plan.planned)
    assert found[the_gather(plan, body).result] == pytest.approx(length * iteration_s)


def test_of_a_conditional_the_longest_branch_counts() -> None:
    def front(x: Any, ws: Any) -> Any:
        return jax.lax.cond(x[0, 0] > 0, lambda: products(x, ws), lambda: jnp.tanh(x @ ws[0]))

    plan = planned(front)
    body = plan.schedule.body.instructions
    (cond,) = (i for i in body if isinstance(i, Cond))
    (scan,) = (i for branch in cond.branches for i in branch.instructions if isinstance(i, Scan))
    window_s = windows(plan.schedule, plan.planned)[the_gather(plan, body).result]
    assert all(compute_s(plan, branch.instructions) > 0 for branch in cond.branches if scan not in branch.instructions)
    assert window_s == pytest.approx(3 * compute_s(plan, scan.body.instructions), rel=0.01)


def test_a_barrier_takes_nothing_from_a_window() -> None:
    """XLA removes barriers before it schedules. Here one ties the gather to the scan's result."""
    plan = planned(products)
    schedule, body = plan.schedule, plan.schedule.body
    (scan,) = (i for i in body.instructions if isinstance(i, Scan))
    move = the_gather(plan, body.instructions)
    assert isinstance(move.source, int)
    barrier = Barrier((move.source, scan.results[0]), (10**6, 10**6 + 1), 1)
    tied = tuple(x for i in body.instructions for x in ((barrier, replace(move, source=10**6)) if i is move else (i,)))
    with_barrier = replace(schedule, body=replace(body, instructions=tied))
    assert windows(with_barrier, plan.planned) == windows(schedule, plan.planned)
