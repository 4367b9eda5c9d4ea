"""`Plan.check` and ``parallelize(check="first")``: a right plan passes on the user's own arguments, a wrong one is an error that
names the leaf, and a check that cannot run says so.
"""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardplan
from models import mlp
from shardplan import _jax
from shardplan.calibrate.steps import step_seconds
from shardplan.verify.judge import difference, furthest
from shardplan.verify.verify import verify
from tests.nnx_training import train

SPLIT: dict[str, Any] = {"cluster": "2x2", "pins": {"w": P("gpu"), "x": P("node", "gpu")}}


def product(w: jax.Array, x: jax.Array) -> dict[str, jax.Array]:
    return {"w": w * 2, "x": x + 1, "y": x @ w, "total": jnp.sum(x)}


def arrays(dtype: str = "float32") -> tuple[jax.Array, jax.Array]:
    return jax.random.normal(jax.random.key(0), (16, 8)).astype(dtype), jax.random.normal(jax.random.key(1), (32, 16)).astype(
        dtype
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_right_plan_passes_and_the_arguments_stay(dtype: str, devices: list[Any]) -> None:
    args = arrays(dtype)
    plan = shardplan.plan(product, *args, **SPLIT, donate_argnums=(0, 1))
    judged = plan.check(args, devices=devices[:4])
    assert (judged.unequal, judged.compared) == ((), 16 * 8 + 32 * 16 + 32 * 8 + 1)
    assert not any(x.is_deleted() for x in args)
    assert plan.check(args).unequal == ()


def test_a_wrong_plan_is_an_error_that_names_the_leaf_and_its_values(devices: list[Any]) -> None:
    args = arrays()
    plan = shardplan.plan(product, *args, **SPLIT)
    with pytest.raises(shardplan.CheckError, match=r"\w\[\d+, \d+\] is -?\d.* on one device and -?\d.* under the plan") as caught:
        plan.check(args, devices=devices, drop=0, backend="specs")
    error = caught.value
    assert error.path in error.unequal
    expected = np.asarray(product(*args)[error.path])[error.index]
    assert error.single == pytest.approx(float(expected), rel=1e-4)
    assert abs(error.single - error.sharded) > error.tolerance


def test_a_deleted_array_is_named_wherever_its_values_are_read(devices: list[Any]) -> None:
    w, x = arrays()
    plan = shardplan.plan(product, w, x, **SPLIT)
    mine = shardplan.parallelize(**SPLIT, check="first")(product)
    x.delete()
    for read in (
        lambda: mine(w, x),
        lambda: plan.check((w, x)),
        lambda: verify(plan, product, (w, x), devices=devices),
        lambda: plan.put((w, x)),
        lambda: plan.put_local(x),
        lambda: step_seconds({"plan": plan}, product, (w, x), devices=devices),
    ):
        with pytest.raises(shardplan.ShardplanError, match=r"^x was donated to an earlier call and is deleted, .*jnp\.copy"):
            read()


def test_a_donated_result_of_put_may_delete_what_was_put() -> None:
    w, x = arrays()
    plan = shardplan.plan(product, w, x, cluster="2", pins={"w": P(), "x": P()}, donate_argnums=0)
    plan.jit(product)(*plan.put((w, x)))
    with pytest.raises(shardplan.ShardplanError, match=r"w was donated .* or it shares memory with an array that was"):
        plan.check((w, x))


def test_a_step_that_returns_nothing_proves_nothing(devices: list[Any]) -> None:
    w, x = arrays()
    plan = shardplan.plan(nothing, w, x, cluster="2x2")
    for compared in (lambda: plan.check((w, x)), lambda: verify(plan, nothing, (w, x), devices=devices)):
        with pytest.raises(shardplan.ShardplanError, match="the step returns no array, so there is nothing to compare"):
            compared()


def nothing(w: jax.Array, x: jax.Array) -> None:
    """A step whose ``return`` was forgotten."""
    product(w, x)


def test_what_does_not_fit_on_one_device_is_an_error(devices: list[Any]) -> None:
    args = arrays()
    plan = shardplan.plan(product, *args, **SPLIT, memory_limit="4KiB")
    with pytest.raises(
        shardplan.UncheckedError, match=r"not checked: the step on one device needs .* held there, .*4\.00 KiB"
    ) as caught:
        plan.check(args, devices=devices)
    assert caught.value.needed_bytes is not None
    assert caught.value.limit_bytes == 4 * 1024 < caught.value.needed_bytes


def test_shapes_and_other_arguments_are_refused(devices: list[Any]) -> None:
    w, x = arrays()
    plan = shardplan.plan(product, w, x, **SPLIT)
    with pytest.raises(shardplan.UncheckedError, match="shapes without values"):
        plan.check((w, jax.ShapeDtypeStruct(x.shape, x.dtype)))
    with pytest.raises(shardplan.ArgumentError, match=r"x is float32\[8, 16\]"):
        plan.check((w, x[:8]))
    with pytest.raises(shardplan.ShardplanError, match="another structure"):
        plan.check(((w, w), x))


def test_a_step_without_a_finite_number_proves_nothing(devices: list[Any]) -> None:
    args = (jnp.full((16,), jnp.nan),)
    plan = shardplan.plan(lambda x: x * 2, *args, cluster="2")
    with pytest.raises(shardplan.CheckError, match="proves nothing"):
        plan.check(args, devices=devices)


def test_odd_sizes_keys_names_and_a_mesh_of_the_users(devices: list[Any]) -> None:
    """Padded blocks, random keys, arguments by name, and devices in the user's own order."""

    def step(key: jax.Array, w: jax.Array, *, x: jax.Array) -> Any:
        key, used = jax.random.split(key)
        return key, x @ w + jax.random.normal(used, (30, 6)), jnp.argmax(x, 1)

    mesh = Mesh(np.array(devices[:4][::-1]).reshape(2, 2), ("rows", "columns"))
    args, kwargs = (jax.random.key(3), jnp.ones((14, 6))), {"x": jax.random.normal(jax.random.key(4), (30, 14))}
    plan = shardplan.plan(step, *args, cluster=mesh, kwargs=kwargs, pins={"x": P("rows", "columns")}, donate_argnums=0)
    judged = plan.check(args, kwargs=kwargs)
    assert judged.unequal == ()
    assert judged.compared == 30 * 6 + 30 + 2


@pytest.mark.slow
def test_a_plan_with_groups_of_devices_is_checked_too(devices: list[Any]) -> None:
    step, args = mlp.train_step(layers=4, batch=32, width=32, concrete=True)
    plan = shardplan.plan(step, *args, cluster="8", axes={"stage": 2}, microbatches=2)
    assert plan.check(args, devices=devices).unequal == ()


# -- the decorator -----------------------------------------------------------------------------------------------------


def test_the_first_call_checks_and_later_calls_only_run(devices: list[Any]) -> None:
    step, (state, batch) = mlp.train_step(batch=64, width=64, concrete=True)
    expected, _ = jax.jit(step)(state, batch)
    parallel = shardplan.parallelize("2x4", devices=devices, donate_argnums=0, check="first")(step)
    parallel.prepare(state, batch)
    state, _ = parallel(state, batch)
    assert parallel.cache_size() == 1
    before = _jax.programs_compiled()
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-6)
    parallel(state, batch)
    assert _jax.programs_compiled() == before


def test_an_nnx_step_is_checked_before_its_objects_change(devices: list[Any]) -> None:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up, self.drop = nnx.Linear(16, 16, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.drop(self.up(x))

    def losses(run: Any) -> list[float]:
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
        return [float(run(model, optimizer, jnp.ones((32, 16)))) for _ in range(3)]

    checked = shardplan.parallelize("2x4", devices=devices, donate_argnums=(0, 1), check="first")(train)
    np.testing.assert_allclose(losses(checked), losses(nnx.jit(train)), rtol=1e-4)


def test_the_first_call_of_a_wrong_plan_is_an_error_and_so_is_the_next(
    devices: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_jit = shardplan.Plan.jit
    monkeypatch.setattr(
        shardplan.Plan, "jit", lambda self, *args, **named: plan_jit(self, *args, **named, drop=0, backend="specs")
    )
    args = arrays()
    parallel = shardplan.parallelize(devices=devices, check="first", **SPLIT)(product)
    for _ in range(2):
        with pytest.raises(shardplan.CheckError):
            parallel(*args)
    assert shardplan.parallelize(devices=devices, **SPLIT)(product)(*args)["y"].shape == (32, 8)


def test_what_cannot_be_checked_runs_with_a_warning(devices: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    args = arrays()
    parallel = shardplan.parallelize(devices=devices, check="first", memory_limit="4KiB", **SPLIT)(product)
    for _ in range(2):
        parallel(*args)
    said = [r.message for r in caplog.records if r.levelno == logging.WARNING and "not checked" in r.message]
    assert len(said) == 1
    assert "needs" in said[0]


def test_inside_a_traced_function_nothing_is_checked_until_a_call_has_values(
    devices: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    args = arrays()
    parallel = shardplan.parallelize(devices=devices, check="first", **SPLIT)(product)
    jax.jit(lambda w, x: parallel(w, x)["total"])(*args)
    assert [r.message for r in caplog.records if "inside a traced function" in r.message]
    parallel(*args)
    assert not parallel._unchecked


def test_another_word_for_check_is_refused() -> None:
    with pytest.raises(shardplan.ShardplanError, match="unsupported check='always'"):
        shardplan.parallelize("2x4", check="always")  # type: ignore[arg-type]


def test_the_place_that_is_named_is_the_furthest() -> None:
    a, b = np.array([[1.0, np.inf], [np.nan, 2.0]]), np.array([[1.0, np.inf], [np.nan, 5.0]])
    assert (difference(a, b), furthest(a, b, 3.0)) == (3.0, (1, 1))
    b[0, 1] = 0.0
    assert (difference(a, b), furthest(a, b, np.inf)) == (np.inf, (0, 1))
    assert furthest(np.array(True), np.array(False), difference(np.array(True), np.array(False))) == ()
