"""Clusters: every way in, lossless TOML, and complaints that name the file and the key."""

from __future__ import annotations

import copy
import importlib
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.collectives import parse
from shardplan.errors import ClusterError
from shardplan.mesh import Cluster, Device, Interconnect, Level, preset_names
from shardplan.mesh.checks import MOST_SECONDS
from shardplan.mesh.machine import DTYPES, LinkKind

GOOD = Cluster.load("dgx-h100:4").to_toml()
positive = st.floats(min_value=1e-12, max_value=1e18, allow_nan=False)
seconds = st.floats(min_value=1e-12, max_value=MOST_SECONDS, allow_nan=False)
parts = st.floats(min_value=1e-12, max_value=2.0, allow_nan=False)
names = st.text(min_size=1, max_size=12)
words = st.from_regex(r"[\w.\-]{1,12}", fullmatch=True).filter(lambda name: name != "root")


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    levels: list[Level] = []
    for name in draw(st.lists(words, min_size=1, max_size=4, unique=True)):
        kind: LinkKind = draw(st.sampled_from(["switch", "ring", "bus"]))
        size = draw(st.integers(1, 32))
        also = (
            draw(st.none() | st.builds(Interconnect, names, st.integers(1, size), positive, seconds)) if kind == "ring" else None
        )
        rails = draw(st.integers(1, 8)) if kind == "switch" else 1
        speeds = [draw(s) for s in (positive, seconds, parts, parts)]
        level = Level(name, size, speeds[0], speeds[1], kind, rails, speeds[2], speeds[3], also)
        levels.append(level)
    peaks = draw(st.dictionaries(st.sampled_from(DTYPES), positive, min_size=1, max_size=3))
    device = Device(draw(names), peaks, draw(positive), draw(st.integers(1, 2**40)), draw(seconds), draw(parts), draw(parts))
    device = replace(device, contention=draw(st.floats(1.0, 1e3)), attention_efficiency=draw(parts))
    device = replace(device, compute_units=draw(st.none() | st.integers(1, 1000)))
    return Cluster(draw(names), tuple(levels), device)


@given(clusters())
def test_toml_loses_nothing(cluster: Cluster):
    again = Cluster.from_toml(cluster.to_toml())
    assert again == cluster
    assert hash(again) == hash(cluster)
    assert again.fingerprint() == cluster.fingerprint()


@pytest.mark.parametrize("name", preset_names())
def test_presets_load_and_count_nodes(name: str):
    cluster = Cluster.load(f"{name}:3")
    assert cluster.shape == (3, *Cluster.load(name).shape[1:])
    assert Cluster.from_toml(cluster.to_toml()) == cluster
    assert pickle.loads(pickle.dumps(cluster)) == copy.deepcopy(cluster) == cluster


def test_the_presets_of_the_interface_are_there():
    wanted = [
        "gcp-a100",
        "gcp-v100",
        "ec2-p2.8xlarge",
        "flexflow-p100",
        "flexflow-k80",
        "dgx-a100",
        "dgx-h100",
        "dgx-h200",
        "gb200-nvl72",
        "cpu",
    ]
    assert set(wanted) <= set(preset_names())


def test_a_shape_is_h100s_with_nvswitch_below_infiniband():
    assert Cluster.load("8").level_names == ("gpu",)
    shape, preset = Cluster.load("4x8"), Cluster.load("dgx-h100:4")
    assert shape.levels == preset.levels
    assert shape.device == preset.device
    half = Cluster.load("2x4")
    assert half.size == 8
    assert half.levels[0].bandwidth_bytes_per_s == preset.levels[0].bandwidth_bytes_per_s / 2  # one NIC a GPU
    assert Cluster.load("2x2x2x2x2").size == 32


def test_a_path_a_string_and_a_cluster_all_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    assert Cluster.load(path) == Cluster.load(str(path)) == Cluster.load("dgx-h100:4")
    assert Cluster.load(Cluster.load("2x4")) == Cluster.load("2x4")
    (tmp_path / "plain").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    assert Cluster.load("plain") == Cluster.load("mine.toml") == Cluster.load("dgx-h100:4")


def test_whole_numbers_and_floats_are_the_same_figures():
    cluster = Cluster.load("2x4")
    whole = replace(cluster, levels=tuple(replace(level, bandwidth_bytes_per_s=100 * 10**9) for level in cluster.levels))
    again = Cluster.from_toml(whole.to_toml())
    assert again == whole
    assert again.fingerprint() == whole.fingerprint() != cluster.fingerprint()


def test_equal_clusters_and_only_those_have_equal_fingerprints():
    cluster = Cluster.load("2x4")
    seen = {cluster.fingerprint(), Cluster.load("4x2").fingerprint(), Cluster.load("dgx-a100:2").fingerprint()}
    for level in (replace(cluster.levels[1], bandwidth_bytes_per_s=1e9), replace(cluster.levels[1], rails=2)):
        seen.add(replace(cluster, levels=(cluster.levels[0], level)).fingerprint())
    seen.add(replace(cluster, device=replace(cluster.device, flops_per_s={"float32": 1.0})).fingerprint())
    seen.add(replace(cluster, device=replace(cluster.device, contention=1.5)).fingerprint())
    seen.add(replace(cluster, device=replace(cluster.device, attention_efficiency=0.4)).fingerprint())
    seen.add(replace(cluster, device=replace(cluster.device, compute_units=131)).fingerprint())
    seen.add(replace(cluster, device=replace(cluster.device, compute_units=None)).fingerprint())
    assert len(seen) == 10
    assert replace(cluster, source="elsewhere").fingerprint() == cluster.fingerprint()


@pytest.mark.parametrize(
    ("old", "new", "key", "words"),
    [
        ("bandwidth_bytes_per_s = 450000000000.0", "bandwidth_bytes_per_s = 0", "levels[1].bandwidth_bytes_per_s", "above 0"),
        ("bandwidth_bytes_per_s = 450000000000.0", "bandwidth_bytes_per_s = -1.0", "levels[1].bandwidth_bytes_per_s", "-1.0"),
        ("bandwidth_bytes_per_s = 450000000000.0", "bandwidth_bytes_per_s = nan", "levels[1].bandwidth_bytes_per_s", "nan"),
        ("bandwidth_bytes_per_s = 450000000000.0", "bandwidth_bytes_per_s = inf", "levels[1].bandwidth_bytes_per_s", "inf"),
        ("bandwidth_bytes_per_s = 450000000000.0", 'bandwidth_bytes_per_s = "9"', "levels[1].bandwidth_bytes_per_s", "number"),
        ("bandwidth_bytes_per_s = 450000000000.0", "bandwidth = 4", "levels[1].bandwidth", "nearest: bandwidth_bytes_per_s"),
        ("size = 8", "size = 0", "levels[1].size", "above 0"),
        ("size = 8", "size = 2.5", "levels[1].size", "whole number"),
        ("size = 8", "size = true", "levels[1].size", "whole number"),
        ("size = 8\n", "", "levels[1].size", "missing"),
        ("latency_s = 1e-06", "latency_s = -1e-06", "levels[1].latency_s", "at least 0"),
        ('kind = "switch"\nrails = 1', 'kind = "torus"\nrails = 1', "levels[1].kind", "switch, ring, bus"),
        ('name = "gpu"', 'name = "node"', "levels", "two levels"),
        ('name = "dgx-h100"', "name = 3", "name", "string"),
        ('name = "dgx-h100"', 'name = ""', "name", "is empty"),
        ('name = "gpu"', 'name = "root"', "levels[1].name", "not 'root', a word of reduction programs"),
        ('name = "gpu"', 'name = "a, b / root"', "levels[1].name", "got 'a, b / root': rename it"),
        ('name = "gpu"', 'name = ""', "levels[1].name", "letters, digits"),
        ('name = "gpu"', 'name = "a(b"', "levels[1].name", "letters, digits"),
        ("ring_efficiency = 0.8", "ring_efficiency = 80", "levels[1].ring_efficiency", "0.9 for 90%, got 80.0"),
        ("flops_efficiency = 0.65", "flops_efficiency = 65", "device.flops_efficiency", "0.9 for 90%, got 65.0"),
        ("contention = 1.3", "contention = 0.9", "device.contention", "at least 1, got 0.9"),
        ("contention = 1.3", "contention = inf", "device.contention", "at least 1, got inf"),
        ("attention_efficiency = 0.34", "attention_efficiency = 0", "device.attention_efficiency", "above 0, got 0"),
        ("attention_efficiency = 0.34", "attention_efficiency = -0.1", "device.attention_efficiency", "above 0, got -0.1"),
        ("attention_efficiency = 0.34", "attention_efficiency = inf", "device.attention_efficiency", "got inf"),
        ("attention_efficiency = 0.34", "attention_efficiency = nan", "device.attention_efficiency", "got nan"),
        ("attention_efficiency = 0.34", "attention_efficiency = 34", "device.attention_efficiency", "0.9 for 90%, got 34.0"),
        ("attention_efficiency = 0.34", 'attention_efficiency = "slow"', "device.attention_efficiency", "must be a number"),
        ("compute_units = 132", "compute_units = 0", "device.compute_units", "above 0, got 0"),
        ("compute_units = 132", "compute_units = 131.5", "device.compute_units", "a whole number, got 131.5"),
        ("compute_units = 132", "compute_units = true", "device.compute_units", "a whole number, got True"),
        ("contention = 1.3", 'contention = "1"', "device.contention", "must be a number, got '1'"),
        ("[device]", "[devices]", "devices", "nearest: device"),
        ("memory_bytes_per_s = 3350000000000.0", "memory_bytes_per_s = 0.0", "device.memory_bytes_per_s", "above 0"),
        ('"float64" = 66900000000000.0', '"float64" = "fast"', "device.flops_per_s.float64", "number"),
        ('"float32" = ', '"flot32" = ', "device.flops_per_s.flot32", "unknown dtype (nearest: float32"),
        ('"float32" = ', '"x" = ', "device.flops_per_s.x", "unknown dtype (known: float32, bfloat16"),
        ("rails = 1\n", "rails = 1\nalso = 3\n", "levels[1].also", "table"),
    ],
)
def test_a_bad_file_is_refused_by_file_and_key(old: str, new: str, key: str, words: str):
    assert old in GOOD
    with pytest.raises(ClusterError) as caught:
        Cluster.from_toml(GOOD.replace(old, new, 1), source="my.toml")
    assert f"my.toml: {key}" in str(caught.value) or f"my.toml: cluster 'dgx-h100': {key}" in str(caught.value)
    assert words in str(caught.value)


def test_what_is_no_toml_or_no_file_names_the_file(tmp_path: Path):
    with pytest.raises(ClusterError, match=r"x\.toml: not TOML: .*line 1"):
        Cluster.from_toml("= =", source="x.toml")
    with pytest.raises(ClusterError, match=r"gone\.toml: cannot be read: No such file"):
        Cluster.load(tmp_path / "gone.toml")
    with pytest.raises(ClusterError, match="cannot be read"):
        Cluster.load(tmp_path)
    (tmp_path / "raw.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ClusterError, match=r"raw\.toml: is not UTF-8"):
        Cluster.load(tmp_path / "raw.toml")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("dgx-h10", "nearest: dgx-h100"),
        ("zzz", "presets: cpu, dgx-a100"),
        ("dgx-h100:0", "got '0' in 'dgx-h100:0'"),
        ("dgx-h100:two", "got 'two'"),
        ("2x0", "at least one child"),
        ("2x", "no cluster '2x'"),
        ("", "no cluster ''"),
        (5, "no cluster 5; a cluster is a preset"),
        (["2x4"], "no cluster ['2x4']; a cluster is a preset"),
    ],
)
def test_an_unknown_cluster_is_refused_with_what_there_is(spec: Any, words: str):
    with pytest.raises(ClusterError, match=re.escape(words)):
        Cluster.load(spec)


def test_a_level_by_name():
    cluster = Cluster.load("2x4")
    assert cluster.level_index("gpu") == 1
    with pytest.raises(ClusterError, match="no level 'rack' in '2x4': it has node, gpu"):
        cluster.level_index("rack")
    with pytest.raises(ClusterError, match="level 'x': also: a second interconnect belongs to a ring"):
        Level("x", 2, 1.0, 0.0, also=Interconnect("pcie", 1, 1.0))


def test_a_medium_has_no_more_children_than_its_level():
    ring = Cluster.load("gcp-v100").levels[-1]
    assert ring.also is not None
    assert [ring.resized(n).also.domain for n in (8, 4, 2, 1)] == [4, 4, 2, 1]  # pyright: ignore[reportOptionalMemberAccess]
    assert Cluster.load("gcp-v100").resized(2, 2).shape == (2, 2)
    with pytest.raises(ClusterError, match=r"also\.domain: 12 children share a medium, but the level has only 6"):
        replace(ring, size=6, also=replace(ring.also, domain=12))


def test_every_name_of_a_level_can_be_read_back_from_a_program():
    cluster = Cluster.load("2x4")
    for name in ("gpu-0", "node.a", "α_1"):
        named = replace(cluster, levels=(replace(cluster.levels[0], name=name), cluster.levels[1]))
        text = f"({name}, InsideGroup, AllReduce) ({name}, Parallel(root), AllReduce)"
        assert parse(text, named.level_names).text(named.level_names) == text


def test_a_peak_may_be_given_for_every_dtype_of_jax():
    dtypes = importlib.import_module("jax._src.dtypes")  # the one list of them that JAX keeps

    assert {str(dtype) for dtype in dtypes._jax_types} <= set(DTYPES)


def test_a_contention_that_no_device_has_is_refused() -> None:
    h100 = Cluster.load("8")
    with pytest.raises(ClusterError, match="at most 1000, got 1001"):
        replace(h100.device, contention=1001.0)


@pytest.mark.parametrize("key", ["launch_s", "collective_launch_s"])
def test_a_launch_that_takes_minutes_is_a_mistake_of_units(key: str) -> None:
    with pytest.raises(ClusterError, match=f"{key}: must be at most 1000 seconds, got 1e\\+308: are these microseconds"):
        replace(Cluster.load("8").device, **{key: 1e308})


def test_a_device_has_a_name() -> None:
    with pytest.raises(ClusterError, match="device: name: is empty"):
        replace(Cluster.load("8").device, name="")


def test_a_latency_of_minutes_is_a_mistake_of_units() -> None:
    level = Cluster.load("8").levels[-1]
    interconnect = Interconnect("pcie", 4, 1e9, 1e-6)
    for owner in (level, interconnect):
        with pytest.raises(ClusterError, match="latency_s: must be at most 1000 seconds, got 1001"):
            replace(owner, latency_s=1001.0)
