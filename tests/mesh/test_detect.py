"""Machines are read from their devices, and from what nvidia-smi says of the links between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardplan.errors import ClusterError
from shardplan.mesh import Cluster
from shardplan.mesh.detect import links, machine, nvidia_smi_topology
from shardplan.mesh.devices import detect

SWITCHED = "\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\n" + "".join(
    f"GPU{i}\t" + "\t".join(" X " if i == j else "NV18" for j in range(4)) + "\tPIX\t0-51\n" for i in range(4)
)
PCIE = SWITCHED.replace("NV18", "SYS")


def test_simulated_devices_are_one_host(devices: list[Any]):
    cluster = detect(devices)
    assert cluster.name == "detected-cpu"
    assert cluster.shape == (1, 8)
    assert Cluster.from_toml(cluster.to_toml()) == cluster


def test_slices_are_hosts_of_all_their_processes():
    seats = [(s, 2 * s + p) for s in range(2) for p in range(2) for _ in range(2)]
    found = machine("gpu", "NVIDIA H100 80GB HBM3", seats)
    cluster, preset = found.cluster, Cluster.load("dgx-h100")
    assert (cluster.level_names, cluster.shape, found.assumed) == (("node", "gpu"), (2, 4), ())
    assert cluster.device == preset.device
    assert cluster.levels[0].bandwidth_bytes_per_s == preset.levels[0].bandwidth_bytes_per_s / 2  # four of eight NICs


@pytest.mark.parametrize(
    ("kind", "seats", "shape", "assumed"),
    [
        ("H100 80GB HBM3", [(0, p) for p in range(8)], (1, 8), "the 8 GPUs of 8 processes are taken for hosts of 8, 1 in all"),
        ("H100 80GB HBM3", [(0, p) for p in range(16)], (2, 8), "the 16 GPUs of 16 processes are taken for hosts of 8, 2 in all"),
        (
            "H100 80GB HBM3",
            [(0, p) for p in range(2) for _ in range(8)],
            (2, 8),
            "the 16 GPUs of 2 processes are taken for hosts of 8",
        ),
        ("H100 80GB HBM3", [(s, s) for s in range(2) for _ in range(8)], (2, 8), ""),
        ("H100 80GB HBM3", [(s, 8 * s + p) for s in range(2) for p in range(8)], (2, 8), ""),
        ("H100 80GB HBM3", [(p % 2, p) for p in range(8) for _ in range(2)], (2, 8), "are numbered in turn; if not so"),
        ("H100 80GB HBM3", [(s, 16 * s + p) for s in range(2) for p in range(16)], (2, 2, 8), "taken for hosts of 8, 4 in all"),
        (
            "GB200",
            [(0, p) for p in range(18) for _ in range(4)],
            (1, 72),
            "18 groups of 4 GPUs are taken for NVLink domains of 72, 1 in all",
        ),
        (
            "GB200",
            [(p, p) for p in range(36) for _ in range(4)],
            (2, 72),
            "36 groups of 4 GPUs are taken for NVLink domains of 72, 2 in all",
        ),
        ("GB200", [(0, 0)] * 4, (1, 4), ""),
    ],
)
def test_processes_are_no_hosts_and_what_is_assumed_is_said(
    kind: str, seats: list[tuple[int, int]], shape: tuple[int, ...], assumed: str
):
    found = machine("gpu", f"NVIDIA {kind}", seats)
    assert found.cluster.shape == shape
    assert bool(found.assumed) == bool(assumed)
    assert assumed in "; ".join(found.assumed)
    assert all("correct it and pass its path" in one for one in found.assumed)


@pytest.mark.parametrize(
    ("kind", "gib", "terabytes_per_s", "link"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.3, 2.039, "switch"),
        ("NVIDIA A100-SXM4-40GB", 39.6, 1.555, "switch"),
        ("A100-SXM4-40GB", 39.6, 1.555, "switch"),
        ("NVIDIA A100 80GB PCIe", 79.3, 1.935, "bus"),
        ("NVIDIA A100-PCIE-40GB", 39.6, 1.555, "bus"),
        ("Tesla V100-SXM2-16GB", 15.8, 0.9, "ring"),
        ("Tesla V100-SXM2-32GB", 31.7, 0.9, "ring"),
        ("Tesla V100-PCIE-32GB", 31.7, 0.9, "bus"),
        ("NVIDIA H100 80GB HBM3", 79.1, 3.35, "switch"),
        ("NVIDIA H100 PCIe", 79.1, 2.0, "bus"),
        ("NVIDIA H100 NVL", 87.5, 3.9, "bus"),
        ("NVIDIA GH200 480GB", 89.4, 4.0, "switch"),
        ("NVIDIA GH200 144G HBM3e", 134.1, 4.9, "switch"),
        ("NVIDIA H200", 131.3, 4.8, "switch"),
        ("NVIDIA GB200", 173.2, 8.0, "switch"),
        ("Tesla P100-PCIE-16GB", 15.9, 0.732, "bus"),
        ("Tesla K80", 11.2, 0.24, "switch"),
    ],
)
def test_a_device_has_the_figures_of_its_name(kind: str, gib: float, terabytes_per_s: float, link: str):
    found = machine("gpu", kind, [(0, 0)] * 4)
    device = found.cluster.device
    assert (round(device.memory_bytes / 2**30, 1), device.memory_bytes_per_s / 1e12) == (gib, terabytes_per_s)
    assert found.cluster.levels[-1].kind == link
    assert found.assumed == ()


def test_a_name_that_is_not_known_has_its_size_and_says_whose_figures_it_has():
    found = machine("gpu", "NVIDIA A100-SXM-64GB", [(0, 0)] * 4)
    assert found.cluster.device.memory_bytes == 64e9
    assert "'NVIDIA A100-SXM-64GB' is not a known GPU: it gets the figures of A100-SXM4-80GB" in found.assumed[0]
    assert machine("gpu", "NVIDIA H100 64GB PCIe", [(0, 0)] * 4).cluster.levels[-1].kind == "bus"
    with pytest.raises(ClusterError, match=r"'NVIDIA H100 80GB HBM3 MIG 1g.10gb' is a part of a GPU.*TOML"):
        machine("gpu", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", [(0, 0)])


class H100:
    """What `detect` asks of a device."""

    platform, device_kind, slice_index = "gpu", "NVIDIA H100 80GB HBM3", 0

    def __init__(self, process: int) -> None:
        self.process_index = process


def test_what_detect_assumes_is_logged(caplog: pytest.LogCaptureFixture):
    assert detect([H100(p) for p in range(8)]).shape == (1, 8)
    assert "the 8 GPUs of 8 processes are taken for hosts of 8, 1 in all" in caplog.text


def test_nvidia_smi_tells_nvlink_from_pcie():
    assert links(SWITCHED)[0] == ["X", "NV18", "NV18", "NV18"]
    assert links("") == links("no gpus here") == []
    seats = [(0, 0)] * 4
    fast = machine("gpu", "NVIDIA H100 80GB HBM3", seats, topology=SWITCHED).cluster.levels[-1]
    assert (fast.kind, fast.bandwidth_bytes_per_s) == ("switch", 450e9)
    slow = machine("gpu", "NVIDIA H100 PCIe", seats, topology=PCIE).cluster.levels[-1]
    assert slow.kind == "bus"
    assert slow.bandwidth_bytes_per_s < 32e9
    colours = machine("gpu", "NVIDIA H100", seats, topology=SWITCHED.replace("GPU0\t X", "\x1b[4mGPU0\x1b[0m\t X"))
    assert colours.cluster.levels[-1] == fast


def test_nvidia_smi_is_asked_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia_smi_topology.__wrapped__() is None
    program.write_text(f"#!/bin/sh\n[ \"$*\" = 'topo -m' ] && printf '%s' '{SWITCHED}'\n")
    program.chmod(0o755)
    assert nvidia_smi_topology.__wrapped__() == SWITCHED
    program.write_text("#!/bin/sh\nexit 9\n")
    assert nvidia_smi_topology.__wrapped__() is None


def test_what_no_preset_covers_is_refused():
    with pytest.raises(ClusterError, match=r"no figures for devices of kind 'TPU v4' .*TOML"):
        machine("tpu", "TPU v4", [(0, 0)])
    with pytest.raises(ClusterError, match="no figures for devices of kind 'NVIDIA B200'"):
        machine("gpu", "NVIDIA B200", [(0, 0)])
    with pytest.raises(ClusterError, match=r"the slices of this machine are of different sizes, \[1, 2\]"):
        machine("gpu", "NVIDIA H200", [(0, 0), (1, 1), (1, 1)])
    with pytest.raises(ClusterError, match="no devices to detect a cluster from"):
        machine("gpu", "NVIDIA H200", [])
