"""Machines are read from their devices, and from what nvidia-smi says of the links between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardplan.errors import ClusterError
from shardplan.mesh import Cluster
from shardplan.mesh.detect import links, machine, nvidia_smi_topology
from shardplan.mesh.devices import detect

H100 = "\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\n" + "".join(
    f"GPU{i}\t" + "\t".join(" X " if i == j else "NV18" for j in range(4)) + "\tPIX\t0-51\n" for i in range(4)
)
PCIE = H100.replace("NV18", "SYS")


def test_simulated_devices_are_one_host(devices: list[Any]):
    cluster = detect(devices)
    assert cluster.name == "detected-cpu"
    assert cluster.shape == (1, 8)
    assert Cluster.from_toml(cluster.to_toml()) == cluster


def test_processes_are_nodes_and_slices_are_above_them():
    seats = [(s, 2 * s + p) for s in range(2) for p in range(2) for _ in range(4)]
    cluster = machine("gpu", "NVIDIA H100 80GB HBM3", seats)
    assert (cluster.level_names, cluster.shape) == (("slice", "node", "gpu"), (2, 2, 4))
    preset = Cluster.load("dgx-h100")
    assert cluster.device == preset.device
    assert cluster.levels[1].bandwidth_bytes_per_s == preset.levels[0].bandwidth_bytes_per_s / 2  # four of eight NICs


def test_nvidia_smi_tells_nvlink_from_pcie():
    assert links(H100)[0] == ["X", "NV18", "NV18", "NV18"]
    assert links("") == links("no gpus here") == []
    seats = [(0, 0)] * 4
    fast = machine("gpu", "NVIDIA H100 80GB HBM3", seats, topology=H100).levels[-1]
    assert (fast.kind, fast.bandwidth_bytes_per_s) == ("switch", 450e9)
    slow = machine("gpu", "NVIDIA H100 PCIe", seats, topology=PCIE).levels[-1]
    assert slow.kind == "bus"
    assert slow.bandwidth_bytes_per_s < 32e9
    colours = machine("gpu", "NVIDIA H100", seats, topology=H100.replace("GPU0\t X", "\x1b[4mGPU0\x1b[0m\t X"))
    assert colours.levels[-1] == fast


def test_nvidia_smi_is_asked_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia_smi_topology.__wrapped__() is None
    program.write_text(f"#!/bin/sh\n[ \"$*\" = 'topo -m' ] && printf '%s' '{H100}'\n")
    program.chmod(0o755)
    assert nvidia_smi_topology.__wrapped__() == H100
    program.write_text("#!/bin/sh\nexit 9\n")
    assert nvidia_smi_topology.__wrapped__() is None


def test_what_no_preset_covers_is_refused():
    with pytest.raises(ClusterError, match=r"no figures for devices of kind 'TPU v4' .*TOML"):
        machine("tpu", "TPU v4", [(0, 0)])
    with pytest.raises(ClusterError, match=r"the processes of this machine are of different sizes, \[1, 2\]"):
        machine("gpu", "H100", [(0, 0), (0, 1), (0, 1)])
