"""Assertions about plans: each passes where it holds, and its failure names the arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.testing import assert_communication_at_most, assert_fits, assert_no_collective, assert_plan_unchanged


def step(state: dict[str, Any], batch: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    """A step of two layers, one of them called attention."""

    def loss(state: dict[str, Any]) -> jax.Array:
        return jnp.mean((jnp.tanh(batch @ state["attention"]) @ state["mlp"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda x, g: x - 0.1 * g, state, grads), value


ARGS = ({"attention": jnp.zeros((64, 128)), "mlp": jnp.zeros((128, 64))}, jnp.zeros((32, 64)))


@pytest.fixture(scope="module")
def plan() -> Any:
    """A data-parallel plan: both gradients are reduced, in one bundle."""
    return shardplan.plan(step, *ARGS, cluster="2x2", donate_argnums=0).as_baseline("data parallel")


def test_a_plan_that_fits_passes_and_one_that_does_not_names_what_it_holds(plan: Any) -> None:
    assert_fits(plan)
    assert_fits(plan, plan.peak_bytes)
    with pytest.raises(AssertionError, match=r"over the limit of 10\.0 KiB") as failure:
        assert_fits(plan, "10KiB")
    assert "state/{attention,mlp}" in str(failure.value)


def test_a_plan_that_sends_too_much_names_the_collectives(plan: Any) -> None:
    assert plan.communication_bytes > 0
    assert_communication_at_most(plan, int(plan.communication_bytes) + 1)
    with pytest.raises(AssertionError, match="over the limit of 0 B"):
        assert_communication_at_most(plan, 0)
    with pytest.raises(AssertionError, match=r"a device sends .* in a step") as failure:
        assert_communication_at_most(plan, 1024)
    assert "all-reduce over node x gpu" in str(failure.value)


def test_every_array_of_a_bundle_counts(plan: Any) -> None:
    reduced = [c for c in plan.collectives if c.along]
    assert len(reduced) == 1, "both gradients travel together"
    for pattern in ("*attention*", "*mlp*", "*/mlp", "state/attention", "state/mlp"):
        with pytest.raises(AssertionError, match="no collective of"):
            assert_no_collective(plan, pattern)
    with pytest.raises(AssertionError, match=r"test_testing\.py"):
        assert_no_collective(plan, "*test_testing.py*", kind="all-reduce")
    with pytest.raises(shardplan.ShardplanError, match=r"'\*embeding\*' matches no path .* and no source line of the step"):
        assert_no_collective(plan, "*embeding*")
    with pytest.raises(shardplan.ShardplanError, match=r"no collective 'allreduce' \(nearest: all-reduce"):
        assert_no_collective(plan, kind="allreduce")
    assert_no_collective(plan, kind="all-to-all")


def test_a_plan_is_compared_with_the_saved_one(plan: Any, tmp_path: Path) -> None:
    file = tmp_path / "plans" / "step.json"
    with pytest.raises(AssertionError, match="no saved plan"):
        assert_plan_unchanged(plan, file)
    assert_plan_unchanged(plan, file, update=True)
    again = shardplan.plan(step, *ARGS, cluster="2x2", donate_argnums=0).as_baseline("data parallel")
    assert_plan_unchanged(again, file)
    other = shardplan.plan(step, *ARGS, cluster="2x2", pins={"batch": P("gpu")}, donate_argnums=0)
    with pytest.raises(AssertionError, match=r"(?s)batch: P\(\('node', 'gpu'\)\) -> P\('gpu'\).*--update-plans"):
        assert_plan_unchanged(other, file)
    file.write_text("{}")
    with pytest.raises(shardplan.PlanFileError, match="--update-plans"):
        assert_plan_unchanged(plan, file)


def test_the_arrays_of_a_pipeline_have_their_paths() -> None:
    """A gradient that a stage adds up over microbatches is handed on from its loop to the update."""
    axes = {"stage": 2, "data": 2}
    pipeline = shardplan.plan(step, *ARGS, cluster="2x2", axes=axes, microbatches=4, donate_argnums=0)
    assert {path for c in pipeline.collectives for path in c.paths} >= {"state/attention", "state/mlp"}
    for path in ("state/attention", "state/mlp"):
        with pytest.raises(AssertionError, match="no collective of"):
            assert_no_collective(pipeline, path)
