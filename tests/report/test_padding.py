"""What a padded dim would gain: the price is that of the step written with the padded size, under the same pins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.cost import TIME
from shardplan.report import explain
from tests.search import steps


def dense(width: int) -> tuple[Any, tuple[Any, ...]]:
    def loss_of(params: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ params["up"]).reshape(32, -1, width) @ params["down"]) ** 2)

    def step(params: Any, x: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    shapes = {"up": (256, width), "down": (width, 64)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return step, (params, jax.ShapeDtypeStruct((4096, 256), jnp.float32))


def loop(width: int) -> tuple[Any, tuple[Any, ...]]:
    """A scan over ``width`` rows, and a depthwise convolution of as many channels."""

    def step(w: Any, x: Any) -> Any:
        total, _ = jax.lax.scan(lambda c, row: (c @ w + row, None), x[0], x)
        image = jnp.broadcast_to(x.T[None, :8, None, :], (1, 8, 8, width))
        kernel = jnp.ones((3, 3, 1, width))
        found = jax.lax.conv_general_dilated(
            image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=width
        )
        return w, total.sum() + found.sum()

    return step, (jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((width, 64), jnp.float32))


PINNED = {"params/up": P(), "params/down": P()}


@pytest.mark.parametrize(
    ("factory", "options"),
    [(dense, {}), (dense, {"pins": PINNED}), (loop, {}), (dense, {"objective": "bytes"})],
    ids=["free", "pinned", "loop", "bytes"],
)
def test_a_padded_price_is_that_of_the_padded_step(factory: Any, options: dict[str, Any]) -> None:
    step, args = factory(2049)
    plan = shardplan.plan(step, *args, cluster="8", factors={"gpu": 8}, **options)
    wide, shapes = factory(2176)
    padded = shardplan.plan(wide, *shapes, cluster="8", factors={"gpu": 8}, **options)
    assert plan.session.padded_seconds(2049, 2176) == pytest.approx(padded.searched_s, rel=1e-9)


def test_a_loaded_plan_prices_padding_as_the_plan_did(tmp_path: Path) -> None:
    """On this cluster, the best padded plan by the plain sum takes longer than the best where communication hides."""
    step, args = dense(2049)
    cluster = steps.cluster("4", gbps=(20.0,), gflops=1e4)
    plan = shardplan.plan(step, *args, cluster=cluster, factors={})
    plan.save(tmp_path / "plan.json")
    again = shardplan.load(tmp_path / "plan.json", step, *args)
    overlapped, summed = plan.session.padded_seconds(2049, 2176), replace(plan.session, objective=TIME).padded_seconds(2049, 2176)
    assert overlapped is not None
    assert summed is not None
    assert overlapped < summed * (1 - 1e-3)
    assert again.session.padded_seconds(2049, 2176) == pytest.approx(overlapped, rel=1e-9)


def test_pins_hold_in_the_padded_plan() -> None:
    step, args = dense(2049)
    free, held = (shardplan.plan(step, *args, cluster="8", pins=pins) for pins in ({}, {"x": P(None, "gpu"), **PINNED}))
    cheaper, dearer = free.session.padded_seconds(2049, 2176), held.session.padded_seconds(2049, 2176)
    assert cheaper is not None
    assert dearer is not None
    assert cheaper < dearer


def test_a_file_prices_the_dim_of_the_largest_array_alone() -> None:
    def step(a: Any, b: Any) -> Any:
        return a - 0.1, b - 0.1, (a @ a.T).sum() + (b @ b.T).sum()

    args = [jax.ShapeDtypeStruct((n, 64), jnp.float32) for n in (2049, 4099)]
    plan = shardplan.plan(step, *args, cluster="8")
    told = {path: plan.explain(path) for path in ("a", "b")}
    said = explain.explain_all(plan.completed(), plan.session)
    assert said["b"] == told["b"]
    assert "padded to 2176 it would" in said["a"]
    assert ("a step" in told["a"].split("2176")[1], "a step" in said["a"].split("2176")[1].split("\n")[0]) == (True, False)
    hurried = shardplan.plan(step, *args, cluster="8", time_budget_s=60.0)
    assert all(
        "it would, " not in text and "it would: " not in text
        for text in explain.explain_all(hurried.completed(), hurried.session).values()
    )


def test_what_nobody_can_tell_is_not_priced() -> None:
    """A small number stands in a program for other things too; 2080 that is reshaped to 32 times 65 cannot grow."""
    few = shardplan.plan(lambda w: w - 0.1, jax.ShapeDtypeStruct((9,), jnp.float32), cluster="8")
    assert "9 does not divide by gpu=8; padded to 16 it would\n" in few.explain("w") + "\n"
    step, args = dense(2048)
    plan = shardplan.plan(step, args[0], jax.ShapeDtypeStruct((2080, 256), jnp.float32), cluster="3x3")
    assert plan.session.padded_seconds(2080, 2304) is None
    assert "padded to 2304 it would\n" in plan.explain("x")


def test_what_does_not_fit_padded_says_so() -> None:
    given: dict[str, Any] = {"cluster": "8", "pins": {"w": P()}, "donate_argnums": 0}
    args = (lambda w: w - 0.1, jax.ShapeDtypeStruct((2049, 64), jnp.float32))
    least = shardplan.plan(*args, **given).peak_bytes
    plan = shardplan.plan(*args, **given, memory_limit=least)
    assert "padded to 2176 it would, but no such plan fits in memory" in plan.explain("w")
