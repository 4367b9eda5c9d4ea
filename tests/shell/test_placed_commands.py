"""Microbatches, pipelines and placements from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shardplan.report.json import PLAN_KEYS
from shardplan.shell.cli import main

MLP = ["models.mlp:train_step", "--cluster", "2x4", "--set", "layers=4"]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line: (exit code, stdout, stderr)."""

    def call(*words: str) -> tuple[int, str, str]:
        code = main(words)
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_a_pipeline_is_planned_and_shown(run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run("plan", *MLP, "--axes", "stage=2,data=4", "--microbatches", "4")
    assert code == 0
    assert "on 2 groups of devices" in out
    assert "4 microbatches" in out
    assert "state/params/layer_0/{bias,kernel}" in out


def test_its_json_has_every_run_with_its_seconds(run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run("plan", *MLP, "--axes", "stage=2", "--microbatches", "4", "--json")
    assert code == 0
    plan = json.loads(out)
    assert [g["devices"] for g in plan["groups"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert {0, 1, 2, 3} <= {i["microbatch"] for i in plan["issues"]}
    assert set(PLAN_KEYS) <= set(plan)
    assert plan["lower_bound_s"] is None
    assert (plan["cluster"], plan["objective"], plan["donate_argnums"]) == ("2x4", "time", [])
    assert plan["step_time_s"] == max(i["end_s"] for i in plan["issues"])


@pytest.mark.slow
def test_a_pipeline_is_verified(run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run("verify", *MLP, "--axes", "stage=2", "--microbatches", "4", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["backend"] == "regions"
    assert found["equal"]
    assert not found["unmatched"]


def test_a_saved_strategy_is_a_placement(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    file = str(tmp_path / "strategy.json")
    place = ["place", "models.two_tower:train_step", "--cluster", "2x2", "--budget", "3", "--start", "dp", "--method", "regions"]
    assert run(*place, "-o", file)[0] == 0
    code, out, _ = run("plan", "models.two_tower:train_step", "--cluster", "2x2", "--placement", file)
    assert code == 0
    assert "groups of devices" in out


@pytest.mark.slow
def test_a_placement_is_searched_and_the_report_shows_what_was_tried(run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run("plan", *MLP, "--placement", "auto")
    assert code == 0
    assert "Placements" in out
    assert "2 stages, 2 microbatches" in out
    code, out, _ = run("plan", "models.two_tower:train_step", "--cluster", "2x4", "--placement", "auto", "--json")
    assert code == 0
    plan = json.loads(out)
    (own,) = [row for row in plan["placements_tried"] if not row["why_not"]]
    assert own["what"].startswith("branches on")
    assert own["step_time_s"] == plan["step_time_s"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", *MLP, "--axes", "data=4,chunk=2"], "chunk=2 is the number of chunks of layers in each stage"),
        (
            ["simulate", *MLP, "--axes", "stage=2", "--microbatches", "4", "--no-overlap"],
            "overlap and contention of a simulation",
        ),
        (["compare", *MLP, "--axes", "stage=2", "--microbatches", "4"], "compare does not take a plan with groups of devices"),
        (["compare", *MLP, "--placement", "auto"], "compare does not take a plan with groups of devices"),
        (["plan", *MLP, "--microbatches", "0"], "microbatches=0: give a whole number"),
        (["plan", *MLP, "--placement", "two"], "unsupported placement 'two'"),
    ],
    ids=lambda w: " ".join(w[0:1] + w[5:]) if isinstance(w, list) else "",
)
def test_what_cannot_be_is_one_line(run: Callable[..., tuple[int, str, str]], words: list[str], message: str) -> None:
    code, out, err = run(*words)
    assert code == 2
    assert message in err
    assert not out
