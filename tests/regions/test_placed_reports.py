"""Plans with groups of devices are compared like plans on all devices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardplan
from models import mlp
from shardplan.plans.placed_data import PlacedData
from shardplan.report.diff_text import diff_text
from shardplan.report.plan_diff import PlanDiff, plan_diff
from shardplan.shell.cli import main
from shardplan.testing import assert_plan_unchanged


@pytest.fixture(scope="module")
def step_of() -> tuple[Any, tuple[Any, ...]]:
    return mlp.train_step(layers=2, batch=16, width=16)


@pytest.fixture(scope="module")
def pipeline(step_of: tuple[Any, tuple[Any, ...]]) -> shardplan.PlacedPlan:
    step, args = step_of
    plan = shardplan.plan(step, *args, donate_argnums=(0,), cluster="2x2", axes={"stage": 2, "data": 2}, microbatches=2)
    assert isinstance(plan, shardplan.PlacedPlan)
    plan.to_json()
    return plan


@pytest.fixture(scope="module")
def data(pipeline: shardplan.PlacedPlan) -> PlacedData:
    return pipeline.data


def test_a_plan_on_groups_is_like_itself(data: PlacedData) -> None:
    found = plan_diff(data, replace(data, trace_s=9.0, search_s=9.0))
    assert found.alike
    assert diff_text(found, ("a", "b")) == "a and b plan alike"


def _names(found: PlanDiff) -> dict[str, list[str]]:
    return {name: [c.name for c in getattr(found, name)] for name in ("machine", "layouts", "figures")}


def test_what_changed_on_groups_is_named(data: PlacedData) -> None:
    """An argument on another group with other ops, programs in another order, and a group with another figure."""
    first, second = data.groups
    everywhere = replace(first, arguments=(*first.arguments, *second.arguments), compute_s=2 * first.compute_s)
    moved = replace(
        data,
        groups=(everywhere, second),
        group_of=dict.fromkeys(data.group_of, 0),
        outer=dict.fromkeys(data.outer, 0),
        issues=data.issues[::-1],
    )
    found = plan_diff(data, moved)
    assert _names(found)["machine"] == ["order of the schedule"]
    assert "compute_s of group 0" in _names(found)["figures"]
    assert found.other_groups == sum(group == 1 for group in data.outer.values())
    assert found.layouts
    assert all(row.before.endswith(" on group 1") and row.after.endswith(" on group 0") for row in found.layouts)
    text = diff_text(found, ("a", "b"))
    assert "operators run on other groups of devices" in text
    assert "compute_s of group 0" in text


def test_a_plan_on_groups_is_compared_with_one_on_all_devices(data: PlacedData, step_of: tuple[Any, tuple[Any, ...]]) -> None:
    step, args = step_of
    one = shardplan.plan(step, *args, donate_argnums=(0,), cluster="2x2").data
    found = plan_diff(replace(one, fingerprint=data.fingerprint), data)
    assert {"axes", "group 0", "group 1", "schedule"} <= set(_names(found)["machine"])
    assert {"step_time_s", "compute_s", "compute_s of group 1"} <= set(_names(found)["figures"])
    assert all(" on group " in row.after and " on group " not in row.before for row in found.layouts)
    assert len(found.layouts) > 0


def test_the_command_and_the_assertion_take_groups(
    pipeline: shardplan.PlacedPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_plan_unchanged(pipeline, "a.json", update=True)
    assert_plan_unchanged(pipeline, "a.json")
    assert main(["diff", "a.json", "a.json"]) == 0
    content = json.loads(Path("a.json").read_text())
    content["issues"] = content["issues"][::-1]
    Path("b.json").write_text(json.dumps(content))
    capsys.readouterr()
    assert main(["diff", "a.json", "b.json", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["machine"][0]["name"] == "order of the schedule"
    with pytest.raises(AssertionError, match="order of the schedule"):
        assert_plan_unchanged(pipeline, "b.json")
