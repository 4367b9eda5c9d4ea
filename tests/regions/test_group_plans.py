"""Interrupts of the plans of groups, whose arrays must have the same layouts in all of them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardplan.errors import MemoryLimitError
from shardplan.planning.planner import Made
from shardplan.regions.group_plans import GroupPlanner
from shardplan.shell.placements import _first_stop


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
    monkeypatch.setattr(GroupPlanner, "_pinned", plan)
    monkeypatch.setattr(GroupPlanner, "_array_layouts", lambda _, group, __: ((), ((group, None),)))
    groups, searcher = [(n,) for n in range(count)], cast(Any, SimpleNamespace(wanted=None))
    made = GroupPlanner(groups, [], cast(Any, None), searcher, frozenset(), "", {0: 0}).made()
    assert "interrupted" in [own.stopped for own in made]
    assert cuts == short


def test_an_interrupt_comes_before_the_deadlines_that_it_sets() -> None:
    plans = [cast(Any, SimpleNamespace(stopped=stopped)) for stopped in ("", "time budget", "interrupted")]
    assert _first_stop(plans) == "interrupted"
    assert _first_stop(plans[:2]) == "time budget"
    assert not _first_stop(plans[:1])
