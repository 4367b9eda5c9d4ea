"""Devices that differ: absent ones run nothing, slow ones take longer, and links of their own carry messages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import shardplan
from models import mlp
from shardplan.errors import PlacementError
from shardplan.mesh import Cluster, SingleDevice, SingleLink
from shardplan.placement.configurations import Configuration
from shardplan.placement.device_topology import machine_of
from shardplan.placement.group_reductions import GroupPrices
from shardplan.placement.mcmc import ChainLimits
from shardplan.placement.placement_problem import PlacementProblem, problem_of
from shardplan.placement.search import search, starts_of
from shardplan.placement.starts import data_parallel
from shardplan.placement.whole_operators import scheduled
from shardplan.shell.cli import main
from tests.placement.problems import operators


def _problem(*devices: SingleDevice, model: str = "mlp") -> PlacementProblem:
    return problem_of(operators(model), machine_of(replace(Cluster.load("2x2"), single_devices=devices)))


@pytest.mark.parametrize("model", ["mlp", "rnn", "gpt"])
def test_absent_devices_run_nothing(model: str) -> None:
    here = _problem(SingleDevice(1, absent=True), model=model)
    starts = starts_of(here, ("dp", "expert", "random"), 0, None)
    found = search(here, starts, ChainLimits(proposals=100), seed=1, workers=1, engine="python")
    for strategy in (*starts.values(), found.strategy, scheduled(here, "heft")):
        here.check(strategy, "it")
        assert not any(1 in c.devices for c in strategy)


def test_data_parallelism_leaves_absent_devices_out() -> None:
    assert {c.devices for c in data_parallel(_problem(SingleDevice(1, absent=True)))} == {(0, 2)}


def test_a_strategy_on_an_absent_device_is_refused() -> None:
    here = _problem(SingleDevice(1, absent=True))
    strategy = data_parallel(_problem())
    with pytest.raises(PlacementError, match="of which some are absent: search again"):
        here.check(strategy, "it")


def test_a_slow_device_takes_longer() -> None:
    slow, fast = _problem(SingleDevice(3, speed=0.5)), _problem()
    assert slow.machine.speed.tolist() == [1, 1, 1, 0.5]
    whole = tuple(Configuration((1,) * len(o.loops), (3,)) for o in fast.graph.operators)
    assert slow.seconds(whole, "python") == pytest.approx(2 * fast.seconds(whole, "python"))


def test_a_single_link_replaces_that_of_the_levels() -> None:
    plain = machine_of(Cluster.load("2x2"))
    own = machine_of(replace(Cluster.load("2x2"), single_links=(SingleLink((0, 3), 1e9), SingleLink((1, 2), latency_s=1e-3))))
    assert own.bytes_per_s[0, 3] == own.bytes_per_s[3, 0] == 1e9
    assert own.latency_s[0, 3] == plain.latency_s[0, 3]
    assert own.latency_s[2, 1] == 1e-3
    assert own.bytes_per_s[1, 2] == plain.bytes_per_s[1, 2]
    numbers = [int(own.link[pair]) for pair in ((0, 3), (3, 0), (1, 2), (2, 1))]
    assert [own.links[n] for n in numbers] == ["link 0-3", "link 3-0", "link 1-2", "link 2-1"]
    changed = own.link != plain.link
    assert np.argwhere(changed).tolist() == [[0, 3], [1, 2], [2, 1], [3, 0]]
    assert GroupPrices(own).seconds(0b1001, 1 << 20) > GroupPrices(plain).seconds(0b1001, 1 << 20)


def test_the_command_takes_a_cluster_whose_devices_differ(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text(replace(Cluster.load("2x2"), single_devices=(SingleDevice(1, absent=True),)).to_toml())
    options = ["models.mlp:train_step", "--cluster", str(file)]
    assert main(["place", *options, "--chains", "1", "--proposals", "10", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["plan_s"] is None
    assert not any(1 in devices for devices in answer["assignment"].values())
    assert main(["plan", *options]) == 2
    message = "single_devices: gives 1 other figures, but this needs equal devices: use `shardplan place`, or remove the key"
    assert capsys.readouterr().err == f"shardplan: {file}: {message}\n"


def test_a_plan_is_no_start_where_devices_are_absent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "one.toml"
    file.write_text(replace(Cluster.load("2x2"), single_devices=(SingleDevice(1, absent=True),)).to_toml())
    step, args = mlp.train_step()
    with pytest.raises(PlacementError, match="the start 'plan' uses all devices, and some are absent"):
        shardplan.place(step, *args, cluster=str(file), start=("plan",), budget_s=1)
    placed = shardplan.place(step, *args, cluster=str(file), start=("dp", "plan"), proposals=1)
    assert placed.timeline.rows[:4] == ("device 0", "device 1 (absent)", "device 2", "device 3")
    assert caplog.messages == ["the start 'plan' is left out: it uses all devices, and some are absent here"]


def test_the_report_says_that_parts_are_equal_on_unequal_devices() -> None:
    step, args = mlp.train_step()
    text = shardplan.place(step, *args, cluster="2x2", start="dp", proposals=1, speed=[1, 1, 0.5, 1]).text()
    assert (
        "The parts of an operator are equal, but devices are not: a slower device takes longer. Speeds: 0.5x on 2, 1x on 0-1, 3."
        in text
    )
    assert "Speeds" not in shardplan.place(step, *args, cluster="2x2", start="dp", proposals=1).text()
