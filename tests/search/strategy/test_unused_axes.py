"""Axes over which nothing is cut: a device count that fits no dim is planned, and the plan says what came of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import shardplan
from shardplan.report.json import plan_json
from shardplan.report.plan_text import plan_text
from shardplan.search.strategy.unused_axes import idle


def _array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def idle_axes(plan: shardplan.Plan) -> dict[str, str]:
    return {unused.name: unused.text for unused in idle(plan.session.problem, plan.session.decisions)}


def _step(w: jax.Array, x: jax.Array) -> jax.Array:
    return x @ w


def test_a_prime_number_of_devices_that_fits_no_dim_is_said() -> None:
    plan = shardplan.plan(_step, _array(8, 8), _array(8, 8), cluster="7")
    (why,) = idle_axes(plan).values()
    assert why.startswith("no dim of any argument divides by gpu=7")
    assert f"note        {why}" in plan_text(plan.completed())
    assert plan_json(plan.completed())["idle_axes"] == {"gpu": why}


def test_cuts_that_do_not_pay_are_told_from_dims_that_do_not_divide() -> None:
    small = shardplan.plan(lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w), _array(8, 8), _array(8, 8), cluster="8")
    assert idle_axes(small)["gpu"].startswith("nothing is cut over gpu=8")


def test_devices_that_repeat_work_are_said_first() -> None:
    def step(up: jax.Array, down: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.grad(lambda up, down: jnp.mean((jax.nn.gelu(x @ up) @ down) ** 2), argnums=(0, 1))(up, down)

    weights = _array(256, 1024), _array(1024, 256)
    plan = shardplan.plan(step, *weights, _array(2048, 256), cluster="2x4")
    assert set(plan.idle_axes) == {"node"}
    assert repr(plan).splitlines()[1] == "idle        half of the devices repeat the other half's work (node=2)"
    known = {b.name: b for b in plan.baselines}
    whole, parallel = known["replicated"], known["data parallel"]
    assert parallel.step_time_s > whole.step_time_s
    saved_s = whole.compute_s - parallel.compute_s
    times = f"at least about {(parallel.step_time_s - parallel.compute_s) / saved_s:.2g} times this batch"
    assert times in plan_text(plan.completed()).splitlines()[1]
    assert times in repr(plan).splitlines()[1]
    assert "idle" not in repr(shardplan.plan(step, *weights, _array(2**16, 256), cluster="2x4"))


def test_an_axis_that_works_is_not_idle() -> None:
    pins = {"x": jax.sharding.PartitionSpec("gpu")}
    assert not idle_axes(shardplan.plan(_step, _array(8, 8), _array(8, 8), cluster="8", pins=pins))


def test_of_two_axes_the_one_that_fits_is_used() -> None:
    plan = shardplan.plan(_step, _array(4096, 4096), _array(4096, 4096), cluster="8x7")
    assert "node" not in idle_axes(plan)
