"""The flat graph: what each op weighs, and ops without an index map."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardplan
from shardplan.frontend.trace import trace
from shardplan.graph.flattening import flatten
from shardplan.verify.verify import verify


def test_the_branch_of_most_work_carries_a_conditional() -> None:
    def many(x: jax.Array) -> jax.Array:
        return jnp.sin(jnp.cos(jnp.tanh(jnp.exp(x))))

    def step(flag: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.cond(flag, many, lambda x: x @ w @ w, x)

    args = (jax.ShapeDtypeStruct((), "bool"), *(jax.ShapeDtypeStruct((64, 64), "float32") for _ in range(2)))
    weights = {n.signature.call.primitive: n.weight for n in flatten(trace(step, *args).program).nodes}
    assert weights["dot_general"] == 1.0
    assert 0 < weights["sin"] < 0.01


def test_of_equal_branches_one_carries_the_cost() -> None:
    def step(flag: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.cond(flag, lambda x: jnp.sin(x), lambda x: jnp.cos(x), x)

    args = (jax.ShapeDtypeStruct((), "bool"), jax.ShapeDtypeStruct((64, 64), "float32"))
    weights = [n.weight for n in flatten(trace(step, *args).program).nodes if n.signature.call.primitive in ("sin", "cos")]
    assert sorted(weights)[1] == 1.0
    assert sum(weights) < 1.01


def test_a_step_that_prints_is_planned_and_prints(devices: list[Any], capfd: pytest.CaptureFixture[str]) -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        jax.debug.print("loss {}", loss)
        return w - gradient

    args = (jnp.ones((64, 64)), jnp.ones((512, 64)))
    assert verify(shardplan.plan(step, *args, cluster="2x4"), step, args).equal
    jax.effects_barrier()
    assert "loss 4096.0" in capfd.readouterr().out


def test_what_a_callback_returns_is_the_same_everywhere(devices: list[Any]) -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        scale = jax.pure_callback(lambda a: np.float32(np.abs(a).max()), jax.ShapeDtypeStruct((), "float32"), x @ w)
        return w / scale

    args = (jnp.ones((64, 64)), jnp.ones((512, 64)))
    assert verify(shardplan.plan(step, *args, cluster="2x4"), step, args).equal


def test_a_batch_of_nothing_is_planned(devices: list[Any]) -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - jax.grad(lambda w: (x @ w).sum())(w)

    args = (jnp.ones((64, 64)), jnp.ones((0, 64)))
    assert verify(shardplan.plan(step, *args, cluster="2x4"), step, args).equal
