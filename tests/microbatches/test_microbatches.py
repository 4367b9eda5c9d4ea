"""A step cut into microbatches computes what it computes at once, or is refused with the line that stands in the way."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardplan
from models import gpt, mlp, moe, two_tower, wresnet
from shardplan.errors import MicrobatchError
from shardplan.frontend.nnx_state import trace_step
from shardplan.microbatches.accumulating import checked_microbatches, microbatched
from shardplan.verify.verify import verify
from tests.machines import machine


def test_equal_ops_of_two_loops_are_not_shared() -> None:
    """Their values belong to the loops that compute them."""

    def step(w: jax.Array, c: jax.Array, x: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        for _ in range(2):
            w = jax.lax.fori_loop(0, 3, lambda _, w: w - 0.01 * jnp.tanh(c) * gradient, w)
        return w, value

    args = jnp.eye(8), jnp.ones((8, 8)), jnp.arange(64.0).reshape(8, 8) / 64
    plan = shardplan.plan(step, *args, cluster="2", microbatches=2, batch_argnums=2)
    assert verify(plan, step, args).passed


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_a_step_in_microbatches_trains_as_at_once(count: int) -> None:
    step, args = mlp.train_step(concrete=True)
    plan = shardplan.plan(step, *args, cluster=machine("2x2:eager"), donate_argnums=(0,), microbatches=count)
    assert verify(plan, step, args).passed


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"dropout": 0.1}, {"scan": True, "dropout": 0.1}, {"scan": True, "remat": True}], ids=str)
def test_a_gpt_in_microbatches_trains_as_at_once(options: dict[str, Any]) -> None:
    step, args = gpt.train_step(concrete=True, layers=2, **options)
    plan = shardplan.plan(step, *args, cluster=machine("2x2:eager"), donate_argnums=(0,), microbatches=4)
    assert verify(plan, step, args).passed


@pytest.mark.slow
def test_a_step_in_microbatches_holds_less_at_once() -> None:
    step, args = gpt.train_step(layers=2)
    whole, parts = (shardplan.plan(step, *args, cluster="2", microbatches=n).peak_bytes for n in (1, 8))
    assert parts < 0.7 * whole


@pytest.mark.slow
def test_gradients_are_reduced_among_devices_once_and_not_in_each_microbatch() -> None:
    step, args = mlp.train_step()
    plan = shardplan.plan(step, *args, cluster=machine("8:slow"), microbatches=4).as_baseline("data parallel")
    sent = [c for c in plan.collectives if c.kind == "all-reduce" and c.bytes > 4]
    assert sent
    assert {c.times for c in sent} == {1}


def linear(w: jax.Array, x: jax.Array) -> jax.Array:
    return x @ w


W, X = jnp.arange(12.0).reshape(4, 3), jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)


@pytest.mark.parametrize(
    "step",
    [
        lambda w, x: linear(w, x),
        lambda w, x: jnp.max(linear(w, x)),
        lambda w, x: (jnp.sum(linear(w, x) ** 2), linear(w, x).T),
        lambda w, x: jnp.mean(jnp.tanh(x), 0) @ w,
        lambda w, x: jax.grad(lambda w: jnp.sum(jnp.sin(linear(w, x))))(w) * jnp.linalg.norm(w),
        lambda w, x: optax.tree.norm(jax.grad(lambda w: jnp.mean(linear(w, x) ** 2))(w)),
        lambda w, x: linear(w, x) + jax.random.normal(jax.random.key(3), (8, 3)),
        lambda w, x: jnp.any(linear(w, x) > 1e9),
        lambda w, x: jnp.arange(8)[:, None] * x,
    ],
    ids=["blocks", "largest", "transposed", "mean", "gradient", "norm", "noise", "any", "places"],
)
def test_what_is_split_is_joined_and_what_is_partial_is_added_up(step: Any) -> None:
    traced = trace_step(step, (W, X))
    program = microbatched(traced.program, checked_microbatches(traced, 4, (1,)))
    assert any(op.control == "scan" for op in program.ops)
    found = shardplan.plan(step, W, X, cluster="2", microbatches=4, batch_argnums=1).jit(step, jax.devices()[:2])(W, X)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(step(W, X)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * float(np.max(np.abs(b))))  # sums in another order


def numbers(x: jax.Array) -> np.ndarray:
    """An array, or the bits of keys."""
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def drawn_in_a_loop(key: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The loop runs in every microbatch, and the key that it leaves is the same in all."""

    def body(key: jax.Array, n: jax.Array) -> tuple[jax.Array, jax.Array]:
        key = jax.random.fold_in(key, n)
        return key, jax.random.normal(key, x.shape) * x

    key, rows = jax.lax.scan(body, key, jnp.arange(3))
    return key, rows.sum(0)


def recomputed(w: jax.Array, x: jax.Array) -> jax.Array:
    """Barriers of the backward pass hold weights, which are there before, together with activations of a microbatch."""
    block = jax.checkpoint(lambda x, w: jnp.tanh(x @ w) @ w.T)
    return jax.grad(lambda w: jnp.sum(block(block(x, w), w) ** 2))(w)


def told(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Effects of weights alone, and of a sum over the whole batch."""
    doubled = jax.pure_callback(lambda w: np.asarray(w) * 2, jax.ShapeDtypeStruct(w.shape, w.dtype), w)
    total = jnp.sum(x @ doubled)
    return jax.pure_callback(lambda s: np.asarray(s) + 1, jax.ShapeDtypeStruct((), w.dtype), total), jnp.sum(doubled)


@pytest.mark.parametrize(
    ("step", "first"), [(drawn_in_a_loop, jax.random.key(1)), (recomputed, W), (told, W)], ids=["keys", "remat", "callbacks"]
)
@pytest.mark.parametrize("cluster", ["2x2", "2x2:eager"])
def test_keys_barriers_and_effects_keep_their_times(step: Any, first: jax.Array, cluster: str) -> None:
    on = machine(cluster)
    plan = shardplan.plan(step, first, X, cluster=on, microbatches=4, batch_argnums=1)
    found = plan.jit(step, jax.devices()[: on.size])(first, X)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(step(first, X)), strict=True):
        np.testing.assert_allclose(numbers(a), numbers(b), rtol=0, atol=2e-6 * float(np.max(np.abs(numbers(b)))))


def test_a_print_of_the_whole_batch_happens_once(capfd: pytest.CaptureFixture[str]) -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        total = jnp.sum(x @ w)
        jax.debug.print("total {}", total)
        return total

    plan = shardplan.plan(step, W, X, cluster="2", microbatches=4, batch_argnums=1)
    jax.block_until_ready(plan.jit(step, jax.devices()[:2])(W, X))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("total") == 1


def test_a_step_that_names_mesh_axes_is_not_cut_into_microbatches() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))

    def step(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x * 2, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))

    with pytest.raises(MicrobatchError, match="names mesh axes"):
        shardplan.plan(step, X, cluster=mesh, microbatches=2)


def masked_mean(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum((x > 0) * jnp.tanh(x @ w @ w.T)) / jnp.maximum(jnp.sum(x > 0), 1)


def mean_where(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(x @ w), where=x[:, :3] > 0) * (1 + jnp.max(jnp.abs(x)))


@pytest.mark.parametrize("loss", [masked_mean, mean_where])
@pytest.mark.parametrize("options", [{}, {"axes": {"stage": 2}}], ids=str)
def test_a_mean_over_what_is_not_masked_is_that_of_the_whole_batch(loss: Any, options: dict[str, Any]) -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(w, x)
        return w - 0.1 * gradient, value

    plan = shardplan.plan(step, W / 12, X, cluster="2", microbatches=4, batch_argnums=1, donate_argnums=0, **options)
    assert plan.microbatches.count == 4
    assert verify(plan, step, (W / 12, X)).passed


def test_the_sums_that_come_first_run_no_effect_of_the_step(capfd: pytest.CaptureFixture[str]) -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(masked_mean)(w, x)
        jax.debug.print("value {}", value)
        return w - 0.1 * gradient, value

    plan = shardplan.plan(step, W / 12, X, cluster="2", microbatches=4, batch_argnums=1)
    found = plan.jit(step, jax.devices()[:2])(W / 12, X)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("value") == 1
    np.testing.assert_allclose(found[0], step(W / 12, X)[0], rtol=1e-5)


def test_a_mean_that_weights_decide_is_refused_with_its_line() -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        chosen = x @ w > 0  # how many, no microbatch can know
        value, gradient = jax.value_and_grad(lambda w: jnp.sum(chosen * (x @ w)) / jnp.sum(chosen))(w)
        return w - 0.1 * gradient, value

    with pytest.raises(MicrobatchError, match=r"at .*test_microbatches.py:\d+.*, it reads the sum of"):
        shardplan.plan(step, W, X, cluster="2", microbatches=4, batch_argnums=1, donate_argnums=0)


def test_an_array_that_has_the_shape_of_a_result_is_taken_for_state_and_the_error_says_so() -> None:
    def step(w: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        def loss(w: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = x @ w - jnp.mean(x @ w, 0)  # of the whole batch
            return jnp.mean((h - y) ** 2), h

        (value, made), gradient = jax.value_and_grad(loss, has_aux=True)(w)
        return w - 0.1 * gradient, value, made

    args = jnp.ones((4, 2)), jnp.ones((8, 4)), jnp.ones((8, 2))
    with pytest.raises(MicrobatchError, match=r"Taken for the batch: x; .* \(taken for state, as results have their shapes: y\)"):
        shardplan.plan(step, *args, cluster="2", microbatches=2)
    with pytest.raises(MicrobatchError, match=r"no argument is a batch \(taken for state, as results have their shapes: w, x\)"):
        shardplan.plan(lambda w, x: (w - jnp.mean(x @ w), jnp.tanh(x)), *args[:2], cluster="2", microbatches=2)


@pytest.mark.parametrize(
    ("model", "where", "data"),
    [
        (wresnet, r"wresnet.py:\d+", "batch/image, batch/label;"),
        (two_tower, r"two_tower.py:\d+", "batch/"),
        (moe, r"moe.py:\d+ \(route\)", "batch/targets, batch/tokens;"),
    ],
)
def test_what_needs_several_microbatches_at_once_is_refused_with_its_line(model: Any, where: str, data: str) -> None:
    step, args = model.train_step()
    with pytest.raises(MicrobatchError, match=f"cannot be cut into microbatches: at .*{where}") as raised:
        shardplan.plan(step, *args, cluster="2", microbatches=2)
    assert f"; plan it with microbatches=1. Taken for the batch: {data}" in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 3}, r"x has the shape \[8, 4\], whose first dim does not divide into 3 microbatches: choose 2 or 4$"),
        ({"microbatches": 0}, "microbatches=0: give a whole number"),
        ({"microbatches": 2, "batch_argnums": 5}, "batch_argnums=5 names no argument"),
        ({"microbatches": 2, "batch_argnums": ()}, "no argument is a batch"),
    ],
    ids=str,
)
def test_microbatches_that_cannot_be_are_named(options: dict[str, Any], message: str) -> None:
    options = {"batch_argnums": 1} | options
    with pytest.raises(shardplan.ShardplanError, match=message):
        shardplan.plan(linear, W, X, cluster="2", **options)


@pytest.mark.slow
def test_a_plan_in_microbatches_is_saved_and_loaded(tmp_path: Any) -> None:
    step, args = mlp.train_step(concrete=True)
    plan = shardplan.plan(step, *args, cluster="2", microbatches=4)
    plan.save(tmp_path / "plan.json")
    again = shardplan.load(tmp_path / "plan.json", step, *args)
    assert again.microbatches == plan.microbatches
    assert again.microbatches.count == 4
    a, b = (jax.tree.leaves(p.jit(step, jax.devices()[:2])(*args)) for p in (plan, again))
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


def test_equations_of_a_cut_step_keep_their_source_lines() -> None:
    step, args = mlp.train_step()
    traced = trace_step(step, args)
    program = microbatched(traced.program, checked_microbatches(traced, 2, None))
    (loop,) = [op for op in program.ops if op.control == "scan"]
    lines = {str(op.source).rpartition(":")[0] for op in loop.bodies[0].ops if op.primitive == "dot_general"}
    assert all(line.endswith("mlp.py") for line in lines)
    assert any(op.backward for op in loop.bodies[0].ops)
