"""What a step finds around it: arrays and keys that it closes over, callbacks, random settings, meshes that are set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.report.plan_text import plan_text
from tests.emit.test_explicit import check
from tests.emit.test_user_code import W, X, drop
from tests.machines import machine


@pytest.mark.parametrize("backend", ["explicit", "specs"])
def test_a_random_key_that_the_step_closes_over(backend: str) -> None:
    key = jax.random.key(3)

    def step(w: Any, x: Any) -> Any:
        def body(h: Any, i: Any) -> Any:
            return drop(jax.random.fold_in(key, i), jnp.tanh(h @ w)), None

        return lax.scan(body, x + jax.random.normal(key, x.shape), jnp.arange(3))[0]

    plan = shardplan.plan(step, W, X, cluster=machine("2x4:slow"))
    run = plan.jit(step, jax.devices()[:8], backend)
    np.testing.assert_allclose(run(W, X), jax.jit(step)(W, X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["explicit", "specs"])
@pytest.mark.parametrize("on", ["2x4:slow", "3x2:slow"])
def test_a_callback_that_reads_no_array_gives_the_whole_result(backend: str, on: str) -> None:
    table = np.arange(32 * 32, dtype="float32").reshape(32, 32) / 999
    order = np.arange(32)[::-1].copy()

    def step(w: Any) -> Any:
        own = jax.pure_callback(lambda: table, jax.ShapeDtypeStruct((32, 32), jnp.float32))
        scaled = jax.pure_callback(lambda s: table * s, jax.ShapeDtypeStruct((32, 32), jnp.float32), w[0, 0])
        return own[order] + w @ w, scaled * w @ w

    plan = shardplan.plan(step, W, cluster=machine(on))
    run = plan.jit(step, jax.devices()[: plan.cluster.size], backend)
    for found, want in zip(run(W), jax.jit(step)(W), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


def test_what_runs_whole_on_every_device_is_named() -> None:
    def step(key: Any, w: Any) -> Any:
        own = jax.pure_callback(lambda: np.ones((32, 32), "float32"), jax.ShapeDtypeStruct((32, 32), jnp.float32))
        return own @ w + jax.random.normal(key, (32, 32)), w.sum()

    plan = shardplan.plan(step, jax.random.key(0, impl="rbg"), W, cluster="2x4")
    assert [text.split(" at ")[0] for text in plan.data.whole_ops] == ["pure_callback", "random_bits"]
    report = plan_text(plan.completed())
    assert "pure_callback runs whole on every device: " in report
    unknown = replace(plan.completed(), whole_ops=("pure_callback at ?",))
    assert "pure_callback runs whole on every device: an unknown line" in plan_text(unknown)
    assert not shardplan.plan(lambda w: jnp.tanh(w @ w).sum(), W, cluster="2x4").data.whole_ops


def test_the_wrapping_of_a_key_is_no_work_and_is_not_named() -> None:
    def step(key: Any, w: Any) -> Any:
        return jax.random.key_data(key), jax.random.wrap_key_data(jax.random.key_data(key)), w @ w

    assert not shardplan.plan(step, jax.random.key(0), W, cluster="2x4").data.whole_ops


@pytest.mark.parametrize("backend", ["explicit", "specs"])
def test_bits_that_depend_on_the_whole_shape(backend: str) -> None:
    def step(key: Any, w: Any) -> Any:
        return jax.random.normal(key, (24, 32)) @ w, jax.vmap(lambda k: jax.random.uniform(k, (32,)))(
            jax.random.split(key, 8)
        ) @ w

    with jax.threefry_partitionable(False):
        key = jax.random.key(5)
        plan = shardplan.plan(step, key, W, cluster=machine("2x4:slow"))
        run = plan.jit(step, jax.devices()[:8], backend)
        for found, want in zip(run(key, W), jax.jit(step)(key, W), strict=True):
            np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


def test_a_step_runs_while_another_mesh_is_set() -> None:
    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * (x.T @ jnp.tanh(x @ w))

    explicit = jax.make_mesh((4, 2), ("data", "model"))  # Explicit axes
    with jax.set_mesh(explicit):
        for cluster in (explicit, machine("2x4:slow")):
            plan = shardplan.plan(step, W, X, cluster=cluster)
            for backend in ("explicit", "specs"):
                np.testing.assert_allclose(plan.jit(step, backend=backend)(W, X), step(W, X), rtol=1e-5, atol=1e-6)
    small = jax.make_mesh((2, 2), ("a", "b"))
    with (
        jax.set_mesh(small),
        pytest.raises(shardplan.ShardplanError, match="has set a mesh of 4 devices, and the plan runs on 8"),
    ):
        shardplan.plan(step, W, X, cluster=machine("2x4:slow")).jit(step)(W, X)


def test_an_array_on_explicit_axes_that_the_step_closes_over_is_refused() -> None:
    rows = jax.device_put(jnp.ones(32), NamedSharding(jax.make_mesh((4, 2), ("data", "model")), P("data")))
    with pytest.raises(shardplan.TraceError, match=r"closes over an array .* cut over the Explicit axes data"):
        shardplan.plan(lambda w: w * rows[:, None], W, cluster="2x4")


@pytest.mark.slow
def test_an_array_that_a_loop_closes_over() -> None:
    mask = jnp.triu(jnp.ones((32, 32)))

    def step(w: Any, h: Any) -> Any:
        return lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h @ (w * mask) + jnp.cumsum(mask, 0)[:1] * 0.01), h)

    for on in ("2x4:slow", "3x2:slow", "2x2:crawl"):
        check(step, (W, X), on)
    check(lambda w: jax.scipy.linalg.expm(w), (W / 9,), "2x4:slow")


@pytest.mark.slow
def test_a_scatter_into_zeros_is_whole_where_it_does_not_divide() -> None:
    def loss(w: Any, x: Any, y: Any) -> Any:
        scores, i = (x @ w) @ y.T, jnp.arange(47)
        return (
            -jax.nn.log_softmax(scores)[i, i].mean()
            + (scores.at[i[:5], i[:5]].set(0.0) * jnp.zeros((47, 47)).at[i[:9]].set(1.0)).sum()
        )

    rng = np.random.default_rng(0)
    w, x, y = (jnp.asarray(rng.standard_normal(s) / 4, "float32") for s in ((18, 24), (47, 18), (47, 24)))
    for on in ("2x4:slow", "3x2:slow", "8:slow"):
        check(jax.value_and_grad(loss), (w, x, y), on)
