"""The plans of groups: what they share, and what an interrupt leaves of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

import shardplan
from models import mlp
from shardplan.errors import MemoryLimitError
from shardplan.mesh import Cluster
from shardplan.planning.likewise import planned_likewise
from shardplan.planning.planner import Made, planned
from shardplan.planning.searcher import Searcher
from shardplan.planning.wanted import Wanted
from shardplan.regions import group_plans
from shardplan.regions.group_plans import GroupPlanner
from shardplan.search.inference.anytime import silent
from shardplan.shell.placed_plan import PlacedPlan
from shardplan.shell.placements import _first_stop
from shardplan.verify.verify import verify


def _made(stopped: str) -> Made:
    return Made(cast(Any, None), cast(Any, None), None, cast(Any, stopped))


@pytest.mark.parametrize(
    ("ends", "short"),
    [
        # the last group has the most flops: its plan is interrupted, the other one follows in its layouts
        (["interrupted", "time budget"], [False, True]),
        # the plan that was interrupted becomes no part of the step, because the next group does not fit beside it
        (["", "interrupted", "refused", "time budget", "time budget", "time budget"], [False, False, True, True, True, True]),
    ],
)
def test_an_interrupt_is_told_where_layouts_are_made_alike(
    ends: Sequence[str], short: Sequence[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, cuts, count = iter(ends), list[bool](), 2 if len(ends) == 2 else 3

    def plan(_: GroupPlanner, *__: Any, cut_short: bool) -> Made:
        cuts.append(cut_short)
        if (end := next(left)) == "refused":
            raise MemoryLimitError(1, 2)
        return _made(end)

    monkeypatch.setattr(GroupPlanner, "_flops", lambda _, group: group)
    monkeypatch.setattr(GroupPlanner, "_plan", plan)
    monkeypatch.setattr(GroupPlanner, "_pinned", lambda *_: [None] * count)
    groups, searcher = [(n,) for n in range(count)], cast(Any, SimpleNamespace(wanted=None))
    made = GroupPlanner(groups, [], cast(Any, None), searcher, frozenset(), "", {0: 0}).made()
    assert "interrupted" in [own.stopped for own in made]
    assert cuts == short


def test_an_interrupt_comes_before_the_deadlines_that_it_sets() -> None:
    plans = [cast(Any, SimpleNamespace(stopped=stopped)) for stopped in ("", "time budget", "interrupted")]
    assert _first_stop(plans) == "interrupted"
    assert _first_stop(plans[:2]) == "time budget"
    assert not _first_stop(plans[:1])


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[Made]:
    """The plans of groups that a search finds, in the order in which they are made."""
    made: list[Made] = []

    def search(*args: Any, **options: Any) -> Made:
        made.append(planned(*args, **options))
        return made[-1]

    monkeypatch.setattr(group_plans, "planned", search)
    return made


@pytest.mark.slow
def test_stages_with_equal_programs_share_one_search(searched: list[Made]) -> None:
    """Of four stages, the first makes no gradient for its inputs, and the last has the loss."""
    step, args = mlp.train_step(layers=8, width=64, inputs=64, classes=64, batch=64)
    plan = pipeline(step, args, "4x2", stage=4)
    assert len(searched) == 3
    assert list(plan.groups[1].entries.values()) == list(plan.groups[2].entries.values())
    assert verify(plan, step, args).passed


def test_a_plan_likewise_is_of_an_equal_program_on_an_equal_cluster_and_fits(searched: list[Made]) -> None:
    step, args = mlp.train_step(layers=8, width=64, inputs=64, classes=64, batch=64)
    pipeline(step, args, "4x2", stage=4)
    of, session = searched[1], searched[1].session
    wanted = Wanted(session.solution.peak_bytes, session.donated, {}, None, silent, session.objective)
    searcher = Searcher((), None, session.problem.cluster, wanted)
    again = planned_likewise(session.program, searcher, of)
    assert again is not None
    assert (again.session.solution.states, again.session.solution.seconds) == (session.solution.states, session.solution.seconds)
    assert planned_likewise(session.program, replace(searcher, wanted=replace(wanted, memory=wanted.memory - 1)), of) is None
    assert planned_likewise(session.program, replace(searcher, cluster=Cluster.load("4")), of) is None
    assert planned_likewise(searched[0].session.program, searcher, of) is None
    wider = replace(session.program, tensors=tuple(replace(t, shape=(*t.shape[:-1], 2 * t.shape[-1])) if t.shape else t
                                                   for t in session.program.tensors))  # fmt: skip
    assert planned_likewise(wider, searcher, of) is None


def pipeline(step: Any, args: Any, cluster: str, **axes: int) -> PlacedPlan:
    plan = shardplan.plan(step, *args, cluster=cluster, microbatches=8, axes=axes)
    assert isinstance(plan, PlacedPlan)
    return plan
