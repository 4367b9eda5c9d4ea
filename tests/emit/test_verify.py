"""A sharded step equals the single-device step, sends what was predicted, and a step that lacks one exchange is caught."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.emit import verify as module
from shardplan.emit.mutate import DroppingEmitter
from shardplan.emit.verify import drawn, verify
from shardplan.errors import DeviceError, ShardplanError
from shardplan.report.text import verified_text

PINS = {"batch/*": P(("node", "gpu")), "state/params/*": P("gpu")}


def small(batch: int = 64, dtype: str = "float32") -> tuple[Any, tuple[Any, ...]]:
    """A regression by two layers with momentum, a step counter and a random key in its state, computed in ``dtype``."""

    def loss_of(params: Any, batch: Any) -> Any:
        params, batch = jax.tree.map(lambda x: x.astype(dtype), (params, batch))
        return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)

    def step(state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
        key, _ = jax.random.split(state["key"])
        return {"params": params, "momentum": momentum, "count": state["count"] + 1, "key": key}, loss

    rng = np.random.default_rng(0)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), "float32")

    params = {"up": array(16, 32), "down": array(32, 8)}
    state = {
        "params": params,
        "momentum": jax.tree.map(jnp.zeros_like, params),
        "count": jnp.zeros((), "int32"),
        "key": jax.random.key(1),
    }
    return step, (state, {"x": array(batch, 16), "y": array(batch, 8)})


@pytest.fixture(scope="module")
def planned(devices: list[Any]) -> tuple[Any, Any, tuple[Any, ...]]:
    step, args = small(batch=2048)
    slow = shardplan.Cluster.load("gcp-a100").resized(2, 2)  # gradients are reduced rather than the batch gathered
    return shardplan.plan(step, *args, cluster=slow, pins=PINS), step, args


def test_a_planned_step_is_the_step(planned: Any) -> None:
    plan, step, args = planned
    found = verify(plan, step, args)
    assert (found.equal, found.unequal, found.steps) == (True, (), 3)
    assert (found.recompiles, found.moved, found.passed) == (0, (), True)
    assert found.max_error < 1e-4
    assert found.predicted_bytes == pytest.approx(found.measured_bytes, rel=0.06)
    assert found.predicted_bytes == pytest.approx(sum(b.predicted for b in found.collectives.values()))
    assert found.measured_bytes == pytest.approx(sum(b.measured for b in found.collectives.values()))


def test_leaving_out_any_one_exchange_is_noticed(planned: Any) -> None:
    plan, step, args = planned
    emitter = DroppingEmitter(plan.traced.program, plan.extractor, plan.decisions, plan.mesh(), dropped=-1)
    jax.eval_shape(emitter, *jax.tree.leaves(args))
    assert len(emitter.exchanges) >= 4
    assert not emitter.skipped
    caught = [not verify(plan, step, args, drop=n).equal for n in range(len(emitter.exchanges))]
    assert all(caught), [what for what, seen in zip(emitter.exchanges, caught, strict=True) if not seen]


def test_leaving_out_any_one_exchange_is_noticed_in_bfloat16(devices: list[Any]) -> None:
    step, args = small(batch=2048, dtype="bfloat16")
    plan = shardplan.plan(step, *args, cluster=shardplan.Cluster.load("gcp-a100").resized(2, 2), pins=PINS)
    assert verify(plan, step, args).passed
    emitter = DroppingEmitter(plan.traced.program, plan.extractor, plan.decisions, plan.mesh(), dropped=-1)
    jax.eval_shape(emitter, *jax.tree.leaves(args))
    caught = [not verify(plan, step, args, drop=n).equal for n in range(len(emitter.exchanges))]
    assert len(caught) >= 4
    assert all(caught), [what for what, seen in zip(emitter.exchanges, caught, strict=True) if not seen]


def test_donated_state_is_not_used_again(devices: list[Any]) -> None:
    step, args = small()
    plan = shardplan.plan(step, *args, cluster="2x2", pins=PINS, donate_argnums=(0,))
    found = verify(plan, step, args)
    assert found.passed
    assert (
        found.measured_peak_bytes < verify(shardplan.plan(step, *args, cluster="2x2", pins=PINS), step, args).measured_peak_bytes
    )
    assert all(not x.is_deleted() for x in jax.tree.leaves(args))


def test_shapes_are_drawn(planned: Any) -> None:
    plan, step, args = planned
    shapes = jax.eval_shape(lambda *a: a, *args)
    assert verify(plan, step, shapes, steps=1).equal
    values = drawn(jax.tree.leaves(shapes))
    again = drawn(jax.tree.leaves(shapes))
    for x, y in zip(values, again, strict=True):
        a, b = (jax.random.key_data(v) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v for v in (x, y))
        np.testing.assert_array_equal(a, b)


def test_too_few_devices_and_no_steps_are_refused(planned: Any) -> None:
    plan, step, args = planned
    with pytest.raises(DeviceError, match=r"4.*2|2.*4"):
        verify(plan, step, args, devices=jax.devices()[:2])
    with pytest.raises(ShardplanError, match="steps=0"):
        verify(plan, step, args, steps=0)


def test_differences_of_integers_and_of_what_is_not_finite() -> None:
    error = module._error
    assert error(np.array([1, 2]), np.array([1, 2])) == 0
    assert error(np.array([1, 2]), np.array([1, 4])) == 2
    assert error(np.array([np.nan, np.inf]), np.array([np.nan, np.inf])) == 0
    assert error(np.array([np.nan]), np.array([1.0])) == np.inf
    assert error(np.array([], np.float32), np.array([], np.float32)) == 0


GPT = {"layers": 1, "width": 256, "sequence": 64, "batch": 32}
DEEP = {**GPT, "layers": 2}
MODELS = [
    ("mlp", {}, "2x4"),
    ("moe", {}, "2x4"),
    ("gpt", {}, "2x4"),
    ("gpt", GPT, "2x4"),
    ("gpt", GPT, "2x2x2"),
    ("gpt", GPT, "8"),
    ("gpt", {**DEEP, "scan": True}, "2x4"),
    ("gpt", {**GPT, "remat": True}, "2x4"),
    ("gpt", {**DEEP, "scan": True, "remat": True}, "2x4"),
    ("gpt", {**GPT, "dtype": "bfloat16"}, "2x4"),
    ("gpt", {"dtype": "bfloat16"}, "2x4"),
    ("gpt", {**GPT, "dropout": 0.1}, "2x4"),
    ("gpt_linen", GPT, "2x4"),
    ("wresnet", {}, "2x4"),
    ("wresnet", {}, "2x2x2"),
    ("wresnet", {}, "8"),
]
QUICK = {("mlp", "2x4", 0)}


def _named(name: str, options: dict[str, Any], cluster: str) -> Any:
    shown = ",".join(f"{k}={v}" for k, v in options.items())
    quick = (name, cluster, len(options)) in QUICK
    return pytest.param(name, options, cluster, id=f"{name}({shown})-{cluster}", marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "options", "cluster"), [_named(*row) for row in MODELS])
def test_a_model_is_equal_and_sends_what_was_predicted(
    devices: list[Any], name: str, options: dict[str, Any], cluster: str
) -> None:
    step, args = importlib.import_module(f"models.{name}").train_step(**options, concrete=True)
    plan = shardplan.plan(step, *args, cluster=cluster)
    found = verify(plan, step, args)
    assert found.passed, found
    assert found.measured_bytes == pytest.approx(found.predicted_bytes, rel=0.05)


def test_a_step_without_a_finite_number_proves_nothing(devices: list[Any]) -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return w - jnp.log(-jnp.abs(x)).mean(), (w * jnp.nan).sum()

    args = jnp.ones((64, 64)), jnp.ones((64, 64))
    found = verify(shardplan.plan(step, *args, cluster="2x4"), step, args, devices=devices)
    assert (found.compared, found.equal, found.passed) == (0, False, False)
    assert "NOT COMPARED" in verified_text(found.json)
