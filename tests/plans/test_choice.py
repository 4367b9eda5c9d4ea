"""Which solution of a search becomes the plan, where communication hides."""

from __future__ import annotations

from typing import Any

import pytest

import shardplan
from models import gpt, mlp
from shardplan.plans import choice
from shardplan.plans.summary import scheduled


def test_of_plans_nearly_as_fast_the_one_is_taken_that_counts_least_on_hiding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replication sends nothing. The search's own plan is faster, but not if only half of what it hides is hidden."""
    step, args = mlp.train_step(layers=5, width=1536, batch=96)
    session = shardplan.plan(step, *args, cluster="8", factors={}, donate_argnums=0, backend="specs").session
    steady = session.at(next(s for s in session.rivals.solutions if s.name == "replicated"))
    own, other = scheduled(session), scheduled(steady)
    assert own.step_time_s < other.step_time_s
    assert other.expected_s < own.expected_s

    def chosen(**options: Any) -> Any:
        return choice.best_scheduled(session, None, [steady], baselines=False, **options)[0]

    ratio = other.step_time_s / own.step_time_s
    monkeypatch.setattr(choice, "_NEAR", 0.999 * ratio)
    assert chosen() is session
    monkeypatch.setattr(choice, "_NEAR", 1.001 * ratio)
    assert chosen() is steady
    assert chosen(in_haste=True) is session


def test_a_plan_that_a_baseline_beats_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another plan that hides less stands between the search's own and the fastest baseline, and beyond it."""
    step, args = mlp.train_step(layers=5, width=1536, batch=96)
    session = shardplan.plan(step, *args, cluster="8", factors={}, donate_argnums=0, backend="specs").session
    steady = session.at(next(s for s in session.rivals.solutions if s.name == "replicated"))
    monkeypatch.setattr(choice, "_NEAR", 2.0)
    taken = choice.best_scheduled(session, None, [steady])[1]
    assert taken.step_time_s == scheduled(steady).step_time_s
    with monkeypatch.context() as patch:
        patch.setattr(choice, "_rivals", lambda *_: [(0.0, session)])  # as if a baseline were the search's own plan
        assert choice.best_scheduled(session, None, [steady])[0] is session


@pytest.mark.parametrize(
    ("sizes", "cluster"),
    [
        ({"layers": 2, "width": 512, "sequence": 128, "batch": 8}, "8"),
        ({"layers": 2, "width": 1024, "sequence": 256, "batch": 32}, "2x4"),
    ],
)
def test_no_baseline_that_fits_is_faster_than_the_plan(sizes: dict[str, int], cluster: str) -> None:
    step, args = gpt.train_step(**sizes)
    plan = shardplan.plan(step, *args, cluster=cluster, factors={}, donate_argnums=0)
    fitting = [b.step_time_s for b in plan.baselines if b.fits]
    assert fitting
    assert plan.step_time_s <= min(fitting) * (1 + 1e-6)
