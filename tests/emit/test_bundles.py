"""Moves with the same chain travel together, where that saves more than the copies to and from the buffer cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.emit.mutate import DroppingExplicitEmitter
from shardplan.emit.verify import verify
from shardplan.mesh import Cluster
from shardplan.schedule import Bundle, instructions_of
from tests.machines import machine

WEIGHTS = {f"w{n}": jax.random.normal(jax.random.key(n), (32, 32)) / 6 for n in range(5)}
BATCH = jax.random.normal(jax.random.key(9), (64, 32))


def slow_to_start(launch_s: float = 1e-4) -> Cluster:
    """A machine on which a collective takes long to start."""
    slow = machine("2x4:slow")
    return replace(slow, device=replace(slow.device, collective_launch_s=launch_s))


def step(weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        h = x
        for name in sorted(weights):
            h = jnp.tanh(h @ weights[name])
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def planned(spec: Any, cluster: Cluster) -> shardplan.Plan:
    return shardplan.plan(step, WEIGHTS, BATCH, cluster=cluster, pins={"weights/*": spec, "x": P("gpu")}, donate_argnums=0)


def moves(plan: shardplan.Plan, kind: type) -> list[Any]:
    return [i for i in instructions_of(plan.schedule.body.instructions) if isinstance(i, kind)]


@pytest.mark.parametrize(("spec", "kinds"), [(P(), {"all_reduce"}), (P(None, "gpu"), {"all_gather", "reduce_scatter"})])
def test_small_weights_travel_together(devices: list[Any], spec: Any, kinds: set[str]) -> None:
    plan = planned(spec, slow_to_start())
    bundles = moves(plan, Bundle)
    assert {hop.kind for b in bundles for hop in b.hops} >= kinds
    assert max(len(b.moves) for b in bundles) == len(WEIGHTS)
    assert plan.step_time_s < plan.searched_s
    found = verify(plan, step, (WEIGHTS, BATCH), steps=2)
    assert found.passed, found


def test_leaving_out_a_bundle_is_noticed(devices: list[Any]) -> None:
    plan = planned(P(None, "gpu"), slow_to_start())
    emitter = DroppingExplicitEmitter(plan.planned, plan.mesh(), -1, plan.schedule)
    jax.eval_shape(emitter, *jax.tree.leaves((WEIGHTS, BATCH)))
    assert len(emitter.exchanges) < 3 * len(WEIGHTS)
    assert not any(verify(plan, step, (WEIGHTS, BATCH), steps=1, drop=n).equal for n in range(len(emitter.exchanges)))


def test_nothing_waits_where_starting_costs_nothing() -> None:
    assert not moves(planned(P(None, "gpu"), slow_to_start(0.0)), Bundle)
