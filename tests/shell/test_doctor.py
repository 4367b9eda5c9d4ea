"""`shardplan doctor`: what is installed and tested, which devices are here, and what to do about the rest."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from shardplan.mesh import Cluster
from shardplan.report.doctor_text import doctor_text
from shardplan.shell import doctor
from shardplan.shell.cli import main
from shardplan.shell.doctor import EXTRAS, NEEDED, examine, installed
from shardplan.versions import NEWEST

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CPU: dict[str, Any] = {"platform": "cpu", "kind": "cpu", "count": 1}


def _names(requirements: list[str]) -> list[str]:
    texts = [text.partition(";")[0].partition("[")[0].partition(">")[0].partition("=")[0].strip() for text in requirements]
    return list(dict.fromkeys(texts))


@pytest.fixture
def on_h100s(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"platform": "gpu", "kind": "NVIDIA H100 80GB HBM3", "count": 8, "assumed": []}
    monkeypatch.setattr(doctor, "look", lambda _: {**found, "cluster": Cluster.load("dgx-h100").to_toml()})


def test_its_tables_are_those_of_the_project() -> None:
    assert {*_names(PROJECT["dependencies"]), "jaxlib"} == set(NEEDED)
    assert {name: _names(texts) for name, texts in PROJECT["optional-dependencies"].items()} == {
        name: list(packages) for name, (packages, _) in EXTRAS.items()
    }


def test_the_command_looks_at_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert found["jax"]["version"] == installed("jax")
    assert found["devices"]["platform"] == "cpu"
    assert found["devices"]["name"] == "detected-cpu"
    assert "All that is necessary is here." in doctor_text(found)


def test_a_flag_that_ends_the_compiler_does_not_end_the_doctor() -> None:
    found = examine({**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_of_no_release=1"})
    assert not found["ok"]
    assert "xla_of_no_release" in found["devices"]["error"]


@pytest.mark.usefixtures("on_h100s")
def test_flags_that_are_set_win_over_those_of_plans() -> None:
    name = "xla_gpu_all_reduce_combine_threshold_bytes"
    flags = examine({"XLA_FLAGS": f"--{name}=7 --xla_dump_to=/tmp/x"})["xla_flags"]
    assert flags["set"] == {name: "7", "xla_dump_to": "/tmp/x"}
    assert flags["overridden"] == {name: "7"}
    assert "xla_gpu_all_gather_combine_threshold_bytes" in flags["added"]
    assert name not in flags["added"]


@pytest.mark.usefixtures("on_h100s")
def test_the_links_are_named() -> None:
    found = examine({})
    assert found["devices"]["links"] == [{"level": "gpu", "size": 8, "kind": "switch", "bytes_per_s": 450e9}]
    assert "links: gpu 8 x 450 GB/s switch" in doctor_text(found)


@pytest.mark.usefixtures("on_h100s")
def test_the_memory_limit_is_that_of_a_plan_here() -> None:
    found = examine({"XLA_CLIENT_MEM_FRACTION": "0.5"})
    assert found["devices"]["memory_limit"] == Cluster.load("dgx-h100").device.memory_bytes // 2
    assert "0.5 of the device's" in doctor_text(found)


@pytest.mark.parametrize(
    ("missing", "changed", "message"),
    [
        ("scipy", {}, "MISSING: scipy: not installed; pip install shardplan"),
        ("jax", {}, "MISSING: jax: not installed; pip install shardplan"),
        ("", {"jax": "0.99.1", "jaxlib": "0.99.1"}, "MISSING: JAX 0.99.1 is untested with this shardplan"),
        ("", {"jaxlib": "0.1.0"}, "and jaxlib 0.1.0 do not belong together; pip install -U jaxlib=="),
    ],
)
def test_what_is_necessary_fails_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, missing: str, changed: dict[str, str], message: str
) -> None:
    monkeypatch.setattr(doctor, "look", lambda _: dict(CPU, error="none here"))
    has = {name: None if name == missing else changed.get(name) or installed(name) or NEWEST for name in NEEDED}
    found = examine({}, has.get)
    assert not found["ok"]
    assert message in doctor_text(found)
    assert json.loads(json.dumps(found)) == found


def test_an_extra_that_is_missing_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "look", lambda _: dict(CPU, error="none here"))
    found = examine({"JAX_PLATFORMS": "cpu"}, lambda name: installed(name) if name in NEEDED else None)
    assert found["ok"]
    assert "lacks matplotlib: pip install 'shardplan[draw]'" in doctor_text(found)


def test_flags_that_cannot_be_read_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "look", lambda _: dict(CPU, error="none here"))
    found = examine({"XLA_FLAGS": "/nowhere/flags"})
    assert not found["ok"]
    assert "names a file of flags that cannot be read" in doctor_text(found)


def test_a_platform_without_devices_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "look", lambda _: {"error": "AssertionError"})
    found = examine({"JAX_PLATFORMS": "cuda"})
    assert not found["ok"]
    assert "MISSING: JAX has no devices with JAX_PLATFORMS=cuda: AssertionError; correct JAX_PLATFORMS" in doctor_text(found)
