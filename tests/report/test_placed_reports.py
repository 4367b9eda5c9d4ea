"""Plans with groups of devices are compared like plans on all devices, and have an HTML page."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

import shardplan
from models import mlp
from shardplan.ir import spec_text
from shardplan.plans.placed_data import PlacedData
from shardplan.report.diff_text import diff_text
from shardplan.report.placed_page import _joined
from shardplan.report.plan_diff import PlanDiff, plan_diff
from shardplan.shell.cli import main
from shardplan.testing import assert_plan_unchanged
from tests.report.pages import NEEDS_CHROMIUM, WIDE, Parsed, Probe, assert_needs_no_network


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


def test_arguments_that_lie_alike_on_one_group_are_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [part for option in ("layers=8", "batch=16", "width=16") for part in ("--set", option)]
    shape = ["--cluster", "2x1", "--axes", "stage=2", "--microbatches", "2"]
    assert main(["plan", "models.mlp:train_step", *sizes, *shape]) == 0
    table = capsys.readouterr().out.split("argument ")[1].split("\n\n")[0].splitlines()[2:]
    rows = [re.split(r" {2,}", line) for line in table]
    weights = [row for row in rows if row[0].startswith("state/params/")]
    assert len(weights) < 8
    assert sum(int(row[1]) for row in weights) == 2 * 8
    assert {row[2] for row in weights} == {"0", "1"}


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


def test_specs_put_each_argument_on_its_group(
    pipeline: shardplan.PlacedPlan, step_of: tuple[Any, tuple[Any, ...]], tmp_path: Path
) -> None:
    """The exported file imports JAX alone, and gives the shardings that the plan has."""
    pipeline.export(tmp_path / "specs.py")
    text = (tmp_path / "specs.py").read_text()
    assert set(re.findall(r"^(?:import|from) ([\w.]+)", text, re.M)) == {"jax", "jax.sharding"}
    module: dict[str, Any] = {}
    exec(text, module)
    devices = jax.devices()[4:8]
    placed = module["in_shardings"](step_of[1], module["meshes"](devices))
    expected = pipeline.in_shardings(pipeline.mesh(devices))
    assert jax.tree.leaves(placed) == jax.tree.leaves(expected)
    with pytest.raises(ValueError, match="parts of 4 devices, here are 3"):
        module["meshes"](devices[:3])
    for name in ("rules.yml", "step.stablehlo"):
        with pytest.raises(shardplan.ShardplanError, match="plan with placement='one'"):
            pipeline.export(tmp_path / name)


# -- the page ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(pipeline: shardplan.PlacedPlan) -> str:
    return pipeline.html(title="mlp")


@pytest.fixture(scope="module")
def shown(text: str) -> dict[str, Any]:
    return Parsed(text).data


def test_the_page_is_one_file_that_needs_no_network(pipeline: shardplan.PlacedPlan, text: str, tmp_path: Path) -> None:
    assert_needs_no_network(text)
    assert "<!--" not in text
    assert "2 groups of devices" in "".join(Parsed(text).noscript)
    assert pipeline.html(tmp_path / "plan.html", title="mlp") == text == (tmp_path / "plan.html").read_text(encoding="utf-8")


def test_the_page_has_the_figures_and_arrays_of_the_plan(pipeline: shardplan.PlacedPlan, shown: dict[str, Any]) -> None:
    figures = shown["figures"]
    for name in ("step_time_s", "peak_bytes", "transfer_bytes", "memory_limit"):
        assert figures[name] == getattr(pipeline, name)
    assert [tuple(g["devices"]) for g in shown["groups"]] == list(pipeline.devices)
    for group in shown["groups"]:
        assert group["busy_s"] + group["wait_s"] == pytest.approx(pipeline.step_time_s)
        assert group["why"].startswith(f"group {group['number']}, devices ")
        held = [path for path, n in pipeline.group_of.items() if n == group["number"]]
        assert sum(row["count"] for row in group["arrays"]) == len(held)
        assert all(row["spec"] == spec_text(pipeline.specs_by_path[row["first"]]) for row in group["arrays"])


def test_the_page_says_where_each_line_runs(data: PlacedData, shown: dict[str, Any]) -> None:
    assert data.inner is not None
    placed = len(data.outer) + len(data.inner)
    assert sum(row["forward"] + row["backward"] for row in shown["lines"]) <= placed
    assert {row["group"] for row in shown["lines"] if "mlp.py" in row["source"]} == {0, 1}


def test_bars_and_bubbles_of_a_group_fill_the_step(pipeline: shardplan.PlacedPlan, shown: dict[str, Any]) -> None:
    step_s = pipeline.step_time_s
    for number, row in enumerate(shown["timeline"]["streams"][: len(pipeline.groups)]):
        assert row["busy_s"] == pytest.approx(pipeline.placed.dispatch.busy_s(pipeline.placed.graph, number))
        assert sum(row["seconds"]) == pytest.approx(step_s, rel=1e-2)
        assert "bubble" in row["kinds"]
    kinds = {kind for row in shown["timeline"]["streams"] for kind in row["kinds"]}
    assert kinds == {"forward compute", "backward compute", "update", "transfer", "bubble"}


def test_rows_of_many_bars_are_joined_where_gaps_cannot_be_seen() -> None:
    bars = [(float(n), n + 0.999, ("forward compute", "update")[n >= 3000], n) for n in range(4000)]
    found = _joined(bars, 4000.0, 7)
    assert found == [(0.0, 2999.999, "forward compute", 7), (3000.0, 3999.999, "update", 7)]
    assert _joined(bars[:100], 100.0, 7) == bars[:100]


@NEEDS_CHROMIUM
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_draws_all_sections(probe: Probe, text: str, width: int) -> None:
    said = probe(text, WIDE, width)
    assert (said["ready"], said["wide"]) == ("yes", [])
    assert said["scroll"] <= width
    names = [name for name, _ in said["sections"]]
    assert names == ["summary", "groups", "timeline", "lines", "arrays", "collectives"]
    assert all(height > 80 for _, height in said["sections"])
