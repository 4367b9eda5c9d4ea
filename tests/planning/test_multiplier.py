"""Plans where communication hides: the best of all layouts, bounds that hold, and weights that agree with the plan."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardplan
from models import gpt, mlp
from shardplan.cost import OVERLAP, TIME
from shardplan.cost.overlap import weights_at
from shardplan.frontend.trace import trace
from shardplan.graph import flatten
from shardplan.ir import Factor
from shardplan.mesh import Cluster, factors
from shardplan.planning import multiplier
from shardplan.planning.factorings import best_of_factorings
from shardplan.planning.multiplier import best_overlapped
from shardplan.planning.wanted import Found, Wanted, step_time_s
from shardplan.search.coarsening import coarsen
from shardplan.search.inference import anytime
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem.extract import Extractor
from shardplan.search.problem.problem import Problem
from shardplan.search.strategy.solve import search
from tests.oracles import brute
from tests.search import steps


def training(w: jax.Array, v: jax.Array, x: jax.Array) -> Any:
    def loss_of(w: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ v) ** 2)

    loss, (dw, dv) = jax.value_and_grad(loss_of, (0, 1))(w, v)
    return w - 0.1 * dw, v - 0.1 * dv, loss


ARGS = steps.array(64, 64), steps.array(64, 64), steps.array(64, 64)


def problem_of(share: float | None, cluster: Cluster) -> Problem:
    graph = flatten(trace(training, *ARGS).program)
    objective = TIME if share is None else replace(OVERLAP, weights=weights_at(share, cluster.device.contention))
    return Problem(graph, coarsen(graph), cluster, factors(cluster), objective=objective)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("gbps", [0.5, 20.0])
def test_the_search_finds_the_cheapest_assignment_at_any_weights(share: float, gbps: float) -> None:
    problem = problem_of(share, steps.cluster("4", gbps=(gbps,), gflops=1e4))
    solver = Solver(problem, memory.liveness(problem))
    best, bound_s = solver.bounded("x", problem.domains)
    assert best.seconds == pytest.approx(brute.Oracle(problem).minimum().seconds, rel=1e-5)
    assert bound_s <= best.seconds
    decisions = Extractor(problem).decide(best)
    weights = problem.objective.weights
    exposed_s = decisions.communication_s - decisions.hideable_s
    assert exposed_s + weights.compute * decisions.compute_s + weights.hideable * decisions.hideable_s == pytest.approx(
        best.seconds, rel=1e-5
    )
    assert best.seconds <= decisions.step_time_s * (1 + 1e-5)


@pytest.mark.parametrize("gbps", [0.3, 2.0, 20.0, 400.0])
def test_no_layout_takes_less_than_the_bound_and_the_plan_is_near_the_best(gbps: float) -> None:
    cluster = steps.cluster("4", gbps=(gbps,), gflops=1e4)
    plan = shardplan.plan(training, *ARGS, cluster=cluster, factors={}, backend="specs")
    problem = plan.session.problem
    solver, extractor = Solver(problem, memory.liveness(problem)), Extractor(problem)
    # every layout of weights, gradients and activations that is not partial; the ops follow
    few = [tuple(s for s in d if not problem.space(v).partial[s])[:6] for v, d in enumerate(problem.domains)]
    free = [v for v, d in enumerate(few) if len(d) > 1][:5]
    best = plan.searched_s
    for states in itertools.product(*(few[v] for v in free)):
        domains = list(problem.domains)
        for v, s in zip(free, states, strict=True):
            domains[v] = (s,)
        found, seconds = solver.minimum("x", domains)
        if seconds < float("inf"):
            took = extractor.decide(found).step_time_s
            assert plan.lower_bound_s <= took * (1 + 1e-6)
            best = min(best, took)
    assert plan.searched_s <= best * 1.1


@pytest.mark.slow
def test_overlap_never_takes_longer_than_the_plan_for_the_sum() -> None:
    step, args = gpt.train_step(layers=2, width=256, heads=4, batch=32, sequence=128)
    for cluster in ("8", "2x4"):
        plans = {
            m: shardplan.plan(step, *args, cluster=cluster, factors={}, donate_argnums=0, time_model=m)
            for m in ("overlap", "sum")
        }
        overlap, serial = plans["overlap"], plans["sum"]
        assert overlap.step_time_s <= serial.step_time_s
        assert overlap.hidden_s <= overlap.step_time_s <= overlap.serial_s
        assert serial.step_time_s == serial.serial_s
        assert all(overlap.step_time_s <= b.step_time_s * (1 + 1e-6) for b in overlap.baselines if b.fits)


def test_another_factoring_with_a_shorter_step_is_the_plan() -> None:
    """At its weights a plan may look cheapest whose step takes longer than that of another factoring."""
    graph = flatten(trace(training, *ARGS).program)
    cluster = steps.cluster("4", gbps=(20.0,), gflops=1e4)
    coarse, asked = coarsen(graph), list[Wanted]()

    def searched(wanted: Wanted) -> Found:
        asked.append(wanted)
        problem = Problem(graph, coarse, cluster, factors(cluster), objective=wanted.objective)
        outcome = search(
            problem,
            limit=wanted.memory,
            donated=frozenset(),
            domains=problem.domains,
            deadline=None,
            observer=anytime.silent,
        )
        narrow = tuple((s,) for s in problem.narrowest(problem.domains))
        slow = Solver(problem, memory.liveness(problem)).minimum("plan", narrow)[0]
        return Problem(graph, coarse, cluster, factors(cluster), objective=wanted.objective), replace(
            outcome, best=slow, others=((problem, outcome),), exact=True
        )

    wanted = Wanted(10**12, frozenset(), {}, None, anytime.silent, OVERLAP)
    problem, outcome = best_overlapped(searched, cluster.device.contention, wanted)
    cheapest = [searched(one) for one in tuple(asked)]
    shortest = min(step_time_s(one) for found in cheapest for one in found[1].others)
    assert step_time_s((problem, outcome)) == pytest.approx(shortest, rel=1e-6)
    assert shortest < min(step_time_s(found) for found in cheapest)
    assert not outcome.exact


@pytest.mark.slow
def test_weights_gather_beside_compute_and_activations_do_not() -> None:
    step, args = gpt.train_step(layers=4, width=512, heads=4, batch=64, sequence=256)
    plan = shardplan.plan(step, *args, cluster="8", factors={}, donate_argnums=0)
    shares: dict[str, list[float]] = {"FSDP": [], "tensor parallel": []}
    for name, found in shares.items():
        one = plan.as_baseline(name)
        found.append((one.communication_s - one.exposed_s) / one.communication_s)
    assert shares["FSDP"][0] > 0.5
    assert shares["tensor parallel"][0] < shares["FSDP"][0] - 0.1


def test_a_limit_that_can_be_met_when_nothing_hides_is_met() -> None:
    step, args = mlp.train_step(layers=4, width=256)
    serial = shardplan.plan(step, *args, cluster="2x2", donate_argnums=0, time_model="sum")
    tight = shardplan.plan(step, *args, cluster="2x2", donate_argnums=0, time_model="sum", memory_limit=serial.peak_bytes // 2)
    assert (
        shardplan.plan(step, *args, cluster="2x2", donate_argnums=0, memory_limit=tight.peak_bytes).peak_bytes <= tight.peak_bytes
    )


def test_a_plan_keeps_its_time_model_in_its_file(tmp_path: Path) -> None:
    step, args = mlp.train_step(layers=4, width=256)
    for model in ("overlap", "sum"):
        plan = shardplan.plan(step, *args, cluster="2x2", donate_argnums=0, time_model=model)
        plan.save(tmp_path / "plan.json")
        again = shardplan.load(tmp_path / "plan.json", step, *args)
        assert (again.time_model, again.step_time_s, again.exposed_s) == (model, plan.step_time_s, plan.exposed_s)
        assert again.session.decisions.step_time_s == pytest.approx(plan.session.decisions.step_time_s, rel=1e-12)


def planned_at_several_weights(observer: Any) -> Any:
    """A plan with so little to compute that neither assumption holds: the search runs at four multipliers."""
    step, args = mlp.train_step(layers=6, width=64)
    cluster = steps.cluster("2x4", gbps=(10.0, 100.0), gflops=300.0)
    return shardplan.plan(step, *args, cluster=cluster, factors={}, donate_argnums=0, observer=observer)


SEARCHES = 4
EVENTS = 3 + 2 * SEARCHES + 2
"""Tracing, describing, coarsening; tables and the search itself at each multiplier; scheduling; the end."""


@pytest.mark.parametrize("at", range(EVENTS))
def test_an_interrupt_between_weights_gives_the_best_so_far(at: int) -> None:
    calls = itertools.count()

    def interrupt(_what: str, _part: float) -> None:
        if next(calls) == at:
            raise KeyboardInterrupt

    if at < 4:  # before the first search there is no plan
        with pytest.raises(KeyboardInterrupt):
            planned_at_several_weights(interrupt)
        return
    plan = planned_at_several_weights(interrupt)
    assert plan.stopped == "interrupted"
    assert plan.lower_bound_s <= plan.step_time_s


def test_progress_never_goes_back() -> None:
    told: list[tuple[str, float]] = []
    planned_at_several_weights(lambda what, part: told.append((what, part)))
    parts = [part for _, part in told]
    assert [what for what, _ in told].count("search") == SEARCHES
    assert len(told) == EVENTS
    assert parts == sorted(parts)
    assert parts[-1] == 1.0


@pytest.mark.slow
def test_a_simulated_step_takes_what_is_priced() -> None:
    step, args = gpt.train_step(layers=4, width=256, heads=4, batch=64, sequence=128)
    plan = shardplan.plan(step, *args, cluster="2x4", donate_argnums=0)
    assert plan.simulate(overlap=False).step_time_s == pytest.approx(plan.serial_s, rel=0.03)
    assert plan.simulate().step_time_s == pytest.approx(plan.step_time_s, rel=0.1)


def test_an_unknown_time_model_is_refused() -> None:
    step, args = mlp.train_step()
    with pytest.raises(shardplan.ShardplanError, match="time_model 'parallel': use 'overlap'"):
        shardplan.plan(step, *args, cluster="2", time_model="parallel")


@pytest.mark.parametrize("contention", [2.0, 3.0])
def test_a_plan_on_a_device_on_which_overlap_gains_nothing_is_still_one_of_overlap(contention: float) -> None:
    """Compute and communication that slow each other twofold take as long as one after the other."""
    h100 = Cluster.load("8")
    cluster = replace(h100, device=replace(h100.device, contention=contention))
    step, args = gpt.train_step(layers=1, width=1024, sequence=256, batch=64)
    plan = shardplan.plan(step, *args, cluster=cluster, factors={}, donate_argnums=0)
    assert plan.time_model == "overlap"
    assert plan.step_time_s == pytest.approx(plan.serial_s)
    assert plan.exposed_s < plan.communication_s


def test_a_plan_does_not_count_on_what_its_program_cannot_hide() -> None:
    """Of a narrow perceptron, sharded updates are gathered at the end of the program, where little is left to hide behind.

    The plan of the plain sum communicates a third as much.
    """

    def training(params: Any, momenta: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            h = x
            for w, b in params:
                h = jax.nn.relu(h @ w + b)
            return jnp.mean(h**2)

        grads = jax.grad(loss)(params)
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, grads)
        return jax.tree.map(lambda p, m: p - 0.01 * m, params, momenta), momenta

    params = [(jax.ShapeDtypeStruct((1536, 1536), jnp.float32), jax.ShapeDtypeStruct((1536,), jnp.float32))] * 5
    args = params, params, jax.ShapeDtypeStruct((96, 1536), jnp.float32)
    plan, plain = (shardplan.plan(training, *args, cluster="8", time_model=m) for m in ("overlap", "sum"))
    assert plan.time_model == "overlap"
    assert plan.simulate().step_time_s <= 1.02 * plain.simulate().step_time_s
    assert plan.lower_bound_s <= plan.step_time_s <= plan.serial_s
    assert all(plan.step_time_s <= b.step_time_s for b in plan.baselines if b.fits)


# -- company -----------------------------------------------------------------------------------------------------------


def in_company(observer: Any = lambda *_: None) -> tuple[shardplan.Plan, Any, Any]:
    """A plan that moves less than the search takes for granted, with its step and arguments."""
    step, args = gpt.train_step(layers=2, width=256, heads=4, batch=32, sequence=128)
    return shardplan.plan(step, *args, cluster="8", factors={}, donate_argnums=0, observer=observer), step, args


@pytest.fixture(scope="module")
def smaller() -> tuple[shardplan.Plan, Any, Any]:
    return in_company()


def test_a_plan_keeps_its_company_in_its_file(smaller: tuple[shardplan.Plan, Any, Any], tmp_path: Path) -> None:
    plan, step, args = smaller
    assert plan.session.problem.company
    plan.save(tmp_path / "plan.json")
    again = shardplan.load(tmp_path / "plan.json", step, *args).session
    assert again.problem.company == plan.session.problem.company
    assert again.decisions.step_time_s == pytest.approx(plan.session.decisions.step_time_s, rel=1e-12)


def test_a_plan_has_no_more_company_than_may_travel_together(smaller: tuple[shardplan.Plan, Any, Any]) -> None:
    problem = smaller[0].session.problem
    own, most = problem.windows, problem.all_windows
    for mine, all_ in ((own.operands, most.operands), (own.results, most.results), (own.links, most.links)):
        assert all(window.company <= all_[at].company for at, window in mine.items())
    assert any(window.company < most.results[at].company for at, window in own.results.items())


@pytest.mark.parametrize("n", [0, 1])
def test_an_interrupt_in_the_search_in_company_is_told(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real, searches, calls = multiplier._best_overlapped, list[int](), itertools.count()

    def counted(*args: Any) -> Any:
        searches.append(1)
        return real(*args)

    def tell(*_: Any) -> None:
        if len(searches) == 2 and next(calls) == n:
            raise KeyboardInterrupt

    monkeypatch.setattr(multiplier, "_best_overlapped", counted)
    assert in_company(tell)[0].stopped == "interrupted"


def test_progress_does_not_fall_in_the_search_in_company() -> None:
    told: list[float] = []
    in_company(lambda _, part: told.append(part))
    assert told == sorted(told)


@pytest.mark.parametrize("company", [None, {"early": 1e5, "late": 1e6}, {"early": 0.0, "late": 0.0}])
def test_decisions_cost_what_the_tables_say_in_any_company(
    company: dict[str, float] | None, smaller: tuple[shardplan.Plan, Any, Any]
) -> None:
    session = smaller[0].session
    problem = session.problem if company is None else session.problem.among(company)
    weights = problem.objective.weights
    for solution in (session.solution, *session.rivals.solutions):
        made = Extractor(problem).decide(solution)
        cost = made.exposed_s + weights.compute * made.compute_s + weights.hideable * made.hideable_s
        keep_s = problem.regathered(solution.keep)
        assert cost == pytest.approx(problem.seconds(solution.states, keep_s, solution.limits), rel=1e-5)


def test_factorings_that_cannot_win_are_left_out_at_other_multipliers() -> None:
    """A search at another multiplier begins with what may win, and searches no factoring whose cost is above the best step."""
    graph = flatten(trace(training, *ARGS).program)
    coarse, cluster = coarsen(graph), steps.cluster("2x4", gbps=(0.5, 20.0), gflops=1e4)
    tried = list[tuple[Factor, ...]]()

    def searched(wanted: Wanted) -> Found:
        found = best_of_factorings(graph, coarse, cluster, wanted, {})
        tried.extend(row.factors for row in found[1].tried if row.seconds is not None)
        return found

    wanted = Wanted(10**12, frozenset(), {}, None, anytime.silent, OVERLAP)
    problem, outcome = searched(wanted)
    cost = Extractor(problem).decide(outcome.best)
    other = next(o for o in (factors(cluster), factors(cluster, {"gpu": (2, 2)})) if o != problem.factors)
    slow = Problem(graph, coarse, cluster, other, objective=wanted.objective)
    solver = Solver(slow, memory.liveness(slow))
    narrow = solver.minimum("plan", [(s,) for s in slow.narrowest(slow.domains)])[0]
    dearer = replace(narrow, seconds=2 * cost.step_time_s)
    cheaper = replace(outcome, best=replace(outcome.best, seconds=0.9 * cost.step_time_s))
    others = ((slow, replace(outcome, best=dearer)),)
    left = multiplier._open([multiplier._Point((problem, replace(cheaper, others=others)), 1.0, cost)], wanted)
    assert left is not None
    assert set(left.again) == {problem.factors}
    assert left.slower == {slow.factors}
    tried.clear()
    again = searched(left)
    assert slow.factors not in tried
    assert problem.factors in tried
    assert again[1].best.seconds <= outcome.best.seconds * (1 + 1e-9)
    assert multiplier._open([], wanted) is wanted
    assert multiplier._open([multiplier._Point((slow, replace(outcome, best=dearer, others=())), 1.0, cost)], wanted) is None
