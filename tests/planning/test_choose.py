"""Which solution of a search becomes the plan, where communication hides."""

from __future__ import annotations

import pytest

import shardplan
from models import gpt, mlp
from shardplan.planning.choose import Fastest
from shardplan.planning.scheduled import scheduled
from tests.fuzz.generate import program
from tests.fuzz.program import make
from tests.machines import machine


def test_the_plan_is_the_fastest_as_scheduled() -> None:
    """Whichever comes first, unless it is a baseline's place to be looked at."""
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
        ({"layers": 2, "width": 1024, "sequence": 256, "batch": 32}, "2x4"),
    ],
)
def test_no_baseline_that_fits_is_faster_than_the_plan(sizes: dict[str, int], cluster: str) -> None:
    step, args = gpt.train_step(**sizes)
    plan = shardplan.plan(step, *args, cluster=cluster, factors={}, donate_argnums=0)
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
