"""Which solution of a search becomes the plan, where communication hides."""

from __future__ import annotations

import functools
import statistics

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from models import gpt, mlp
from shardplan.ir import Collective
from shardplan.planning.choose import Fastest, _at_least_s
from shardplan.planning.scheduled import scheduled
from tests.fuzz.generate import program
from tests.fuzz.program import make
from tests.machines import machine


def test_the_plan_is_the_fastest_as_scheduled() -> None:
    """The order in which solutions are compared decides nothing."""
    step, args = mlp.train_step(layers=5, width=1536, batch=96)
    session = shardplan.plan(step, *args, cluster="8", factors={}, donate_argnums=0, backend="specs").session
    others = [session.at(s) for s in session.rivals.solutions if s.fits(session.memory_limit)]
    slowest = max(others, key=lambda other: scheduled(other).step_time_s)
    assert scheduled(session).step_time_s < scheduled(slowest).step_time_s
    for first, second in ((session, slowest), (slowest, session)):
        fastest = Fastest(first)
        fastest.among([second])
        assert fastest.session is session
    fastest = Fastest(slowest)
    fastest.among_baselines()
    assert fastest.run.step_time_s <= min(scheduled(other).step_time_s for other in others)


@pytest.mark.parametrize(
    ("sizes", "cluster"),
    [
        ({"layers": 2, "width": 512, "sequence": 128, "batch": 8}, "8"),
        pytest.param({"layers": 2, "width": 1024, "sequence": 256, "batch": 32}, "2x4", marks=pytest.mark.slow),
    ],
)
def test_no_baseline_that_fits_is_faster_than_the_plan(sizes: dict[str, int], cluster: str) -> None:
    step, args = gpt.train_step(**sizes)
    plan = shardplan.plan(step, *args, cluster=cluster, factors={}, donate_argnums=0)
    _check_bounds(plan, near=0.7)
    fitting = [b.step_time_s for b in plan.baselines if b.fits]
    assert fitting
    assert plan.step_time_s <= min(fitting) * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_no_baseline_that_fits_is_faster_than_the_plan_of_a_random_program(seed: int) -> None:
    drawn = program(seed, "explicit")
    step, args = make(drawn)
    plan = shardplan.plan(step, *args, cluster=machine(drawn.cluster))
    slower = {b.name: b.step_time_s for b in plan.baselines if b.fits and b.step_time_s < plan.step_time_s * (1 - 1e-6)}
    assert plan.baselines
    assert not slower
    _check_bounds(plan)


def test_bounds_hold_where_blocks_are_computed_again_without_barriers() -> None:
    def step(w: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        block = jax.checkpoint(lambda x, w: jnp.tanh(jnp.tanh(x @ w) @ w.T), prevent_cse=False)

        def loss(w: list[jax.Array]) -> jax.Array:
            return jnp.mean(functools.reduce(block, w, x) ** 2)

        value, gradients = jax.value_and_grad(loss)(w)
        return [w - 0.1 * g for w, g in zip(w, gradients, strict=True)], value

    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1024, 4096), (4096, 1024)))
    _check_bounds(shardplan.plan(step, [w] * 3, x, cluster="2x4", donate_argnums=0))


def _check_bounds(plan: shardplan.Plan, near: float | None = None) -> None:
    """No baseline is left out that would be faster as scheduled, and half of the bounds are at least ``near`` of that."""
    session = plan.session
    rivals = [session.at(s) for s in session.rivals.solutions]
    parts = [_at_least_s(rival) / scheduled(rival).step_time_s for rival in rivals]
    assert max(parts) <= 1 + 1e-9
    if near is not None:
        assert statistics.median(parts) > near


@pytest.mark.slow
def test_a_weight_gathered_again_is_counted_again() -> None:
    """FSDP gathers each matrix in both passes, and a schedule does so twice."""
    step, args = gpt.train_step(layers=2, width=1024, sequence=256, batch=32)
    session = shardplan.plan(step, *args, cluster="2x4", factors={}, donate_argnums=0).session
    fsdp = next(session.at(s) for s in session.rivals.solutions if s.name == "FSDP")
    issued = [i for i in fsdp.decisions.issued if i.step.kind == Collective.ALL_GATHER]
    again = {i.tensor for i in issued if i.again}
    assert len(again) >= 8  # four matrices of each layer
    assert again <= {i.tensor for i in issued if not i.again}
    sent = [
        t for i in scheduled(fsdp).issued if i.step.kind == Collective.ALL_GATHER for t in (i.tensor, *(t for t, _ in i.along))
    ]
    assert all(sent.count(t) == 2 for t in again)


def test_the_norms_of_split_gradients_are_summed_in_one_collective() -> None:
    """A scalar without a layout travels in a bundle too: each of many norms does not cost a collective's latency."""

    def step(ws: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        gradients = jax.grad(lambda ws: jnp.mean(functools.reduce(lambda x, w: jnp.tanh(x @ w), ws, x) ** 2))(ws)
        norm = jnp.sqrt(functools.reduce(jnp.add, [jnp.sum(g**2) for g in gradients]))
        return [w - 0.1 * g / jnp.maximum(norm, 1.0) for w, g in zip(ws, gradients, strict=True)]

    array = jax.ShapeDtypeStruct
    args = [array((1024, 1024), "float32")] * 24, array((8192, 1024), "float32")
    session = shardplan.plan(step, *args, cluster="2x4", pins={"ws/*": P(("node", "gpu")), "x": P(("node", "gpu"))}).session
    norms = [i for i in session.decisions.issued if session.graph.tensors[i.tensor].shape == ()]
    alone = session.problem.resharder.seconds(norms[0].step.kind, norms[0].step.factors, 4.0)
    assert len(norms) == 24
    assert sum(i.seconds for i in norms) < 2 * alone
    sent = [i for i in scheduled(session).issued if i.tensor in {n.tensor for n in norms}]
    assert sum(i.seconds for i in sent) < 2 * alone
