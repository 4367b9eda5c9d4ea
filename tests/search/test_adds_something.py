"""Three steps on which no single baseline is right: the plan is cheaper than all of them and the optimum of all layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.search.brute import Oracle

FOUR = """
name = "four"
[device]
name = "even"
memory_bytes_per_s = 1e12
memory_bytes = 80_000_000_000
launch_s = 1e-6
[device.flops_per_s]
float32 = 5e13
[[levels]]
name = "gpu"
size = 4
bandwidth_bytes_per_s = {bandwidth}
latency_s = 1e-6
kind = "switch"
"""


def _shape(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def _trained(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(params: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def small_weight_then_large() -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """Many rows through a small weight, then their few sums through a large one: the batch is cut first, the weight after."""

    def loss(w: Any, x: Any) -> Any:
        rows = jnp.tanh(x @ w["small"]) @ w["small"]
        return (rows.sum(1) @ w["large"]).sum()

    return _trained(loss), ({"small": _shape(64, 64), "large": _shape(64, 65536)}, _shape(64, 256, 64))


def two_branches() -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """One branch has rows and hardly a weight, the other a weight and hardly a row."""

    def loss(w: Any, batch: Any) -> Any:
        return jnp.tanh(batch["many"] @ w["thin"]).sum() + (batch["few"] @ w["wide"]).sum()

    batch = {"many": _shape(65536, 128), "few": _shape(16, 4096)}
    return _trained(loss), ({"thin": _shape(128, 128), "wide": _shape(4096, 4096)}, batch)


def large_head() -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """A wide output over pooled examples: its weight is cut, the examples before the pooling are cut too."""

    def loss(w: Any, x: Any) -> Any:
        pooled = jnp.maximum(x @ w["body"], 0.0).mean(axis=1)
        return jnp.square(pooled @ w["head"]).mean()

    return _trained(loss), ({"body": _shape(128, 128), "head": _shape(128, 32768)}, _shape(32, 1024, 128))


@pytest.mark.parametrize(
    ("case", "bandwidth"),
    [(small_weight_then_large, 2e10), (two_branches, 5e9), (two_branches, 1e11), (large_head, 2e10), (large_head, 1e11)],
)
def test_the_plan_is_cheaper_than_every_baseline_and_the_best_of_all_layouts(
    case: Callable[[], tuple[Callable[..., Any], tuple[Any, Any]]], bandwidth: float
) -> None:
    step, args = case()
    plan = shardplan.plan(step, *args, cluster=shardplan.Cluster.from_toml(FOUR.format(bandwidth=bandwidth)))
    best = min(b.step_time_s for b in plan.baselines)
    assert plan.step_time_s < 0.97 * best
    assert len(plan.baselines) >= 4
    found = Oracle(plan.extractor.problem).minimum()
    assert plan.step_time_s == pytest.approx(found.seconds, rel=1e-9, abs=1e-10)
