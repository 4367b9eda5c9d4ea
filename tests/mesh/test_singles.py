"""Single devices and links of a cluster file: read back whole, checked by file and key, and refused where all must be equal."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import shardplan
from shardplan.errors import ClusterError, UnequalDevicesError
from shardplan.mesh import Cluster, SingleDevice, SingleLink
from shardplan.mesh.load import from_table, to_table
from shardplan.report.mesh_text import mesh_show, reduce_report

GOOD = Cluster.load("2x4").to_toml()
SINGLES = """
[[single_devices]]
place = [1, 3]
speed = 0.5
memory_bytes = 16e9

[[single_devices]]
index = 2
absent = true

[[single_links]]
between = [[1, 1], 0]
bandwidth_bytes_per_s = 1e9
latency_s = 1e-5
"""


def _parsed(text: str) -> Cluster:
    return Cluster.from_toml(GOOD + text, source="my.toml")


def test_places_and_numbers_name_the_same_devices() -> None:
    cluster = _parsed(SINGLES)
    assert cluster.single_devices == (SingleDevice(2, absent=True), SingleDevice(7, 0.5, 16_000_000_000))
    assert cluster.single_links == (SingleLink((0, 5), 1e9, 1e-5),)


def test_toml_and_tables_lose_no_single_device() -> None:
    cluster = _parsed(SINGLES)
    for again in (Cluster.from_toml(cluster.to_toml()), from_table(to_table(cluster), source="x")):
        assert (again.single_devices, again.single_links) == (cluster.single_devices, cluster.single_links)
    assert Cluster.from_toml(cluster.to_toml()) == cluster
    assert hash(Cluster.from_toml(cluster.to_toml())) == hash(cluster)


def test_single_devices_change_the_fingerprint() -> None:
    cluster = _parsed(SINGLES)
    variants = [cluster, replace(cluster, single_links=()), replace(cluster, single_devices=()), Cluster.from_toml(GOOD)]
    assert len({c.fingerprint() for c in variants}) == 4
    assert Cluster.from_toml(cluster.to_toml()).fingerprint() == cluster.fingerprint()
    assert Cluster.from_toml(GOOD).fingerprint() == Cluster.load("2x4").fingerprint()


DEVICE, LINK = "[[single_devices]]\n", "[[single_links]]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (DEVICE + "index = 8\nspeed = 0.5", "single_devices[0].index: there is no device 8: the levels have the sizes [2, 4]"),
        (DEVICE + "index = -1\nspeed = 0.5", "single_devices[0].index: there is no device -1"),
        (DEVICE + "place = [2, 0]\nspeed = 0.5", "single_devices[0].place: there is no device [2, 0]"),
        (DEVICE + "place = [1]\nspeed = 0.5", "single_devices[0].place: must have a number for each of the 2 levels, got [1]"),
        (DEVICE + "index = 1.5\nspeed = 0.5", "single_devices[0].index: must be whole numbers, got 1.5"),
        (DEVICE + "speed = 0.5", "single_devices[0].index: give one of index = 3 and place = [0, 3]"),
        (DEVICE + "index = 1", "single_devices[0]: needs one of speed, memory_bytes and absent"),
        (DEVICE + "index = 1\nspeed = -1.0", "single_devices[0].speed: must be a finite number above 0, got -1.0"),
        (DEVICE + "index = 1\nspeed = nan", "single_devices[0].speed: must be a finite number above 0, got nan"),
        (DEVICE + "index = 1\nspeed = inf", "single_devices[0].speed: must be a finite number above 0, got inf"),
        (DEVICE + "index = 1\nspeed = 0", "single_devices[0].speed: must be a finite number above 0, got 0"),
        (DEVICE + "index = 1\nmemory_bytes = -1", "single_devices[0].memory_bytes: must be a whole number above 0, got -1"),
        (DEVICE + "index = 1\nabsent = true\nspeed = 0.5", "single_devices[0].absent: an absent device has no speed"),
        (DEVICE + "index = 1\nabsent = 1", "single_devices[0].absent: must be true or false, got 1"),
        (DEVICE + "index = 1\nspeeed = 1", "single_devices[0].speeed: unknown key (nearest: speed"),
        ("single_devices = 3", "single_devices: must be a list of [[single_devices]] tables, got 3"),
        ((DEVICE + "index = 1\nspeed = 0.5\n") * 2, "single_devices[1].index: 1 is there twice"),
        (LINK + "between = [0, 9]\nlatency_s = 1e-6", "single_links[0].between: there is no device 9"),
        (LINK + "between = [0, 0]\nlatency_s = 1e-6", "single_links[0].between: must be two devices, got 0 twice"),
        (LINK + "between = [0, 1]\nlatency_s = nan", "single_links[0].latency_s: must be a finite number of at least 0, got nan"),
        (LINK + "between = [0, 1]\nbandwidth_bytes_per_s = -1", "single_links[0].bandwidth_bytes_per_s: must be a finite number"),
        (LINK + "between = [0, 1]", "single_links[0].bandwidth_bytes_per_s: needs one of bandwidth_bytes_per_s and latency_s"),
        (LINK + "latency_s = 1e-6", "single_links[0].between: must be two devices, such as [0, 3] or [[0, 0], [0, 3]], got None"),
        ("".join(f"{DEVICE}index = {d}\nabsent = true\n" for d in range(8)), "single_devices: all devices are absent"),
    ],
)
def test_a_bad_single_device_is_one_line_with_file_and_key(text: str, message: str) -> None:
    top = text.startswith("single_devices =")
    with pytest.raises(ClusterError) as caught:
        Cluster.from_toml(f"{text}\n{GOOD}" if top else f"{GOOD}\n{text}\n", source="my.toml")
    assert f"my.toml: {message}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_cluster_whose_devices_differ_is_shown() -> None:
    report = mesh_show(_parsed(SINGLES))
    assert "device 2: absent" in report.text
    assert "device 7: 0.5x the speed, 14.9 GiB" in report.text
    assert "link 0-5: 1.00 GB/s each way, 10.0 us" in report.text
    assert report.json["single_devices"][1]["memory_bytes"] == 16_000_000_000


def test_what_needs_equal_devices_says_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text(GOOD + SINGLES)
    wanted = re.escape(f"{file}: single_devices: gives 2, 7 other figures, but this needs equal devices: use `shardplan place`")
    with pytest.raises(UnequalDevicesError, match=wanted):
        shardplan.plan(lambda x: x, 1.0, cluster=file)
    with pytest.raises(UnequalDevicesError, match=wanted):
        reduce_report(file, "8", "0", "2 4", 1e6)
    with pytest.raises(ClusterError, match="cannot be resized"):
        Cluster.load(file).resized(4)
