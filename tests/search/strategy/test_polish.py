"""Polish: no result is worse than the best assignment of the layouts that it was given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from models import mlp
from shardplan.constants import CONSTANTS
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.strategy import polish
from tests.machines import machine
from tests.models.test_factories import TINY
from tests.search import steps


def test_layouts_whose_tables_have_grown_too_large_are_tried_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of factors, which come first in small problems, lead to where the tables of ``also`` are larger."""
    step, args = mlp.train_step(**TINY["mlp"])
    problem = steps.problem(step, *args, on=machine("2x2x2:slow"))
    solver = Solver(problem, memory.liveness(problem))
    start = solver.minimum("start", [(d,) for d in problem.narrowest(problem.domains)])[0]
    also = problem.together(problem.domains, ((0, 1, 2),))
    given = polish.near(problem, problem.domains, start, also)
    paired = polish.polish(solver, problem.domains, start, pairs=False)
    before, after = (solver.order(polish.near(problem, problem.domains, s, also)).largest for s in (start, paired))
    assert before < after
    monkeypatch.setattr(polish, "CONSTANTS", replace(CONSTANTS, joint_entries=(before + after) // 2))
    result = polish.polish(solver, problem.domains, start, also=also)
    assert result.seconds <= solver.minimum("given", given)[0].seconds
    assert result.seconds <= paired.seconds
