"""Checks of plans whose step is too large for one device: a shrunken copy with the plan's layouts runs, a fault is found in it
too, and where no copy can take its place, the error says why.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardplan
from models import mlp
from tests.nnx_training import train

SAMPLES, LAYERS = "batch 256 -> 4", "batch 16 -> 2, layers 12 -> 2"


def random(*shape: int) -> np.ndarray:
    """Numbers on the host, so that no device holds them already."""
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32) / 5


def descend(loss: Any, w: Any) -> Any:
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, jax.grad(loss)(w))


def two_products(w: Any, x: Any) -> Any:
    return descend(lambda w: jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2), w)


def stacked(w: Any, x: Any, length: int | None = None) -> Any:
    def layer(h: Any, own: Any) -> tuple[Any, None]:
        return jnp.tanh(h @ own["kernel"] + own["bias"]), None

    return descend(lambda w: jnp.mean(jax.lax.scan(layer, x, w, length)[0] ** 2), w)


Case = tuple[Any, tuple[Any, ...]]


@pytest.fixture(scope="module")
def samples() -> Case:
    args = {"up": random(16, 32), "down": random(32, 16)}, random(256, 16)
    pins = {"x": P(("node", "gpu"))}
    return shardplan.plan(two_products, *args, cluster="2x2", memory_limit="40KiB", pins=pins), args


@pytest.fixture(scope="module")
def layers() -> Case:
    args = {"kernel": random(12, 32, 32), "bias": random(12, 32)}, random(16, 32)
    pins = {"*kernel": P(None, ("node", "gpu"))}
    return shardplan.plan(stacked, *args, cluster="2x2", memory_limit="80KiB", pins=pins, donate_argnums=0), args


@pytest.mark.parametrize(("case", "text"), [("samples", SAMPLES), ("layers", LAYERS)])
def test_a_shrunken_copy_with_the_plans_layouts_runs(
    case: str, text: str, request: pytest.FixtureRequest, devices: list[Any]
) -> None:
    plan, args = request.getfixturevalue(case)
    judged = plan.check(args)
    assert judged.unequal == ()
    assert ", ".join(map(str, judged.fewer)) == text
    assert judged.ran.startswith(f"a shrunken copy ({text}), which has the layouts")


@pytest.mark.parametrize(("case", "text"), [("samples", SAMPLES), ("layers", LAYERS)])
def test_a_fault_is_found_in_the_copy(case: str, text: str, request: pytest.FixtureRequest, devices: list[Any]) -> None:
    plan, args = request.getfixturevalue(case)
    with pytest.raises(shardplan.CheckError, match=rf"in a shrunken copy \({text}\): \w+\[.* under the plan") as caught:
        plan.check(args, drop=0)
    assert caught.value.path in args[0]


def test_a_step_that_says_how_many_layers_it_has_is_not_checked(layers: Case, devices: list[Any]) -> None:
    """Its batch can be cut, but the state is still too large."""
    plan, args = layers
    fixed = partial(stacked, length=12)
    written = shardplan.plan(fixed, *args, cluster="2x2", memory_limit="80KiB", pins=plan.pins, donate_argnums=0)
    text = rf"on one device needs .*; a shrunken copy \({LAYERS}\) cannot take its place: the step could not be traced"
    with pytest.raises(shardplan.UncheckedError, match=text) as caught:
        written.check(args)
    assert (caught.value.needed_bytes or 0) > (caught.value.limit_bytes or 0)


def test_the_first_call_checks_a_copy_with_a_warning(devices: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    """An nnx step; its objects change only where the whole step runs."""

    def loss(run: Any) -> float:
        model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        return float(run(model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param), random(1024, 16)))

    parallel = shardplan.parallelize("2x2", devices=devices, donate_argnums=(0, 1), check="first", memory_limit="96KiB")(train)
    np.testing.assert_allclose(loss(parallel), loss(nnx.jit(train)), rtol=1e-4)
    (said,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert "does not fit on one device; what was checked is a shrunken copy (batch 1024 -> " in said


@pytest.mark.slow
def test_a_plan_with_groups_of_devices_has_a_copy_too(devices: list[Any]) -> None:
    step, args = mlp.train_step(layers=4, batch=512, width=32, concrete=True)
    args = jax.tree.map(np.asarray, args)
    plan = shardplan.plan(step, *args, cluster="8", axes={"stage": 2}, microbatches=2, memory_limit="200KiB")
    judged = plan.check(args, devices=devices)
    assert judged.unequal == ()
    assert [str(own) for own in judged.fewer] == ["batch 512 -> 8"]
