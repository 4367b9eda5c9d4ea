"""What coarsening gives up: against the same step in which every tensor has a layout of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings

from models import gpt, mlp
from shardplan.mesh import Cluster
from shardplan.search import Problem, brute, memory
from shardplan.search.solver import Solver
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
        (gpt.train_step(layers=1, width=1024, sequence=512, batch=64, heads=16, vocabulary=4096), 0.01),
        (gpt.train_step(layers=1), 0.01),
    ],
    ids=["mlp", "gpt", "small gpt"],
)
def test_real_steps_lose_little(factory: tuple[Callable[..., Any], tuple[Any, ...]], most: float) -> None:
    problem = steps.problem(factory[0], *factory[1], on=Cluster.load("8"))
    alone = steps.uncoarsened_seconds(problem)
    assert alone <= coarse_seconds(problem) <= alone * (1 + most)
