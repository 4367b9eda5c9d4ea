"""An observer with a method ``best`` hears of the best plan while planning goes on, and planning does not change for it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from models import gpt, mlp
from tests.machines import machine


class Heard:
    """An observer that notes what it hears of the best plan."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.plans: list[tuple[float, float]] = []

    def __call__(self, what: str, part: float) -> None:
        self.stages.append(what)

    def best(self, best_s: float, least_s: float) -> None:
        self.plans.append((best_s, least_s))


SMALL = gpt.train_step(layers=1, width=64, batch=16)


OTHERS: list[dict[str, Any]] = [{}, {"time_model": "sum"}, {"backend": "specs"}]


@pytest.mark.parametrize(
    "options", [{"axes": {"data": 4, "tensor": 2}}, *(pytest.param(other, marks=pytest.mark.slow) for other in OTHERS)]
)
def test_the_last_that_is_heard_is_the_plan(options: dict[str, Any]) -> None:
    heard, (step, args) = Heard(), SMALL
    cluster = machine("2x4:slow")
    plan = shardplan.plan(step, *args, cluster=cluster, donate_argnums=0, observer=heard, **options)
    alone = shardplan.plan(step, *args, cluster=cluster, donate_argnums=0, **options)
    assert heard.plans[-1][0] == pytest.approx(plan.step_time_s)
    assert plan.in_specs == alone.in_specs
    assert plan.step_time_s == alone.step_time_s


def test_the_bound_is_one_of_the_plan() -> None:
    heard, (step, args) = Heard(), SMALL
    plan = shardplan.plan(step, *args, cluster=machine("2x4:slow"), observer=heard, factors={}, backend="specs")
    assert plan.exact
    assert all(0 < least_s <= best_s * (1 + 1e-6) for best_s, least_s in heard.plans)
    assert max(least_s for _, least_s in heard.plans) == pytest.approx(plan.lower_bound_s)


@pytest.mark.slow
def test_a_better_plan_is_heard_as_it_is_found() -> None:
    heard, (step, args) = Heard(), SMALL
    shardplan.plan(step, *args, cluster=machine("8:slow"), observer=heard, backend="specs")
    found = [best_s for best_s, _ in heard.plans]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) > 1


@pytest.mark.slow
def test_what_does_not_fit_is_no_plan() -> None:
    heard, (step, args) = Heard(), SMALL
    with pytest.raises(shardplan.errors.MemoryLimitError):
        shardplan.plan(step, *args, cluster=machine("2x4:slow"), observer=heard, memory_limit=1000)
    assert heard.plans == []


@pytest.mark.slow
def test_plans_of_groups_are_no_plans_of_the_step() -> None:
    heard, (step, args) = Heard(), gpt.train_step(layers=2, width=64, batch=16)
    plan = shardplan.plan(step, *args, cluster=machine("2x2:slow"), axes={"stage": 2}, observer=heard)
    assert heard.plans[-1] == (plan.step_time_s, 0.0)
    assert all(best_s >= plan.step_time_s for best_s, _ in heard.plans)


def test_each_point_of_a_sweep_begins_without_a_plan() -> None:
    heard = Heard()
    made = shardplan.sweep(mlp.train_step, vary={"batch": [16, 32]}, options={"layers": 1}, cluster="2", observer=heard)
    begins = [n for n, (best_s, _) in enumerate(heard.plans) if math.isinf(best_s)]
    last = [heard.plans[n - 1][0] for n in begins[1:] if not math.isinf(heard.plans[n - 1][0])] + [heard.plans[-1][0]]
    assert last == [pytest.approx(point.step_time_s) for point in made.points]
    assert {what.partition(":")[0] for what in heard.stages} == {"point 1 of 2", "point 2 of 2"}


def test_a_search_of_strategies_tells_its_best() -> None:
    heard, (step, args) = Heard(), mlp.train_step(layers=3)
    made = shardplan.place(step, *args, cluster="2x2", start=("dp",), proposals=20, observer=heard)
    assert heard.plans[-1] == (made.step_time_s, 0.0)


def test_a_score_tells_both_sides_apart() -> None:
    heard, (step, args) = Heard(), mlp.train_step(layers=1)
    scored = shardplan.score(step, *args, cluster="2", rules={"*": P()}, observer=heard)
    assert {what.partition(":")[0] for what in heard.stages} == {"your sharding", "the plan"}
    at = next(n for n, (best_s, _) in enumerate(heard.plans) if math.isinf(best_s))
    assert heard.plans[at - 1][0] == pytest.approx(scored.step_time_s)
    assert heard.plans[-1][0] == pytest.approx(scored.plan_s)
