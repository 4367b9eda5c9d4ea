"""Lower bounds: below every plan, near the linear program's, and raised by pins and by a memory limit that binds."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from models import gpt, mlp, vit
from shardplan.mesh import Cluster
from shardplan.report.plan_text import bound_text
from shardplan.report.tables import seconds
from shardplan.search.baselines.rivals import Rivals
from shardplan.search.inference.bound import Ascent, Bound, Prices, ascend, stars
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem.problem import Problem
from shardplan.search.problem.solution import Peak, Solution
from tests.machines import launchless
from tests.oracles import ilp
from tests.search import steps


def _gpt() -> Any:
    return gpt.train_step(layers=1, width=64, batch=16)


def known(nbytes: int) -> Peak:
    return Peak(lambda _: (nbytes, True))


@pytest.mark.parametrize("factory", [mlp.train_step(layers=3), _gpt(), vit.train_step(layers=1)], ids=["mlp", "gpt", "vit"])
def test_the_bound_is_nearly_that_of_the_linear_program(factory: Any) -> None:
    step, args = factory
    problem = steps.problem(step, *args, on=steps.cluster("4", gbps=(1.0,), gflops=100.0))
    relaxed = ilp.solve(problem, relax=True).bound_picoseconds
    assert relaxed is not None
    ascent = Ascent(stars(problem, problem.domains, worst_s=1.0))
    start = ascent.bound_s()
    found = ascend(ascent, known_s=math.inf)
    assert found <= relaxed / 1e12 * (1 + 1e-6)
    assert found >= relaxed / 1e12 * 0.98
    assert start < found * 0.9, "there was something to gain"


def test_no_sweep_lowers_the_bound_and_no_assignment_changes_its_cost() -> None:
    step, args = _gpt()
    problem = steps.problem(step, *args, on=steps.cluster("2x2", gbps=(1.0, 10.0), gflops=100.0))
    given = stars(problem, problem.domains, worst_s=1.0)
    ascent = Ascent(given)
    bounds = [ascent.bound_s()]
    for n in range(20):
        ascent.sweep(backwards=n % 2 == 1)
        bounds.append(ascent.bound_s())
    assert all(b >= a * (1 - 1e-9) for a, b in itertools.pairwise(bounds))
    states = tuple(d[i] for d, i in zip(problem.domains, ascent.decoded(), strict=True))
    assert problem.seconds(states, {}) >= bounds[-1]


def _three_levels(**options: Any) -> shardplan.Plan:
    step, args = mlp.train_step(layers=3, width=512, batch=512)
    return shardplan.plan(step, *args, cluster="2x2x2", **options)


def test_a_plan_over_three_levels_says_how_far_from_the_best_it_may_be() -> None:
    plan = _three_levels()
    assert not plan.exact
    assert 0 < plan.lower_bound_s <= plan.step_time_s * (1 + 1e-9)
    assert plan.gap < 0.05
    data = plan.completed()
    alone = f"as the search prices collectives (lower bound {seconds(plan.lower_bound_s)})"
    assert f"at most {plan.gap:.1%} above the optimum, {alone}" in bound_text(data)
    assert plan.gap == plan.step_time_s / plan.lower_bound_s - 1
    assert _three_levels().lower_bound_s == plan.lower_bound_s, "the same every time"


def test_pins_raise_the_bound() -> None:
    free = _three_levels()
    axis = next(iter(free.axes))
    held = _three_levels(pins={"state/params/layer_1/kernel": P(axis), "batch/*": P()})
    assert free.lower_bound_s * 1.01 < held.lower_bound_s <= held.step_time_s * (1 + 1e-9)
    assert held.lower_bound_s <= held.searched_s <= held.lower_bound_s * 1.05


# -- memory ------------------------------------------------------------------------------------------------------------


def _chain() -> tuple[Any, tuple[Any, ...]]:
    def step(a: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(x @ a) @ b)

    return step, (steps.array(32, 32), steps.array(32, 32), steps.array(16, 32))


def _all_plans(problem: Problem, live: memory.Liveness) -> list[tuple[float, int, tuple[int, ...]]]:
    """(seconds, peak bytes, states) of every assignment."""
    rows: list[tuple[float, int, tuple[int, ...]]] = []
    for states in itertools.product(*problem.domains):
        seconds = problem.seconds(states, {})
        if math.isfinite(seconds) and seconds < 1:
            rows.append((seconds, int(memory.profile(problem, live, states, frozenset()).max()), states))
    return rows


def test_a_bound_within_a_memory_limit_lies_below_every_plan_that_fits() -> None:
    step, args = _chain()
    problem = steps.problem(step, *args, on=steps.cluster("4", gbps=(0.5,), gflops=1e5))
    assert not problem.backward_views
    live = memory.liveness(problem)
    rows = _all_plans(problem, live)
    free_s, free_peak, free_states = min(rows)
    raised = 0
    for limit in sorted({peak for _, peak, _ in rows if peak < free_peak}):
        best_s, best_peak, states = min(row for row in rows if row[1] <= limit)
        free = Solution("free", free_states, frozenset(), False, free_s, known(free_peak))
        chosen = Solution("chosen", states, frozenset(), False, best_s, known(best_peak))
        bound = Bound(problem, live, problem.domains, free=free, chosen=chosen, limit=limit, unlimited_s=free_s).seconds
        assert free_s <= bound <= best_s * (1 + 1e-9)
        raised += bound > free_s * 1.01
    assert raised >= 3, "limits that bind raise the bound"


@pytest.mark.parametrize(("price", "keeps"), [(2e-13, True), (1e-9, False)], ids=["copies kept", "gathered again"])
def test_priced_stars_cost_what_the_profile_counts(price: float, keeps: bool) -> None:
    """The bound on one assignment alone is its cost and the price of its bytes at the points, less that of the limit.

    Each op may be cut in another way there, where it holds less: the price of buffers is between nothing and all of it.
    """
    step, args = _gpt()
    problem = steps.problem(step, *args, on=launchless(Cluster.load("2x2")))
    live = memory.liveness(problem)
    solver = Solver(problem, live)
    fsdp = next(s for s in Rivals(solver).solutions if s.name == "FSDP")
    again = {} if keeps else dict.fromkeys(problem.backward_views, math.inf)
    solution = solver.rate("FSDP", fsdp.states, again, False)
    assert bool(solution.keep) == keeps
    held = memory.profile(problem, live, solution.states, solution.keep)
    points, limit = tuple(range(live.lifetimes.length)), 1000
    given = stars(problem, [(s,) for s in solution.states], worst_s=1.0, live=live, prices=Prices(points, price), limit=limit)
    expected = solution.seconds + price * sum(float(held[p]) - limit for p in points)
    rounding = 2e-12 * (len(given.stars) + len(given.unary) + abs(expected))
    in_ops = price * float(live.buffers.held(solution.states, None)[1].sum())
    found = Ascent(given).bound_s()
    assert expected - in_ops - rounding < found <= expected
    assert found > expected - 0.5 * in_ops, "most of the buffers are charged"


@pytest.mark.slow
def test_a_plan_whose_memory_binds_has_a_bound_of_its_own() -> None:
    step, args = gpt.train_step(layers=2, width=64, batch=16)
    free = shardplan.plan(step, *args, cluster="4", donate_argnums=0, backend="specs")
    tight = shardplan.plan(step, *args, cluster="4", donate_argnums=0, memory_limit=int(free.peak_bytes * 0.8), backend="specs")
    assert free.lower_bound_s == pytest.approx(free.searched_s, abs=2 * free.session.problem.rounding_s)
    assert free.searched_s == tight.data.unlimited_s
    assert free.lower_bound_s <= tight.lower_bound_s <= tight.step_time_s * (1 + 1e-9)
    assert "without the memory limit" in bound_text(tight.completed())
    assert "the optimum of the cost model" in bound_text(free.completed())
