"""`shardplan compare --measure`: plans run where the cluster's devices are, and nowhere else."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardplan
from shardplan.calibrate.steps import step_seconds
from shardplan.calibrate.timing import timed_of
from shardplan.shell.cli import main

TARGET = ["models.mlp:train_step", "--set", "width=32", "--set", "batch=16", "--set", "layers=1"]


@pytest.mark.slow
def test_on_a_cpu_cluster_every_plan_that_fits_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", *TARGET, "--cluster", "cpu", "--json"]
    assert main(command) == 0
    most = max(r["peak_bytes"] for r in json.loads(capsys.readouterr().out)["plans"])
    assert main([*command, "--memory", str(most - 1), "--measure", "--repeats", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {r["fits"] for r in found["plans"]} == {True, False}
    assert found["timed_on"] == "Timed on 8 CPU devices of this machine."
    assert all((r["measured_step_s"] is not None) == r["fits"] for r in found["plans"])
    assert all(r["measured_step_s"] > 0 and r["measured_spread"] >= 0 for r in found["plans"] if r["fits"])


@pytest.mark.slow
def test_where_the_devices_are_elsewhere_no_seconds_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *TARGET, "--cluster", "2", "--measure", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["timed_on"] is None
    assert all(r["measured_step_s"] is None and r["measured_peak_bytes"] > 0 for r in found["plans"])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            ["--cluster", "2x4", "--measure", "--devices", "real"],
            "--devices real: 2x4 has 8 of H100-SXM5-80GB (gpu), this machine",
        ),
        (["--cluster", "cpu:4", "--measure"], "32 simulated devices are needed"),
        (["--cluster", "cpu", "--devices", "real"], "--devices real is for --measure"),
        (["--measure"], "--cluster is missing"),
    ],
)
def test_devices_that_are_not_here_are_refused_where_they_are_insisted_on(
    more: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *TARGET, *more]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_plans_that_donate_their_arguments_run_again_and_again(devices: list[Any]) -> None:
    def step(state: Any, x: Any) -> Any:
        return {"w": state["w"] - 0.1 * x.T @ (x @ state["w"]), "key": jax.random.fold_in(state["key"], 1)}, x.sum()

    args = ({"w": jnp.ones((8, 8)), "key": jax.random.key(0)}, jax.ShapeDtypeStruct((16, 8), "float32"))
    plan = shardplan.plan(step, *args, cluster="2", donate_argnums=(0,))
    plans = {"this plan": plan, **dict(list(plan.baseline_plans().items())[:1])}
    told: list[str] = []
    times = step_seconds(plans, step, args, devices=devices[:2], rounds=3, observer=lambda what, part: told.append(what))
    assert set(times) == set(plans)
    assert all(t.seconds > 0 for t in times.values())
    assert told.count("running the plans in turn") == 3
    assert not args[0]["w"].is_deleted()


def test_the_seconds_of_a_plan_are_the_median_of_its_runs() -> None:
    found = timed_of([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (found.seconds, found.spread) == (3.0, pytest.approx(2 / 3))
    assert timed_of([2.0]).spread == 0.0
    assert np.isfinite(timed_of([1.0, 2.0]).seconds)
