"""Any number of devices: levels whole unless a dim needs them split, no factor more than is needed, and the plans are right."""

from __future__ import annotations

import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardplan
from models import mlp
from shardplan.ir import Layout
from shardplan.mesh import Cluster, factors
from shardplan.planning.splits import factor_choices, largest_parts, merged, work_of
from shardplan.report.json import plan_json
from shardplan.report.plan_text import plan_text
from shardplan.search.problem.problem import Problem
from shardplan.verify.verify import verify
from tests.search import steps


def planned(cluster: str, **options: Any) -> shardplan.Plan:
    step, args = mlp.train_step(**options)
    return shardplan.plan(step, *args, cluster=cluster, donate_argnums=0, time_model="sum")


@given(st.integers(2, 200), st.lists(st.integers(1, 4096), min_size=1, max_size=5))
def test_the_parts_of_a_level_make_it_up_and_divide_loops_but_for_the_last(size: int, extents: list[int]) -> None:
    parts = largest_parts(size, extents)
    assert math.prod(parts) == size
    whole = math.prod(extents)
    for part in parts[:-1]:
        assert any(n % part == 0 for n in extents)
    if any(n % size == 0 for n in extents):
        assert parts == (size,)
    if whole % math.prod(parts[:-1]) == 0 and math.gcd(whole // math.prod(parts[:-1]), parts[-1]) > 1:
        assert any(math.gcd(n, parts[-1]) > 1 for n in extents)


@pytest.mark.parametrize(
    ("cluster", "width", "batch", "sizes"),
    [
        ("6", 1536, 3072, [6]),  # all dims divide: whole
        ("12", 1536, 3072, [12]),
        ("2x3x2", 1536, 3072, [2, 3, 2]),
        ("12x8", 1536, 3072, [12, 8]),
        ("7", 2048, 4096, [7]),  # nothing to split it by
        ("6", 2048, 4096, [2, 3]),
        ("12", 2048, 4096, [4, 3]),
        ("8", 1018, 2042, [2, 2, 2]),  # each dim is twice an odd number
    ],
)
def test_a_level_is_split_only_where_a_dim_needs_it(cluster: str, width: int, batch: int, sizes: list[int]) -> None:
    step, args = mlp.train_step(layers=3, width=width, batch=batch)
    problem = steps.problem(step, *args, on=Cluster.load(cluster))
    assert [f.size for f in factor_choices(Cluster.load(cluster), work_of(problem.graph))[-1]] == sizes


def test_a_split_level_wins_where_its_dims_need_it() -> None:
    assert list(planned("12", width=2048, batch=4096).axes.values()) in ([4, 3], [2, 2, 3])
    assert list(planned("8", layers=3, width=1018, batch=2042).axes.values()) == [2, 2, 2]


def test_factors_that_no_layout_keeps_apart_are_made_one() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w)

    cluster = Cluster.load("2x8")
    made = steps.problem(step, steps.array(64, 64), steps.array(64, 64), on=cluster)
    problem = Problem(made.graph, made.coarse, cluster, factors(cluster, {"gpu": (4, 2)}))

    def state(dims: tuple[tuple[int, ...], ...]) -> int:
        return problem.resharder.space((8, 8)).of(Layout(dims))

    count = len(problem.coarse.variables)
    assert merged(problem, [state(((1, 2), (0,)))] * count) == factors(cluster)
    assert merged(problem, [state(((0, 1, 2), ()))] * count) == factors(cluster)
    finer = Problem(made.graph, made.coarse, cluster, factors(cluster, {"gpu": (2, 2, 2)}))

    def split(dims: tuple[tuple[int, ...], ...]) -> list[int]:
        return [finer.resharder.space((8, 8)).of(Layout(dims))] * count

    assert merged(finer, split(((1, 2), (3,)))) == factors(cluster, {"gpu": (4, 2)})
    assert merged(finer, split(((1,), (2, 3)))) == factors(cluster, {"gpu": (2, 4)})
    for apart in (((1,), (2,)), ((1,), ()), ((0,), (2,)), ((0, 1), (2,))):
        assert merged(problem, [state(((1, 2), ()))] * (count - 1) + [state(apart)]) is None


@pytest.mark.parametrize("cluster", ["3", "6", "12", "2x3x2"])
def test_plans_for_3_6_and_12_devices_are_the_step(cluster: str) -> None:
    step, args = mlp.train_step(layers=1, width=96, batch=48, concrete=True)
    plan = shardplan.plan(step, *args, cluster=cluster, donate_argnums=0, pins={"batch/*": pin(cluster)})
    found = verify(plan, step, args, devices=jax.devices()[: plan.cluster.size])
    assert found.passed
    assert found.predicted_bytes > 0


def pin(cluster: str) -> jax.sharding.PartitionSpec:
    return jax.sharding.PartitionSpec(tuple(Cluster.load(cluster).level_names))


def test_a_plan_over_a_split_level_is_the_step() -> None:
    """Of 6 devices, 2 divide the width and 3 the batch."""
    step, args = mlp.train_step(layers=1, width=1024, batch=243, concrete=True)
    plan = shardplan.plan(step, *args, cluster=steps.cluster("6"), donate_argnums=0)
    assert len(plan.axes) == 2
    assert {a for spec in plan.specs_by_path.values() for a in tuple(spec) if a} == set(plan.axes)
    assert verify(plan, step, args, devices=jax.devices()[:6], steps=1).passed


def test_a_prime_that_divides_no_dim_is_said_with_what_would(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shardplan"):
        plan = planned("7", width=256, batch=64)
    assert not any(map(len, plan.specs_by_path.values())), "arguments are whole"
    (said,) = [r.getMessage() for r in caplog.records]
    assert "no dim of any argument divides by gpu=7" in said
    assert "4 or 8 in place of gpu=7" in said
    assert "multiples of 7" in said
    assert said in plan_text(plan.completed())
    assert plan_json(plan.completed())["idle_axes"] == {"gpu": said}


def test_nothing_is_said_of_a_count_that_divides(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shardplan"):
        said = plan_json(planned("6", width=96, batch=96).completed())["idle_axes"]
    assert not any("divides" in text for text in said.values())
    assert not caplog.records
