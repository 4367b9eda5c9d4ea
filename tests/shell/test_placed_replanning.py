"""A run on groups of devices goes on after a node is lost, slower or new: placed anew, with its state moved."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardplan
from models import mlp, two_tower
from shardplan.mesh import Cluster
from tests.placed import RandomGroups


def run_on(plans: list[Any], step: Any, state: Any, batch: Any) -> list[float]:
    """Losses of two steps under each plan, with the state moved in between."""
    losses: list[float] = []
    for n, plan in enumerate(plans):
        devices = jax.devices()[: plan.cluster.size]
        state = shardplan.reshard(state, plans[n - 1], plan, devices=devices) if n else state
        placed_state, placed = plan.put((state, batch), mesh=plan.mesh(devices))
        run = plan.jit(step, devices)
        for _ in range(2):
            placed_state, loss = run(placed_state, placed)
            losses.append(float(loss))
        state = placed_state
    return losses


def alone(step: Any, state: Any, batch: Any, count: int) -> list[float]:
    """Losses on one device."""
    losses: list[float] = []
    state = jax.tree.map(jnp.copy, state)
    for _ in range(count):
        state, loss = jax.jit(step)(state, batch)
        losses.append(float(loss))
    return losses


@pytest.mark.slow
def test_a_pipeline_goes_on_after_a_node_is_lost_slower_or_new(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    step, (state, batch) = mlp.train_step(layers=3, batch=24, width=16, concrete=True)
    expected = alone(step, state, batch, 8)
    asked: dict[str, Any] = {"axes": {"stage": 2, "data": 2}, "microbatches": 4, "batch_argnums": 1}
    plan = shardplan.plan(step, state, batch, cluster="2x2", **asked)
    plan.save(tmp_path / "plan.json")
    with caplog.at_level(logging.WARNING, logger="shardplan"):
        lost = shardplan.replan(shardplan.load(tmp_path / "plan.json", step, state, batch), "2")
    assert "axes data=2 of the old plan's stages do not make 1 devices" in caplog.text
    assert isinstance(lost, shardplan.PlacedPlan)
    assert lost.devices == ((0,), (1,))
    two = Cluster.load("2x2")
    slower = replace(two, name="slower", levels=(replace(two.levels[0], latency_s=1e-3), *two.levels[1:]))
    again = shardplan.replan(plan, slower)
    grown = shardplan.replan(lost, "3x2")
    assert again.cluster.name == "slower"
    assert isinstance(grown, shardplan.PlacedPlan)
    assert grown.devices == ((0, 1, 2), (3, 4, 5))
    assert {p.groups[0].microbatches for p in (plan, lost, grown)} == {plan.groups[0].microbatches}
    assert run_on([plan, lost, again, grown], step, state, batch) == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_the_chunks_that_were_asked_for_are_kept(tmp_path: Path) -> None:
    step, args = mlp.train_step(layers=4, batch=8, width=8)
    options: dict[str, Any] = {"cluster": "2", "microbatches": 2}
    for chunk in (1, 2):
        plan = shardplan.plan(step, *args, axes={"stage": 2, "chunk": chunk}, **options)
        plan.save(tmp_path / "plan.json")
        again: Any = shardplan.replan(shardplan.load(tmp_path / "plan.json", step, *args), "4")
        assert len(again.chunks) == 2 * chunk
        assert again.data.chunks_asked == chunk
    free: Any = shardplan.plan(step, *args, axes={"stage": 2}, **options)
    assert free.data.chunks_asked is None


def test_stages_that_do_not_divide_the_devices_become_fewer(caplog: pytest.LogCaptureFixture) -> None:
    step, args = mlp.train_step(layers=2, batch=8, width=8)
    plan = shardplan.plan(step, *args, cluster="2", axes={"stage": 2}, microbatches=2)
    with caplog.at_level(logging.WARNING, logger="shardplan"):
        new = shardplan.replan(plan, "3")
    assert "2 stages of the old plan do not divide 3 devices: 1 do" in caplog.text
    assert isinstance(new, shardplan.Plan)
    assert new.microbatches.count == 2


@pytest.mark.slow
def test_a_chosen_placement_is_searched_again() -> None:
    step, args = two_tower.train_step()
    plan = shardplan.plan(step, *args, cluster="2x4", placement="auto", memory_limit="1GiB")
    assert isinstance(plan, shardplan.PlacedPlan)
    new = shardplan.replan(plan, "2x4")
    assert new.placements_tried == plan.placements_tried
    assert new.memory_limit == plan.memory_limit
    assert isinstance(shardplan.replan(plan, "2x4", axes={"data": 8}), shardplan.Plan)


def test_groups_that_were_given_are_kept_while_their_devices_are_there() -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jnp.tanh(x @ w)
        return w - 0.1 * (x.T @ (y @ y.T) @ x) @ w, jnp.sum(y)

    args = (jnp.full((8, 8), 0.1), jnp.ones((4, 8)))
    plan = shardplan.plan(step, *args, cluster="4", placement=RandomGroups(2))
    grown = shardplan.replan(plan, "2x4")
    assert isinstance(grown, shardplan.PlacedPlan)
    assert grown.devices == plan.devices
    for a, b in zip(grown.jit(step, jax.devices()[:8])(*args), step(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    with pytest.raises(shardplan.ReshardError, match="has no device"):
        shardplan.replan(plan, "1")
    with pytest.raises(shardplan.ShardplanError, match="pins cannot be given where ops run on groups"):
        shardplan.replan(plan, "2x4", pins={"w": jax.sharding.PartitionSpec()})
