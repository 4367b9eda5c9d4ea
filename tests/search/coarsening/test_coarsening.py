"""What coarsening gives up: against the same step in which every tensor has a layout of its own."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import assume, given, settings

import shardplan
from models import gpt, llama, mlp
from shardplan.frontend.trace import trace
from shardplan.graph import flatten
from shardplan.mesh import Cluster
from shardplan.search.coarsening import coarsen
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem.problem import Problem
from tests.oracles import brute
from tests.search import steps


def coarse_seconds(problem: Problem) -> float:
    return Solver(problem, memory.liveness(problem)).minimum("coarse", problem.domains)[1]


@settings(max_examples=40)
@given(recipe=steps.recipes())
def test_layouts_of_single_tensors_are_never_dearer(recipe: steps.Recipe) -> None:
    problem = steps.problem(recipe.step, *recipe.args(), on=steps.cluster("4", gbps=(3.0,)))
    assert steps.uncoarsened_seconds(problem) <= coarse_seconds(problem) + 1e-10


@settings(max_examples=30)
@given(recipe=steps.recipes())
def test_every_assignment_of_single_tensors_tried_is_their_optimum(recipe: steps.Recipe) -> None:
    problem = steps.problem(recipe.step, *recipe.args(), on=steps.cluster("4", gbps=(3.0,)))
    oracle = brute.uncoarsened(problem)
    assume(math.prod(len(d) for d in oracle.problem.domains) <= 2_000_000)
    best = oracle.minimum()
    assert best.seconds == pytest.approx(steps.uncoarsened_seconds(problem), rel=1e-6, abs=1e-10)
    assert oracle.seconds(best.states) == pytest.approx(best.seconds, rel=1e-9)


@pytest.mark.parametrize(
    ("factory", "most"),
    [
        (mlp.train_step(layers=3, width=2048, batch=512), 0.06),
        (gpt.train_step(layers=1, width=1024, sequence=512, batch=64, heads=16, vocabulary=4096), 0.013),
        (gpt.train_step(layers=1), 0.01),
    ],
    ids=["mlp", "gpt", "small gpt"],
)
def test_real_steps_lose_little(factory: tuple[Callable[..., Any], tuple[Any, ...]], most: float) -> None:
    problem = steps.problem(factory[0], *factory[1], on=Cluster.load("8"))
    alone = steps.uncoarsened_seconds(problem)
    # both count whole picoseconds, in different tables
    assert alone - problem.rounding_s <= coarse_seconds(problem) <= alone * (1 + most)


def hidden_ops(function: Callable[[jax.Array], jax.Array], dtype: str = "float32") -> Problem:
    """The problem of ops between two products."""
    x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((64, 128), (128, 256)))
    return steps.problem(lambda w, x: function(x @ w) @ jnp.ones((256, 8)), w, x, on=Cluster.load("2x4"))


def inside_s(problem: Problem) -> float:
    return sum(inside.seconds for inside in problem.interior.values())


def passes_s(problem: Problem, *itemsizes: int) -> float:
    """Seconds in which one device reads or writes the tensor between the products, once for each size of an element."""
    device = problem.cluster.device
    return 64 * 256 * sum(itemsizes) / (device.memory_bytes_per_s * device.memory_efficiency)


def test_what_is_negated_or_cast_is_read_and_written_as_all_elementwise_ops_are() -> None:
    for function in (lambda y: jnp.exp(-jnp.tanh(y)), lambda y: jnp.exp(abs(jnp.tanh(y))), lambda y: -y):
        problem = hidden_ops(function)
        assert inside_s(problem) == pytest.approx(passes_s(problem, 4, 4), rel=1e-9)
    problem = hidden_ops(lambda y: jnp.tanh(y.astype("float32")), "bfloat16")
    assert inside_s(problem) == pytest.approx(passes_s(problem, 2, 4), rel=1e-9)


def test_dims_of_one_element_cost_nothing_and_no_variable() -> None:
    plain = hidden_ops(lambda y: jnp.exp(jnp.tanh(y)))
    problem = hidden_ops(lambda y: jnp.exp(jnp.tanh(y)[:, None])[:, 0])
    assert any(node.signature.resizes for node in problem.graph.nodes)
    assert len(problem.coarse.variables) == len(plain.coarse.variables)
    assert inside_s(problem) == pytest.approx(passes_s(problem, 4, 4), rel=1e-9)
    oracle = brute.uncoarsened(problem)
    assert steps.uncoarsened_seconds(problem) <= coarse_seconds(problem) + 1e-10
    assert oracle.seconds(oracle.minimum().states) == pytest.approx(steps.uncoarsened_seconds(problem), rel=1e-6)


def test_terms_that_two_ops_read_are_added_up_once() -> None:
    """The gradient of a norm's result is a partial sum, which two ops of its backward pass read whole."""
    step, args = llama.train_step(size="8b", scan=True)
    plan = shardplan.plan(step, *args, cluster="2x8", donate_argnums=0, factors={"gpu": (2, 4)}, memory_limit="1TiB")
    coarse, issued = plan.session.problem.coarse, plan.session.decisions.issued
    late = [v for v in coarse.variables if v.kind == "view" and v.deferred]
    assert late
    assert all(coarse.variables[v.of].deferred for v in late)
    reduced = Counter((i.tensor, i.step.before, i.step.after) for i in issued if i.step.before.partial and not i.again)
    assert set(reduced.values()) == {1}
    assert plan.step_time_s == pytest.approx(plan.searched_s, rel=0.003)


def test_tensors_of_different_kinds_share_no_layout() -> None:
    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.tanh(x) * jnp.sin(y)

    graph = flatten(trace(step, steps.array(8, 4), steps.array(8, 4)).program)
    assert len(coarsen(graph).variables) == 1
    x, y = graph.inputs
    kinds = [t.id in (y, *(o for n in graph.nodes if n.inputs == (y,) for o in n.outputs)) for t in graph.tensors]
    of = coarsen(graph, kinds=kinds).of
    assert of[x] == of[graph.outputs[0]] != of[y]
    assert {of[t.id] for t in graph.tensors if kinds[t.id]} == {of[y]}
