"""The search adds something: three small cases in which the plan beats every baseline and is the best of all layouts.

Every assignment of layouts is tried; `steps.py` says what each case is about, `one-switch.toml` what it runs on.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest

import shardplan
from shardplan.shell.plan_of_step import Plan
from tests.cases.steps import CASES
from tests.oracles import brute
from tests.search.steps import uncoarsened_seconds

CLUSTER = Path(__file__).parent / "one-switch.toml"


@cache
def planned(name: str) -> Plan:
    step, args = CASES[name]()
    return shardplan.plan(step, *args, cluster=CLUSTER, donate_argnums=0, memory_limit="1TiB", factors={})


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_strictly_cheaper_than_every_baseline(name: str) -> None:
    plan = planned(name)
    assert {"replicated", "data parallel", "ZeRO-1", "FSDP", "tensor parallel", "Spartan", "EqualChop"} <= {
        b.name for b in plan.baselines
    }
    assert plan.step_time_s * 1.01 < min(b.step_time_s for b in plan.baselines)


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_the_best_of_all_layouts(name: str) -> None:
    plan = planned(name)
    problem = plan.session.problem
    oracle = brute.Oracle(problem)
    assert math.prod(len(d) for d in problem.domains) <= brute.MOST_ASSIGNMENTS
    best = oracle.minimum()
    assert plan.searched_s == pytest.approx(best.seconds, abs=1e-10)
    assert plan.exact
    assert plan.lower_bound_s == pytest.approx(min(best.seconds, plan.step_time_s), abs=1e-10)


@pytest.mark.parametrize(("name", "lost"), [("huge embedding", 0.0), ("convolution and dense", 0.005), ("two branches", 0.0)])
def test_no_layouts_of_single_tensors_are_better(name: str, lost: float) -> None:
    """Coarsening gives up nothing, or (a small value and its gradient share a layout) less than half a percent."""
    plan = planned(name)
    alone = uncoarsened_seconds(plan.session.problem)
    assert alone <= plan.searched_s + 1e-10
    assert plan.searched_s <= alone * (1 + lost) + 1e-10


@pytest.mark.parametrize("name", CASES)
def test_the_baselines_are_among_the_layouts(name: str) -> None:
    """The oracle prices a baseline's layouts at no more than the baseline, which may not choose how its ops run."""
    plan = planned(name)
    oracle = brute.Oracle(plan.session.problem)
    for solution in plan.session.rivals.solutions:
        assert oracle.seconds(solution.states) <= solution.seconds + 1e-10


def test_the_table_stays_where_it_is_and_the_examples_are_split() -> None:
    plan = planned("huge embedding")
    table = plan.specs_by_path["weights/table"]
    assert tuple(table) == (None, "gpu"), "each device has some features of every row"
    nbytes = 400_000 * 128 * 4
    assert all(c.wire_bytes < nbytes / 100 for c in plan.collectives), "neither the table nor its gradient travels"
    assert {"all-to-all"} <= {c.kind for c in plan.collectives}, "looked-up rows go from features to examples"


def test_images_are_split_and_the_large_matrix_too() -> None:
    plan = planned("convolution and dense")
    assert tuple(plan.specs_by_path["batch/images"])[:1] == ("gpu",)
    assert not any(plan.specs_by_path["batch/filters"])
    assert tuple(plan.specs_by_path["weights/dense"]) == (None, "gpu")


def test_each_branch_is_split_its_own_way() -> None:
    plan = planned("two branches")
    assert tuple(plan.specs_by_path["batch/many"])[:1] == ("gpu",)
    assert not any(plan.specs_by_path["batch/few"])
    assert "gpu" in tuple(plan.specs_by_path["weights/large"])
