"""``placement="auto"``: pipelines and branches are taken where they win, and only there."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import shardplan
from models import mlp, two_tower
from shardplan.constants import CONSTANTS
from shardplan.frontend.nnx_state import trace_step
from shardplan.graph import flatten
from shardplan.mesh import Cluster
from shardplan.search.coarsening.layers import equal_blocks
from shardplan.shell.placed_plan import PlacedPlan
from shardplan.shell.placement_search import microbatch_counts, stage_counts
from shardplan.shell.plan_of_step import Plan
from shardplan.verify.verify import verify
from tests.machines import machine


def slow_nodes(shape: str = "2x2:eager") -> Cluster:
    """Nodes behind links that take as long for a few kilobytes as a device for a layer."""
    own = machine(shape)
    flops = {dtype: 6 * rate for dtype, rate in own.device.flops_per_s.items()}
    device = replace(own.device, flops_per_s=flops, memory_bytes_per_s=6 * own.device.memory_bytes_per_s)
    return replace(own, levels=(replace(own.levels[0], bandwidth_bytes_per_s=1e6), *own.levels[1:]), device=device)


def deep(**options: Any) -> tuple[Any, Any]:
    return mlp.train_step(layers=6, width=64, batch=64, **options)


def rows(plan: Any) -> dict[str, Any]:
    return {row.what: row for row in plan.placements_tried}


@pytest.mark.slow
def test_stages_win_where_nodes_are_far_apart() -> None:
    step, args = deep(concrete=True)
    plan = shardplan.plan(step, *args, cluster=slow_nodes(), placement="auto", donate_argnums=(0,))
    assert isinstance(plan, PlacedPlan)
    assert plan.devices == ((0, 1), (2, 3))
    tried = rows(plan)
    assert plan.step_time_s * (1 + CONSTANTS.model_error) < tried["all devices"].step_time_s
    (own,) = [row for row in plan.placements_tried if not row.why_not]
    assert (own.step_time_s, own.peak_bytes) == (plan.step_time_s, plan.peak_bytes)
    assert own.what in plan.text()
    assert plan.peak_bytes <= plan.groups[0].memory_limit
    assert verify(plan, step, args).passed


def test_the_plan_on_all_devices_stays_where_stages_do_not_win() -> None:
    step, args = mlp.train_step(layers=4)
    plan = shardplan.plan(step, *args, cluster="2x2", placement="auto")
    one = shardplan.plan(step, *args, cluster="2x2")
    assert isinstance(plan, Plan)
    assert (plan.step_time_s, plan.flat_in_specs) == (one.step_time_s, one.flat_in_specs)
    assert not rows(plan)["all devices"].why_not
    assert all(row.why_not for what, row in rows(plan).items() if what != "all devices")
    assert one.placements_tried == ()


@pytest.mark.slow
def test_branches_win_where_towers_are_small() -> None:
    step, args = two_tower.train_step()
    plan = shardplan.plan(step, *args, cluster="2x4", placement="auto")
    assert isinstance(plan, PlacedPlan)
    assert plan.origin.startswith("branches on")
    assert verify(plan, step, args).passed


def normalised() -> tuple[Any, tuple[Any, ...]]:
    """Layers that are normalised over the whole batch."""

    def step(weights: list[jax.Array], x: jax.Array) -> Any:
        def loss(weights: list[jax.Array]) -> jax.Array:
            y = x
            for w in weights:
                y = jnp.tanh((y - jnp.mean(y, 0)) @ w)
            return jnp.mean(y**2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value

    return step, ([jnp.eye(32) for _ in range(4)], jnp.ones((32, 32)))


def test_a_step_that_needs_the_whole_batch_has_no_pipeline_and_the_report_says_why() -> None:
    step, args = normalised()
    plan = shardplan.plan(step, *args, cluster=slow_nodes(), placement="auto")
    assert isinstance(plan, Plan)
    assert "cannot be cut into microbatches: at" in rows(plan)["2 stages"].why_not
    with pytest.raises(shardplan.ShardplanError, match="cannot be cut into microbatches"):
        shardplan.plan(step, *args, cluster=slow_nodes(), placement="auto", microbatches=2)


@pytest.mark.slow
def test_microbatches_on_all_devices_are_taken_where_the_whole_batch_does_not_fit() -> None:
    step, args = mlp.train_step(layers=4, width=16, batch=256, classes=512)
    plan = shardplan.plan(step, *args, cluster=machine("2x2:eager"), placement="auto", memory_limit=180000, donate_argnums=(0,))
    assert isinstance(plan, Plan)
    assert plan.microbatches.count > 1
    assert rows(plan)["all devices"].peak_bytes > 180000


@pytest.mark.slow
def test_what_fits_in_no_microbatches_is_refused() -> None:
    step, args = mlp.train_step(layers=4, width=16, batch=256, classes=512)
    with pytest.raises(shardplan.MemoryLimitError):
        shardplan.plan(step, *args, cluster=machine("2x2:eager"), placement="auto", memory_limit=1000, donate_argnums=(0,))


def test_an_interrupt_keeps_the_best_so_far() -> None:
    step, args = deep()

    def observer(what: str, part: float) -> None:
        assert 0 <= part <= 1
        if what.startswith("2 stages, 4 microbatches"):
            raise KeyboardInterrupt

    plan = shardplan.plan(step, *args, cluster=slow_nodes(), placement="auto", observer=observer)
    assert plan.stopped == "interrupted"
    assert "2 stages, 2 microbatches" in rows(plan)
    assert rows(plan)["others"].why_not == "not tried: interrupted"


def test_a_time_budget_ends_with_a_plan() -> None:
    step, args = deep()
    plan = shardplan.plan(step, *args, cluster=slow_nodes(), placement="auto", time_budget_s=1e-3)
    assert isinstance(plan, Plan)
    assert plan.stopped == "time budget"
    assert rows(plan)["others"].why_not == "not tried: the time budget is over"


@pytest.mark.parametrize(
    "options",
    [
        {"axes": {"data": 4}},
        {"factors": {"gpu": 2}},
        {"backend": "specs"},
        {"remat": "auto"},
        {"axes": {"stage": 2}, "microbatches": 2},
    ],
    ids=str,
)
def test_options_of_one_mesh_are_refused(options: dict[str, Any]) -> None:
    step, args = mlp.train_step()
    with pytest.raises(shardplan.ShardplanError, match="cannot be given where ops run on groups of devices"):
        shardplan.plan(step, *args, cluster="2x2", placement="auto", **options)


def test_stages_divide_the_slowest_level_and_have_a_block_each() -> None:
    assert stage_counts(Cluster.load("8x4"), 6) == (2, 4)
    assert stage_counts(Cluster.load("1x4"), 4) == (2, 4)
    assert stage_counts(Cluster.load("3"), 2) == ()
    step, args = mlp.train_step(batch=24)
    traced = trace_step(step, args)
    batch = [n for n, path in enumerate(traced.program.input_paths) if path.startswith("batch")]
    assert microbatch_counts(traced.program, batch, 2) == (2, 4, 8)
    assert microbatch_counts(traced.program, batch, 3) == (3, 6, 12, 24)
    assert microbatch_counts(traced.program, batch, 5) == (6, 12, 24)
    assert microbatch_counts(traced.program, batch, 16) == (24,)
    assert microbatch_counts(traced.program, batch, 25) == ()


def test_microbatches_are_chosen_for_a_number_of_stages() -> None:
    step, args = mlp.train_step(layers=2, width=16, batch=12)
    plan = shardplan.plan(step, *args, cluster=machine("2:eager"), axes={"stage": 2})
    assert isinstance(plan, PlacedPlan)
    (own,) = [row for row in plan.placements_tried if not row.why_not]
    assert own.what == f"2 stages, {plan.microbatches.count} microbatches"
    assert own.step_time_s == min(row.step_time_s for row in plan.placements_tried if row.step_time_s is not None)
    assert {"2 stages, 2 microbatches", "2 stages, 4 microbatches"} <= rows(plan).keys()
    step, args = mlp.train_step(layers=2, width=16, batch=1)
    with pytest.raises(shardplan.MicrobatchError, match="does not divide into 2 to 16 microbatches"):
        shardplan.plan(step, *args, cluster=machine("2:eager"), axes={"stage": 2})


def test_blocks_are_counted_in_the_forward_pass() -> None:
    """The first layer and the last one are of other kinds."""
    step, args = deep()
    assert equal_blocks(flatten(trace_step(step, args).program)) == 4


def test_the_model_s_error_is_the_one_that_the_readme_states() -> None:
    text = " ".join((Path(shardplan.__file__).parent.parent / "README.md").read_text().split())
    assert re.search(rf"median error is {CONSTANTS.model_error:.1%}, with no overlap", text)


# -- the decorator -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"axes": {"stage": 2}, "microbatches": 4}, pytest.param({"placement": "auto"}, marks=pytest.mark.slow)], ids=str
)
def test_a_decorated_step_runs_in_stages(options: dict[str, Any]) -> None:
    step, args = deep(concrete=True)
    run = shardplan.parallelize(cluster=slow_nodes(), devices=jax.devices()[:4], donate_argnums=(0,), **options)(step)
    state, other = (jax.tree.map(jnp.copy, args[0]) for _ in range(2))
    for _ in range(2):
        before = state
        state, loss = run(state, args[1])
        other, expected = jax.jit(step)(other, args[1])
        np.testing.assert_allclose(loss, expected, rtol=1e-4)
    assert isinstance(run.plan, PlacedPlan)
    assert any(x.is_deleted() for x in jax.tree.leaves(before["params"]))
    assert len(run.lower(state, args[1]).programs) > 1
    assert jax.tree.structure(run.eval_shape(state, args[1])[0]) == jax.tree.structure(state)
    with pytest.raises(shardplan.ShardplanError, match="which no one trace holds"):
        run.trace(state, args[1])


@pytest.mark.slow
def test_init_makes_each_leaf_on_the_devices_of_its_stage() -> None:
    step, args = deep(concrete=True)
    run = shardplan.parallelize(
        cluster=slow_nodes(), devices=jax.devices()[:4], axes={"stage": 2}, microbatches=2, donate_argnums=(0,)
    )(step)
    run.prepare(*args)
    made = run.init(lambda: jax.tree.map(jnp.copy, args[0]))
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(made)} == {2}
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(args[0]), strict=True):
        np.testing.assert_array_equal(a, b)
    run(made, args[1])


@pytest.mark.slow
def test_nnx_objects_with_dropout_are_updated_in_place_in_stages() -> None:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(4)])
            self.dropout = nnx.Dropout(0.3, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            for layer in self.layers:
                x = self.dropout(jnp.tanh(layer(x)))
            return x

    def step(model: nnx.Module, x: jax.Array) -> jax.Array:
        def loss(m: Any) -> jax.Array:
            return jnp.mean(m(x) ** 2)

        value, gradients = nnx.value_and_grad(loss)(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), gradients))
        return value

    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)), jnp.float32)
    own, other = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    run = shardplan.parallelize(
        cluster=slow_nodes(), devices=jax.devices()[:4], axes={"stage": 2}, microbatches=2, batch_argnums=(1,)
    )(step)
    for _ in range(3):
        np.testing.assert_allclose(run(own, x), nnx.jit(step)(other, x), rtol=1e-5)
    for a, b in zip(jax.tree.leaves(nnx.state(own)), jax.tree.leaves(nnx.state(other)), strict=True):
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_plan_that_was_chosen_says_so_in_its_file(tmp_path: Path) -> None:
    step, args = mlp.train_step(layers=2)
    plan = shardplan.plan(step, *args, cluster="2", placement="auto")
    assert isinstance(plan, Plan)
    plan.save(tmp_path / "plan.json")
    again = shardplan.load(tmp_path / "plan.json", step, *args)
    assert again.placements_tried == plan.placements_tried != ()
