"""The search's optimum is the optimum: against every assignment, and against an integer program."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from models import gpt, mlp
from shardplan.ir import Collective
from shardplan.mesh import Cluster
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem import Extractor, Problem
from shardplan.search.problem.solution import Solution
from tests.oracles import brute, ilp
from tests.search import steps

ROUNDING_S = 1e-12  # each table entry is rounded to a picosecond


def optimum(problem: Problem, domains: Any = None) -> tuple[Solution, float]:
    own = problem.domains if domains is None else domains
    return Solver(problem, memory.liveness(problem)).minimum("optimum", own)


def check(problem: Problem, domains: Any = None) -> tuple[Solution, brute.Found]:
    """The search's optimum has the oracle's cost, and its own states have it too."""
    oracle = brute.Oracle(problem)
    best = oracle.minimum(domains)
    solution, seconds = optimum(problem, domains)
    near = ROUNDING_S * (1 + len(problem.scopes) + sum(n.weight for n in problem.graph.nodes))
    assert seconds == pytest.approx(best.seconds, rel=1e-9, abs=near)
    assert solution.seconds == pytest.approx(best.seconds, rel=1e-9, abs=near)
    assert oracle.seconds(solution.states) == pytest.approx(best.seconds, rel=1e-9, abs=near)
    return solution, best


def count(problem: Problem) -> int:
    return math.prod(len(d) for d in problem.domains)


@settings(max_examples=60)
@given(recipe=steps.recipes(), slow=st.sampled_from([0.1, 1.0, 10.0, 100.0]))
def test_the_optimum_is_the_best_of_all_assignments(recipe: steps.Recipe, slow: float) -> None:
    problem = steps.problem(recipe.step, *recipe.args(), on=steps.cluster(gbps=(slow, 100.0)))
    assume(count(problem) <= 1_000_000)
    check(problem)


@settings(max_examples=60)
@given(recipe=steps.recipes(), data=st.data())
def test_a_restriction_has_the_optimum_of_its_assignments(recipe: steps.Recipe, data: st.DataObject) -> None:
    problem = steps.problem(recipe.step, *recipe.args(), on=steps.cluster())
    domains = data.draw(steps.subdomains(problem, 3))
    assume(math.prod(len(d) for d in domains) <= 2_000_000)
    check(problem, domains)


def _diamond(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    left, right = x @ w["a"], x @ w["b"]
    return jnp.sum(jnp.tanh(left) @ w["c"] + jnp.tanh(right) @ w["c"])


def _fan_out(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    h = x @ w["a"]
    return jnp.sum(h @ w["b"]) + jnp.sum(h @ w["c"]) + jnp.sum(h.T @ x)


def _shared(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    for _ in range(3):
        x = jnp.tanh(x @ w["a"])
    return jnp.sum(x)


def _loop(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    stacked = jnp.stack([w["a"], w["b"]])
    x, kept = jax.lax.scan(lambda c, m: (jnp.tanh(c @ m), jnp.sum(c, 0)), x, stacked)
    return jnp.sum(x) + jnp.sum(kept)


def _partial(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.sum((x.T @ x) + (x.T @ (x @ w["a"])) + w["a"])


def _sorted(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    values, places = jax.lax.sort_key_val(x, jax.lax.broadcasted_iota(jnp.int32, x.shape, 0), dimension=1)
    return jnp.sum(values @ w["a"]) + jnp.sum(places.astype(jnp.float32))


def _halo(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    rows = jax.lax.conv_general_dilated(
        x[None, :, :], w["a"][:3, :, None] * jnp.ones((1, 1, 8)), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return jnp.sum(rows**2)


@pytest.mark.parametrize(
    "loss", [_diamond, _fan_out, _shared, _loop, _partial, _sorted, _halo], ids=lambda f: f.__name__.strip("_")
)
@pytest.mark.parametrize("trained", [False, True], ids=["forward", "trained"])
def test_the_optimum_of_a_shape_of_graph(loss: Callable[..., jax.Array], trained: bool) -> None:
    def step(w: dict[str, jax.Array], x: jax.Array) -> Any:
        if not trained:
            return loss(w, x)
        value, gradient = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda a, g: a - g, w, gradient), value

    weights = {k: steps.array(8, 8) for k in "abc" if k == "a" or loss in (_diamond, _fan_out) or (loss is _loop and k == "b")}
    for shape in ("4", "2x2"):
        problem = steps.problem(step, weights, steps.array(8, 8), on=steps.cluster(shape, gbps=(3.0, 30.0)))
        check(problem, steps.thinned(problem, assignments=2_000_000))


def test_an_exchange_with_neighbours_is_part_of_the_optimum() -> None:
    """A long row of values cut where the filter reads across: the plan exchanges a halo, at its price."""

    def step(x: jax.Array, k: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, k, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))

    on = steps.cluster("4", gbps=(1.0,))
    problem = steps.problem(step, steps.array(1, 512, 8), steps.array(5, 8, 8), on=on)
    split = problem.resharder.space((8, 8, 8)).number((((), (0,), (), ()), ()))
    long = tuple((split,) if v.shape[1] == 512 else d for d, v in zip(problem.domains, problem.coarse.variables, strict=True))
    solution, _ = check(problem, long)
    issued = Extractor(problem).decide(solution).issued
    assert [i.step.kind for i in issued] == [Collective.SHIFT, Collective.SHIFT], "one from either side"
    assert solution.seconds > sum(i.step.seconds for i in issued) > 0


def test_small_problems_are_worth_splitting() -> None:
    """The problems above would prove little if whole tensors on every device were the answer to all of them."""
    problem = steps.problem(_diamond, {k: steps.array(8, 8) for k in "abc"}, steps.array(8, 8), on=steps.cluster())
    solution, _ = optimum(problem)
    layouts = [problem.resharder.layout(v.shape, s) for v, s in zip(problem.coarse.variables, solution.states, strict=True)]
    assert any(layout.used for layout in layouts)
    assert Extractor(problem).decide(solution).issued


@pytest.mark.parametrize(
    ("step", "args"), [mlp.train_step(layers=3), gpt.train_step(layers=1, width=64, batch=8)], ids=["mlp", "transformer layer"]
)
def test_the_optimum_of_one_level_is_that_of_the_integer_program(step: Callable[..., Any], args: tuple[Any, ...]) -> None:
    problem = steps.problem(step, *args, on=steps.cluster("4", gbps=(1.0,), gflops=100.0))
    answer = ilp.solve(problem, time_limit_s=120)
    assert answer.status == 0, answer.message
    solution, seconds = optimum(problem)
    assert answer.picoseconds == round(seconds * 1e12)
    assert any(problem.resharder.layout(v.shape, s).used for v, s in zip(problem.coarse.variables, solution.states, strict=True))


def test_the_relaxed_integer_program_bounds_the_optimum() -> None:
    step, args = mlp.train_step(layers=3)
    problem = steps.problem(step, *args, on=steps.cluster(gbps=(1.0, 10.0), gflops=100.0))
    bound = ilp.solve(problem, relax=True).bound_picoseconds
    assert bound is not None
    assert 0 < bound <= optimum(problem)[1] * 1e12 * (1 + 1e-9)


def test_too_many_assignments_are_refused() -> None:
    step, args = gpt.train_step(layers=1)
    with pytest.raises(ValueError, match="too many to try"):
        brute.Oracle(steps.problem(step, *args, on=Cluster.load("2x2"))).minimum()
