"""`shardplan calibrate` from the command line.

Most tests fill the cache with the seconds of a known machine, so that they measure (almost) nothing and know the answer.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from shardplan.calibrate import profiling
from shardplan.calibrate.cache import Cache
from shardplan.calibrate.fitting import rate_of, transfer_s
from shardplan.calibrate.measured_kernels import CPU, kernels, sizes_of
from shardplan.calibrate.measured_transfers import transfers
from shardplan.calibrate.profiling import bench_of, kernel_text, transfer_text, work_of_kernel
from shardplan.calibrate.timing import Timed
from shardplan.cost.network import Network
from shardplan.errors import CalibrationError
from shardplan.mesh import Cluster, Device
from shardplan.mesh.profile import read_profile
from shardplan.shell.cli import main

TRUE = Device(
    "cpu", {"float32": 3e10, "bfloat16": 5e10, "float16": 2e10, "float64": 1e10}, 6e9, 2**33, 5e-6, 0.7, 0.5, 4e-5, "cpu"
)


def fill(folder: Path, count: int, *, spread: float = 0.1, without: Callable[[str], bool] = lambda name: False) -> int:
    """Fills a cache with what ``count`` devices like `TRUE` take on one bus; the number of measurements left out."""
    bench = bench_of(jax.devices()[:count], None, None)
    cluster = replace(bench.cluster, device=TRUE)
    network, moves = Network(cluster, bench.factors), transfers(cluster, bench.factors)
    rows = {k.name: (kernel_text(k), work_of_kernel(k).seconds(TRUE)) for k in kernels(CPU)}
    rows |= {t.name: (transfer_text(t, bench), transfer_s(network, t)) for t in moves}
    kept = {name: row for name, row in rows.items() if not without(name)}
    Cache.opened(folder).add({bench.key(what): Timed(seconds, spread) for what, seconds in kept.values()})
    return len(rows) - len(kept)


def calibrate(folder: Path, *more: str) -> list[str]:
    return ["calibrate", "--cache", str(folder), "--repeats", "3", *more]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: list[Any]) -> Path:
    """The cache's folder. The test process has its devices by now: `--devices` would give it fewer, for all later tests."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.mark.slow
def test_a_calibration_writes_a_profile_that_plans_take(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(here, 4)  # not the contention, which is measured: on a busy machine its repeats spread by any amount
    assert main([*calibrate(here, "--devices", "4", "--spread", "1000"), "-o", "profile.json", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["measured"], said["file"]) == (0, "profile.json")
    assert {one["family"] for one in said["fit"]} >= {"products", "convolutions", "all-reduce", "permute", "launches"}
    assert all(abs(one["worst"]) < 0.05 for one in said["fit"])
    assert said["kept"] == [
        f"the link of the level {said['cluster']['levels'][0]['name']!r} is the preset's: it has one child here",
        "the rate of fused attention is the preset's part of that of products",
        "the memory of a device is the preset's",
    ]
    cluster = Cluster.load("profile.json")
    assert cluster.shape == (1, 4)
    assert rate_of(cluster.device, "float32") == pytest.approx(rate_of(TRUE, "float32"), rel=0.02)
    assert cluster.device.contention >= 1
    assert read_profile("profile.json").measured == ("cpu",)
    assert main(["plan", "models.mlp:train_step", "--cluster", "2@profile.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cluster"] == "2@calibrated-cpu"
    assert [p.name for p in Path().iterdir() if p.suffix != ".json"] == ["cache"]


def test_one_device_keeps_the_default_contention_and_says_so(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(here, 1)
    assert main(calibrate(here, "--devices", "1")) == 0
    out = capsys.readouterr().out
    assert "Not measured: the contention is the default, 1.3" in out
    assert "repeats spread by 10%" in out


def test_only_what_the_cache_lacks_is_measured_and_kept(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left_out = fill(here, 1, without=lambda name: name.startswith("add of 32768"))
    assert left_out == 1
    command = calibrate(here, "--devices", "1", "--json", "--spread", "1000")
    counts: list[int] = []
    for more in ((), ()):
        assert main([*command, *more]) == 0
        counts.append(json.loads(capsys.readouterr().out)["measured"])
    assert counts == [1, 0]


def test_a_measurement_that_spreads_beyond_the_bound_is_not_kept(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(here, 1, spread=0.0, without=lambda name: name.startswith("add of 32768"))
    command = calibrate(here, "--devices", "1", "--json", "--spread", "1e-9")
    for _ in range(2):
        assert main(command) == 0
        assert json.loads(capsys.readouterr().out)["measured"] == 1


def test_one_measurement_may_spread_beyond_the_bound(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(here, 1)
    fill(here, 1, spread=3.0, without=lambda name: not name.startswith("add of 32768"))
    assert main(calibrate(here, "--devices", "1")) == 0
    assert "largest 300%, add of 32768" in capsys.readouterr().out


@pytest.mark.parametrize("fact", ["platform", "kind", "processor", "cores", "shape", "jax", "harness"])
def test_a_measurement_is_known_only_where_everything_is_the_same(fact: str, devices: list[Any]) -> None:
    bench = bench_of(devices, None, None)
    other = replace(bench, identity={**bench.identity, fact: "another"})
    assert bench.identity[fact] is not None
    assert other.key("add") != bench.key("add") == replace(bench).key("add") != bench.key("multiply")


def test_repeats_that_spread_too_far_are_refused_and_nothing_is_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(here, 1, spread=0.9)
    assert main([*calibrate(here, "--devices", "1"), "-o", "profile.json"]) == 2
    err = capsys.readouterr().err
    assert "the repeats of one measurement spread by 90%" in err
    assert "--spread 1)" in err
    assert not Path("profile.json").exists()
    assert main([*calibrate(here, "--devices", "1"), "-o", "profile.json", "--spread", "1"]) == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["-o", "profile.toml"], "-o 'profile.toml': a profile is a .json file"),
        (["-o", "gone/profile.json"], "there is no folder"),
        (["--cluster", "2x4", "--devices", "4"], "2x4 has 8 devices (2x4), the machine 4: give the shape of this machine"),
        (["--cluster", "nothing"], "no cluster 'nothing'"),
        (["--devices", "99"], "99 simulated devices are needed"),
    ],
)
def test_a_calibration_that_cannot_be_is_refused_before_it_measures(
    here: Path, more: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(calibrate(here, *more)) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("option", "value"), [("--spread", "nan"), ("--spread", "0"), ("--spread", "x"), ("--repeats", "2")])
def test_a_bound_is_a_part_above_zero(here: Path, option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["calibrate", option, value])
    assert stopped.value.code == 2
    assert option in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupt_leaves_no_profile_and_a_whole_cache(here: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "shardplan", *calibrate(here, "--devices", "2"), "-o", "profile.json"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        while not here.exists():  # made when the measuring begins
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted before the machine was measured: no profile is written" in err
    assert [p.name for p in Path().iterdir()] == ["cache"]
    assert Cache.opened(here).entries is not None


def test_an_interrupt_that_was_cleared_stops_the_measuring_at_the_next_step(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cleared(*_: Any, **__: Any) -> Any:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return sizes_of("cpu")

    monkeypatch.setattr(profiling, "sizes_of", cleared)
    fill(here, 1, without=lambda name: name.startswith("add of 32768"))
    assert main(calibrate(here, "--devices", "1")) == 130
    assert "interrupted before the machine was measured" in capsys.readouterr().err


def test_levels_come_from_the_cluster_that_is_given(devices: list[Any]) -> None:
    bench = bench_of(devices, Cluster.load("2x4"), None)
    assert (bench.cluster.shape, bench.cluster.level_names, bench.cluster.device.name) == ((2, 4), ("node", "gpu"), "cpu")
    assert {t.over for t in transfers(bench.cluster, bench.factors)} == {(0,), (1,), (0, 1)}


def test_too_few_rounds_are_refused() -> None:
    """The spread of one repeat is zero, and that of two says little."""
    with pytest.raises(CalibrationError, match="rounds is 2: give 3 or more"):
        profiling.calibrate(rounds=2)
