"""The search as a whole: never worse than what it starts from, the same every time, and honest about its bound."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from models import gpt, mlp, wresnet
from shardplan.constants import CONSTANTS
from shardplan.cost.overlap import step_s
from shardplan.mesh import Cluster
from shardplan.search.baselines.recipes import baselines, groupings
from shardplan.search.baselines.rivals import Rivals
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem.pricing import Domain, Limits
from shardplan.search.problem.problem import Problem
from shardplan.search.problem.solution import Solution
from shardplan.search.strategy import polish, solve
from shardplan.search.strategy.recursion import recurse
from shardplan.search.strategy.solve import Outcome
from tests.machines import launchless
from tests.search import steps

Factory = tuple[Callable[..., Any], tuple[Any, ...]]


def searched(problem: Problem, **options: Any) -> Outcome:
    given = {
        "limit": 2**60,
        "donated": frozenset[int](),
        "domains": problem.domains,
        "deadline": None,
        "observer": lambda *_: None,
    }
    return solve.search(problem, **{**given, **options})


def no_joint(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no two levels fitted together, and no beam found anything: recursion and polish alone."""

    def nothing(solver: Solver, name: str, domains: Sequence[Domain]) -> tuple[Solution, float]:
        first = solver.minimum(name, [(s,) for s in solver.problem.narrowest(domains)])[0]
        return replace(first, seconds=math.inf), 0.0

    for module in (solve, polish):
        monkeypatch.setattr(module, "CONSTANTS", replace(CONSTANTS, joint_entries=3000))
    monkeypatch.setattr(Solver, "bounded", nothing)


@pytest.mark.parametrize("shape", ["2x2", "2x4", "2x2x2"])
@pytest.mark.parametrize("factory", [mlp.train_step(layers=3), gpt.train_step(layers=1)], ids=["mlp", "gpt"])
def test_recursion_and_polish_are_never_worse_than_their_seeds(
    shape: str, factory: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = steps.problem(factory[0], *factory[1], on=Cluster.load(shape))
    exact = searched(problem).best.seconds
    no_joint(monkeypatch)
    outcome = searched(problem)
    assert not outcome.exact
    solver = Solver(problem, memory.liveness(problem))
    recursed = recurse(solver, problem.domains).solution
    assert outcome.best.seconds <= recursed.seconds
    assert outcome.rivals.solutions
    for b in outcome.rivals.solutions:
        assert outcome.best.seconds <= b.seconds
    assert exact <= outcome.best.seconds * (1 + 1e-9)
    assert outcome.bound.seconds <= exact * (1 + 1e-9)


@pytest.mark.parametrize("shape", ["2x4", "2x2x2"])
def test_polish_ends_where_nothing_near_is_cheaper(shape: str) -> None:
    step, args = mlp.train_step(layers=3, batch=512, width=2048)
    problem = steps.problem(step, *args, on=Cluster.load(shape))
    solver = Solver(problem, memory.liveness(problem))
    gained = 0
    for r in baselines(problem):
        start, _ = solver.minimum(r.name, r.domains, regather=r.regather, limits=r.limits)
        polished = polish.polish(solver, problem.domains, start)
        assert polished.seconds <= start.seconds
        gained += polished.seconds < start.seconds
        nearby = polish.near(problem, problem.domains, polished)
        assert solver.minimum("near", nearby, regather=start.regather)[1] >= polished.seconds * (1 - 1e-9)
    assert gained


def test_polish_at_a_price_on_bytes_ends_where_nothing_near_is_cheaper_at_it() -> None:
    step, args = mlp.train_step(layers=2, batch=512, width=1024)
    problem = steps.problem(step, *args, on=Cluster.load("2x2x2"))
    solver = Solver(problem, memory.liveness(problem))
    start, _ = solver.minimum("first", [(s,) for s in problem.narrowest(problem.domains)])
    fastest = polish.polish(solver, problem.domains, start)
    priced = {"points": [solver.peak_point(fastest)], "price": 5 * fastest.seconds / fastest.peak_bytes}
    polished = polish.polish(solver, problem.domains, start, **priced)

    def cost(domains: Sequence[Domain]) -> float:
        return solver.minimum("x", domains, **priced)[1]

    own = cost([(s,) for s in polished.states])
    assert cost(polish.near(problem, problem.domains, polished)) >= own * (1 - 1e-9)
    assert own < cost([(s,) for s in fastest.states])
    assert solver.held(polished, priced["points"]) < solver.held(fastest, priced["points"])


@pytest.mark.parametrize("seeded", [False, True])
def test_a_search_over_three_levels_ends_below_every_baseline(seeded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where what reaches the baselines of three parts is too wide for tables: they seed it then."""
    step, args = gpt.train_step(layers=1, batch=16)
    problem = steps.problem(step, *args, on=Cluster.load("2x2x2"))
    solver = Solver(problem, memory.liveness(problem))
    spaces = [problem.together(problem.domains, groups) for groups in groupings(3)]
    if seeded:
        widest = max(solver.order(space).largest for space in spaces)
        monkeypatch.setattr(solve, "CONSTANTS", replace(CONSTANTS, joint_entries=widest))
        monkeypatch.setattr(Rivals, "reach", lambda _self, domains, _spaces: domains)
    asked: list[bool] = []
    seeds = Rivals.seeds
    monkeypatch.setattr(Rivals, "seeds", lambda *of: [asked.append(True), seeds(*of)][1])
    outcome = searched(problem)
    assert bool(asked) == seeded
    assert len(outcome.rivals.solutions) > 8
    for b in outcome.rivals.solutions:
        assert outcome.best.seconds <= b.seconds


@pytest.mark.parametrize(("shape", "solved"), [("2x2x2", 1), ("4x4x4", 2)])
def test_other_groupings_of_levels_are_solved_where_polishing_the_first_gained(shape: str, solved: int) -> None:
    step, args = gpt.train_step(layers=1, batch=64, width=1024, sequence=512)
    problem = steps.problem(step, *args, on=launchless(Cluster.load(shape)))
    told: list[str] = []
    outcome = searched(problem, observer=lambda what, _: told.append(what))
    assert told.count("levels") == solved
    solver = Solver(problem, memory.liveness(problem))
    rivals = Rivals(solver)
    polished: list[float] = []
    for groups in groupings(3):
        start = solver.minimum("plan", problem.together(problem.domains, groups), limits=Limits(groups=groups))[0]
        reach = rivals.reach(problem.domains, (groups,))
        polished.append(polish.polish(solver, problem.domains, solver.unlimited(start), also=reach).seconds)
    assert outcome.best.seconds <= min(polished) * (1 + 1e-3)
    assert outcome.best.seconds <= polished[-1]


@pytest.mark.parametrize("shape", ["2x4", pytest.param("2x2x2", marks=pytest.mark.slow)])
def test_two_runs_make_the_same_plan(shape: str) -> None:
    def once() -> dict[str, Any]:
        step, args = gpt.train_step(layers=1)
        made = shardplan.plan(step, *args, cluster=shape, donate_argnums=0).to_json()
        return {k: v for k, v in made.items() if k not in ("trace_s", "search_s", "explain")}

    assert once() == once()


@pytest.mark.parametrize("options", [{}, {"time_budget_s": 60.0}, {"remat": "auto"}], ids=str)
def test_one_device_has_nothing_to_plan(options: dict[str, Any]) -> None:
    step, args = mlp.train_step()
    plan = shardplan.plan(step, *args, cluster="1", **options)
    assert plan.communication_bytes == 0
    assert all(not any(spec) for spec in plan.flat_in_specs)


@pytest.mark.parametrize("shape", ["3", "6", "12", "5"])
def test_any_number_of_devices_is_planned(shape: str) -> None:
    step, args = mlp.train_step(batch=60, width=48)
    plan = shardplan.plan(step, *args, cluster=shape, donate_argnums=0)
    assert all(plan.step_time_s <= b.step_time_s for b in plan.baselines)
    for spec, shape_of in zip(plan.flat_in_specs, plan.traced.in_shapes, strict=True):
        for entry, n in zip(spec, getattr(shape_of, "shape", ()), strict=False):
            axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
            for axis in axes:
                assert n % plan.axes[axis] == 0


def test_a_spent_deadline_still_gives_a_plan() -> None:
    step, args = gpt.train_step(layers=1)
    problem = steps.problem(step, *args, on=Cluster.load("2x2x2"))
    outcome = searched(problem, deadline=time.monotonic() - 1)
    assert outcome.best.seconds < float("inf")
    assert all(outcome.best.seconds <= b.seconds for b in outcome.rivals.solutions)


@pytest.mark.slow
def test_the_seconds_of_a_plan_are_its_compute_and_its_collectives() -> None:
    for factory in (gpt.train_step(layers=1), wresnet.train_step(batch=8), gpt.train_step(layers=2, scan=True)):
        plan = shardplan.plan(factory[0], *factory[1], cluster="2x4", factors={}, donate_argnums=0)
        hideable_s, contention = plan.communication_s - plan.exposed_s, plan.cluster.device.contention
        assert plan.step_time_s == pytest.approx(step_s(plan.compute_s, plan.exposed_s, hideable_s, contention), rel=1e-9)
        serial = shardplan.plan(factory[0], *factory[1], cluster="2x4", factors={}, donate_argnums=0, time_model="sum")
        assert serial.step_time_s == serial.serial_s == pytest.approx(serial.compute_s + serial.communication_s, rel=1e-9)


@pytest.mark.slow
def test_raising_the_batch_moves_a_transformer_from_tensor_towards_data_parallel() -> None:
    """The part of the weights' bytes that is computed with whole, and the ways that the batch is split, grow with the batch."""
    whole: list[float] = []
    against: list[float] = []
    for batch in (8, 64, 512):
        sizes = {"layers": 2, "width": 4096, "sequence": 128, "heads": 32, "vocabulary": 4096}
        step, args = gpt.train_step(batch=batch, dtype="bfloat16", **sizes)
        plan = shardplan.plan(step, *args, cluster="dgx-h100:1", donate_argnums=0, memory_limit="1TiB", factors={})
        seconds = {b.name: b.step_time_s for b in plan.baselines}
        whole.append(_computed_whole(plan))
        against.append(seconds["tensor parallel"] / seconds["data parallel"])
    assert whole == sorted(whole)
    assert whole[0] < 0.5 < whole[-1]
    assert against == sorted(against)
    assert against[0] < 1 < against[-1]


def _computed_whole(plan: shardplan.Plan) -> float:
    """The part of the matrices' bytes that each device computes with."""
    problem = plan.session.problem
    here = total = 0.0
    for v in problem.coarse.variables:
        if v.kind != "stored" and v.tensors[0] in problem.coarse.weights and len(v.shape) > 1:
            nbytes = problem.graph.tensors[v.tensors[0]].nbytes
            here += nbytes / math.prod(plan.factors[f].size for f in plan.session.decisions.views[v.id].used)
            total += nbytes
    return here / total


def test_a_padded_vocabulary_is_split_inside_the_step() -> None:
    def lookup(params: Any, tokens: Any) -> Any:
        def loss(p: Any) -> Any:
            hidden = p["table"][tokens]
            return jax.nn.logsumexp(hidden @ p["head"], axis=-1).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    params = {"table": jax.ShapeDtypeStruct((50257, 512), jnp.float32), "head": jax.ShapeDtypeStruct((512, 50257), jnp.float32)}
    uneven = shardplan.plan(lookup, params, jax.ShapeDtypeStruct((4, 2048), jnp.int32), cluster="8", factors={})
    split = {
        layout.dims
        for t, layout in zip(uneven.session.problem.graph.tensors, uneven.session.decisions.layouts, strict=True)
        if layout is not None and t.shape == (4, 2048, 50257)
    }
    assert split == {((), (), (0,))}
    assert uneven.in_specs[0]["head"] in (P("gpu"), P())


@pytest.mark.parametrize(
    "factory", [mlp.train_step(width=2048, batch=512), gpt.train_step(layers=1, batch=16)], ids=["mlp", "gpt"]
)
def test_what_begins_anywhere_reaches_the_baselines_outside_a_space(factory: Factory) -> None:
    problem = steps.problem(factory[0], *factory[1], on=Cluster.load("2x2x2"))
    solver = Solver(problem, memory.liveness(problem))
    rivals = Rivals(solver)
    reach = rivals.reach(problem.domains, groupings(3)[-1:])
    assert any(reach)
    first, _ = solver.minimum("first", [(s,) for s in problem.narrowest(problem.domains)])
    step = polish.near(problem, problem.domains, first, reach)
    assert all(a in d for a, d in zip(first.states, step, strict=True))
    found, _ = solver.minimum("found", step)
    outside = [r for r in rivals.restrictions if r.limits.groups != groupings(3)[-1]]
    assert {r.limits.groups for r in outside} == {groupings(3)[0], ((0,), (1,), (2,))}
    for r in outside:
        solution, _ = solver.minimum(r.name, r.domains, regather=r.regather, limits=r.limits)
        assert all(s in d for s, d in zip(solution.states, step, strict=True))
        assert found.seconds <= solution.seconds
