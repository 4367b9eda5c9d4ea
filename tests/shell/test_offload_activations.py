"""`plan(..., offload="auto")` with activations in host memory, and steps that offload by a policy of `jax.checkpoint`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import shardplan
from models import gpt
from shardplan.errors import ClusterError, PlacementError
from shardplan.plans.data import PlanData
from shardplan.schedule import HostCopy
from shardplan.schedule.instructions import Barrier, Block, Instruction, blocks_of
from shardplan.verify.verify import verify
from tests.machines import machine

POLICIES = jax.checkpoint_policies
TO_HOST = POLICIES.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=["hidden"], offload_src="device", offload_dst="pinned_host"
)
ON_DEVICE = POLICIES.save_only_these_names("hidden")
LAYERS, ROWS, WIDTH = 6, 2048, 32


def layers(policy: Any, *, scan: bool) -> tuple[Any, tuple[Any, Any]]:
    """A step of layers, each of which saves one value as the policy says."""

    def layer(hidden: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sin(checkpoint_name(jnp.tanh(hidden @ w), "hidden"))

    def loss(weights: Any, batch: jax.Array) -> jax.Array:
        again = jax.checkpoint(layer, policy=policy)
        if scan:
            return jnp.mean(lax.scan(lambda hidden, w: (again(hidden, w), None), batch, weights)[0] ** 2)
        for w in weights:
            batch = again(batch, w)
        return jnp.mean(batch**2)

    def step(weights: Any, batch: jax.Array) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, batch))

    keys = jax.random.split(jax.random.key(0), LAYERS)
    each = [jax.random.normal(key, (WIDTH, WIDTH)) / 4 for key in keys]
    return step, (jnp.stack(each) if scan else each, jax.random.normal(jax.random.key(1), (ROWS, WIDTH)))


def instructions(block: Block) -> Iterator[Instruction]:
    for instruction in block.instructions:
        yield instruction
        for inner in blocks_of(instruction):
            yield from instructions(inner)


def copies(plan: shardplan.Plan) -> list[str]:
    return [str(i.memory) for i in instructions(plan.schedule.body) if isinstance(i, HostCopy)]


@pytest.mark.quick
@pytest.mark.parametrize("backend", ["explicit", "specs"])
@pytest.mark.parametrize("scan", [False, True])
def test_a_step_that_offloads_by_itself_is_priced_and_equal(backend: str, scan: bool) -> None:
    options: dict[str, Any] = {"cluster": machine("2x4:slow"), "backend": backend}
    step, args = layers(TO_HOST, scan=scan)
    plan = shardplan.plan(step, *args, **options)
    beside = shardplan.plan(layers(ON_DEVICE, scan=scan)[0], *args, **options)
    value = ROWS * WIDTH * 4 // 8
    rate, launch_s = plan.cluster.host_link_bytes_per_s(), plan.cluster.device.launch_s
    assert plan.data.host_s == pytest.approx(2 * LAYERS * (value / rate + launch_s))
    assert beside.data.host_s == 0
    assert plan.peak_bytes <= beside.peak_bytes - (LAYERS - 2) * value
    found = verify(plan, step, args, steps=3, backend=backend, devices=jax.devices()[:8])
    assert found.equal, (found.worst, found.unequal)
    if backend == "explicit":
        assert sorted(copies(plan)) == ["device", "pinned_host"] if scan else ["device"] * LAYERS + ["pinned_host"] * LAYERS


@pytest.mark.quick
def test_what_comes_back_waits_for_the_backward_pass() -> None:
    step, args = layers(TO_HOST, scan=False)
    body = shardplan.plan(step, *args, cluster=machine("2x4:slow")).schedule.body
    barriers = {r for i in body.instructions if isinstance(i, Barrier) for r in i.results}
    back = [i for i in body.instructions if isinstance(i, HostCopy) and i.memory == "device"]
    assert len(back) == LAYERS
    assert all(copy.source in barriers for copy in back)


@pytest.mark.quick
def test_groups_and_devices_without_a_link_are_refused() -> None:
    step, args = layers(TO_HOST, scan=False)
    on = machine("2x4:slow")
    with pytest.raises(PlacementError, match=r"copies a value between device and host memory at .*test_offload_activations.py"):
        shardplan.plan(step, *args, cluster=on, axes={"stage": 2}, microbatches=2)
    bare = replace(on, device=replace(on.device, host_bytes_per_s=None))
    with pytest.raises(ClusterError, match=r"device\.host_bytes_per_s"):
        shardplan.plan(step, *args, cluster=bare)


def gpt_step(*, scan: bool) -> tuple[Any, tuple[Any, ...]]:
    return gpt.train_step(layers=3, width=32, batch=32, sequence=32, heads=4, vocabulary=64, scan=scan)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_activations_leave_where_nothing_else_fits(scan: bool, tmp_path: Path) -> None:
    step, args = gpt_step(scan=scan)
    options: dict[str, Any] = {"cluster": machine("2x4:slow"), "donate_argnums": 0}
    free = shardplan.plan(step, *args, **options)
    limit = free.peak_bytes * 2 // 5
    with pytest.raises(shardplan.MemoryLimitError):
        shardplan.plan(step, *args, **options, memory_limit=limit, traced=free.traced)
    plan = shardplan.plan(step, *args, **options, memory_limit=limit, offload="auto", traced=free.traced)
    assert plan.peak_bytes <= limit
    assert plan.data.hosted
    assert plan.data.host_s > 0
    assert all(value.loop is not None if scan else "gpt.py" in value.source for value in plan.data.hosted)
    assert copies(plan).count("pinned_host") == copies(plan).count("device") == len(plan.data.hosted) + len(plan.data.offloaded)
    plan.save(tmp_path / "plan.json")
    loaded = shardplan.load(tmp_path / "plan.json", step, *args)
    assert loaded.data == plan.data
    found = verify(loaded, step, args, steps=3, devices=jax.devices()[:8])
    assert found.passed, found
    _decided_anew(loaded, plan.data, step, args)


def _decided_anew(plan: shardplan.Plan, before: PlanData, step: Any, args: Any) -> None:
    """A new plan for a smaller cluster has activations in host memory where nothing else fits, or the old plan is faster."""
    smaller = shardplan.replan(plan, machine("4:slow"), memory_limit=2 * before.memory_limit)
    assert smaller.data.hosted
    assert smaller.peak_bytes <= smaller.memory_limit
    roomy = {"cluster": machine("4:slow"), "memory_limit": "1GiB"}
    anew = shardplan.plan(step, *args, **roomy, offload="auto", donate_argnums=0, traced=plan.traced)
    assert not anew.data.hosted
    assert shardplan.replan(plan, **roomy).step_time_s <= anew.step_time_s


@pytest.mark.quick
def test_reports_name_activations_in_host_memory() -> None:
    step, args = layers(TO_HOST, scan=False)
    plan = shardplan.plan(step, *args, cluster=machine("2x4:slow"))
    assert "values that the step itself copies; copies there and back take" in plan.explain()
