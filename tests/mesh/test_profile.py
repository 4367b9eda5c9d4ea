"""Profiles: measured clusters as files, on their own shape and on that of others; complaints name file, key, remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardplan.errors import ClusterError
from shardplan.mesh import Cluster
from shardplan.mesh.profile import Profile, read_profile


def measured(preset: str = "dgx-h100", *levels: str) -> Profile:
    base = Cluster.load(f"{preset}:2")
    device = replace(base.device, flops_per_s={"float32": 3.25e14}, launch_s=4e-6, contention=1.7)
    faster = tuple(replace(level, bandwidth_bytes_per_s=1.23e11, latency_s=3e-6) for level in base.levels)
    cluster = Cluster(f"calibrated-{preset}", faster, device)
    return Profile(cluster, "NVIDIA H100 80GB HBM3", levels or base.level_names, {"kept": ["the memory"]})


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("profile.json")
    path.write_text(measured().to_json())
    return path


def test_a_profile_file_loses_nothing(file: Path) -> None:
    again = read_profile(file)
    wanted = measured()
    assert json.loads(again.to_json()) == json.loads(wanted.to_json())
    assert Cluster.load(file) == Cluster.load(str(file)) == wanted.cluster
    assert Cluster.load(file).fingerprint() != Cluster.load("dgx-h100:2").fingerprint()
    assert Cluster.from_toml(Cluster.load(file).to_toml()) == Cluster.load(file)


def test_a_preset_on_a_profile_has_its_device_and_its_measured_links(file: Path) -> None:
    file.write_text(measured("dgx-h100", "gpu").to_json())
    placed, preset, own = Cluster.load("dgx-h100:4@profile.json"), Cluster.load("dgx-h100:4"), Cluster.load(file)
    assert placed.shape == (4, 8)
    assert placed.device == own.device
    assert placed.levels == (preset.levels[0], own.levels[1])


def test_a_shape_on_a_profile_is_of_its_last_levels(file: Path) -> None:
    own = Cluster.load(file)
    assert Cluster.load("4x2@profile.json").levels == (own.levels[0].resized(4), own.levels[1].resized(2))
    assert Cluster.load("16@profile.json").levels == (own.levels[1].resized(16),)
    assert Cluster.load("16@profile.json").device == own.device


def test_a_cluster_that_a_profile_does_not_fit_is_refused(file: Path) -> None:
    for spec, words in {
        "dgx-a100:2@profile.json": "device.name: the profile is of H100-SXM5-80GB devices (gpu), the cluster 'dgx-a100:2'",
        "cpu@profile.json": "of cpu (cpu): measure such a device, or give a cluster of the profile's devices",
        "2x2x2@profile.json": "cluster.levels: the shape 2x2x2 has 3 levels, the profile 2 (node, gpu)",
        "0x2@profile.json": "at least one child, got '0x2'",
        "@profile.json": "write CLUSTER@PROFILE",
        "2x4@": "write CLUSTER@PROFILE",
        "2x4@gone.json": "gone.json: cannot be read: No such file",
    }.items():
        with pytest.raises(ClusterError, match=re.escape(words)):
            Cluster.load(spec)
    file.write_text(measured("dgx-h100", "gpu").to_json())
    with pytest.raises(ClusterError, match="measured_levels: the profile measured no link of the level 'node', which has 2"):
        Cluster.load("2x4@profile.json")
    assert Cluster.load("1x4@profile.json").size == 4


def _set(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        *way, key, value = path
        at: Any = content
        for step in way:
            at = at[step]
        at[key] = value

    return change


@pytest.mark.parametrize(
    ("change", "key", "words"),
    [
        (_set("shardplan_profile", 2), "shardplan_profile", "version 2, this version of shardplan reads version 1; measure"),
        (_set("shardplan_profile", "1"), "shardplan_profile", "version '1'"),
        (_set("shardplan_profile", True), "shardplan_profile", "version True"),
        (_set("device_kind", ""), "device_kind", "the driver's name"),
        (_set("measured_levels", ["gpus"]), "measured_levels", "names no level: 'gpus'; the cluster has node, gpu"),
        (_set("measured_levels", "gpu0"), "measured_levels", "names no level: 'gpu0'"),
        (_set("clusters", {}), "clusters", "unknown key (nearest: cluster"),
        (_set("cluster", []), "cluster", "must be a table"),
        (_set("cluster", "device", "flops_per_s", "float32", -1.0), "cluster: device.flops_per_s.float32", "above 0, got -1.0"),
        (_set("cluster", "device", "memory_bytes_per_s", 0), "cluster: device.memory_bytes_per_s", "above 0, got 0"),
        (_set("cluster", "device", "flops_per_s", "float32", 10**400), "cluster: device.flops_per_s.float32", "a finite number"),
        (_set("cluster", "device", "memory_bytes_per_s", 10**400), "cluster: device.memory_bytes_per_s", "a finite number"),
        (_set("cluster", "device", "contention", float("nan")), "cluster: device.contention", "at least 1, got nan"),
        (
            _set("cluster", "levels", 1, "bandwidth_bytes_per_s", float("inf")),
            "cluster: levels[1].bandwidth_bytes_per_s",
            "got inf",
        ),
        (_set("cluster", "levels", 0, "latency_s", -1e-6), "cluster: levels[0].latency_s", "at least 0, got -1e-06"),
    ],
)
def test_a_bad_profile_is_refused_by_file_and_key(file: Path, change: Callable[[Any], None], key: str, words: str) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    with pytest.raises(ClusterError) as caught:
        Cluster.load(file)
    assert f"profile.json: {key}: " in str(caught.value)
    assert words in str(caught.value)


def test_every_truncation_of_a_profile_and_every_foreign_file_is_refused(file: Path) -> None:
    whole = file.read_text()
    for end in range(0, len(whole.rstrip()), 97):
        file.write_text(whole[:end])
        with pytest.raises(ClusterError, match=r"profile\.json: not JSON \(truncated\?\).*shardplan calibrate"):
            Cluster.load(file)
    for foreign in ("[]", "3", '{"format": 10}'):
        file.write_text(foreign)
        with pytest.raises(ClusterError, match=r"profile\.json: not a profile: it has no key 'shardplan_profile'"):
            Cluster.load(file)
    file.write_bytes(b"\xff")
    with pytest.raises(ClusterError, match=r"profile\.json: is not UTF-8"):
        Cluster.load(file)
