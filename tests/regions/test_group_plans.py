"""Interrupts of the plans of groups, whose arrays must have the same layouts in all of them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardplan.errors import MemoryLimitError
from shardplan.planning.planner import Made
from shardplan.regions import group_plans
from shardplan.regions.group_plans import GroupPlanner
from shardplan.shell.placements import _first_stop


def _made(step_s: float, stopped: str) -> Made:
    return Made(cast(Any, SimpleNamespace(found=step_s)), cast(Any, None), None, cast(Any, stopped))


@pytest.mark.parametrize(
    ("seconds", "first", "pinned", "short"),
    [
        # the second group is the slowest: the first, which was interrupted, is planned again in its layouts
        ([1, 2], ["interrupted", "time budget"], ["time budget"], [True]),
        # the plan that was interrupted becomes no part of the step, because the next group does not fit beside it
        ([1, 2, 3], ["", "", ""], ["interrupted", "refused", "time budget", "time budget"], [False, True, True, True]),
    ],
)
def test_an_interrupt_is_told_where_layouts_are_made_alike(
    seconds: Sequence[float], first: Sequence[str], pinned: Sequence[str], short: Sequence[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, cuts = iter(pinned), list[bool]()

    def again(_: GroupPlanner, group: int, *__: Any, cut_short: bool) -> Made:
        cuts.append(cut_short)
        if (end := next(ends)) == "refused":
            raise MemoryLimitError(1, 2)
        return _made(seconds[group], end)

    def plan(_: GroupPlanner, group: int, *__: Any, cut_short: bool) -> Made:
        return _made(seconds[group], first[group])

    monkeypatch.setattr(group_plans, "step_time_s", lambda found: found)
    monkeypatch.setattr(GroupPlanner, "_plan", plan)
    monkeypatch.setattr(GroupPlanner, "_pinned", again)
    monkeypatch.setattr(GroupPlanner, "_array_layouts", lambda _, group, __: ((), ((group, None),)))
    groups, searcher = [(n,) for n in range(len(first))], cast(Any, SimpleNamespace(wanted=None))
    made = GroupPlanner(groups, [], cast(Any, None), searcher, frozenset(), "", {}).made()
    assert "interrupted" in [own.stopped for own in made]
    assert cuts == short


def test_an_interrupt_comes_before_the_deadlines_that_it_sets() -> None:
    plans = [cast(Any, SimpleNamespace(stopped=stopped)) for stopped in ("", "time budget", "interrupted")]
    assert _first_stop(plans) == "interrupted"
    assert _first_stop(plans[:2]) == "time budget"
    assert not _first_stop(plans[:1])
