"""A cluster from what a running machine says of itself: device kind, processes and slices, and ``nvidia-smi topo -m``."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from ..errors import ClusterError
from .cluster import Cluster, Level

# Which preset's figures a device gets, by words of its kind; the first that fits.
_PRESETS = (("H200", "dgx-h200"), ("H100", "dgx-h100"), ("GB200", "gb200-nvl72"), ("A100", "dgx-a100"), ("V100", "gcp-v100"))
_MORE = (("P100", "flexflow-p100"), ("K80", "ec2-p2.8xlarge"))
# Bytes per second of one NVLink each way, by preset: the data sheets' totals over their numbers of links.
_NVLINK = {"dgx-h200": 25e9, "dgx-h100": 25e9, "gb200-nvl72": 50e9, "dgx-a100": 25e9, "gcp-v100": 25e9, "flexflow-p100": 20e9}
_PCIE_BYTES_PER_S = 25e9


def machine(platform: str, kind: str, seats: Sequence[tuple[int, int]], *, topology: str | None = None) -> Cluster:
    """The cluster of devices that sit at ``seats`` (slice, process), all of one kind.

    Raises `ClusterError` where processes or slices hold different numbers of devices.
    """
    preset = _preset(platform, kind)
    base = Cluster.load(preset)
    slices = sorted({s for s, _ in seats})
    processes = sorted(set(seats))
    per_process = {p: seats.count(p) for p in processes}
    per_slice = {s: sum(1 for p in processes if p[0] == s) for s in slices}
    for what, counts in (("processes", per_process), ("slices", per_slice)):
        if len(set(counts.values())) > 1:
            raise ClusterError(
                f"the {what} of this machine are of different sizes, {sorted(set(counts.values()))}: describe it in a TOML file"
            )
    node, device = base.levels[0], base.levels[-1]
    inside = device.resized(per_process[processes[0]])
    if topology is not None:
        inside = _linked(inside, preset, topology)
    nics = replace(node, size=per_slice[slices[0]])
    if node.rails > 1:  # one NIC a device, as the preset has it
        each = node.bandwidth_bytes_per_s / node.rails
        nics = replace(nics, rails=inside.size, bandwidth_bytes_per_s=each * inside.size)
    levels = [replace(nics, name="slice", size=len(slices), latency_s=2 * node.latency_s)] if len(slices) > 1 else []
    levels += [nics] if nics.size > 1 or not levels else []
    return Cluster(f"detected-{preset}", (*levels, inside), base.device, source="this machine")


@cache
def nvidia_smi_topology() -> str | None:
    """What ``nvidia-smi topo -m`` prints, asked once; None where there is no such program or it fails."""
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def links(topology: str) -> list[list[str]]:
    """The matrix of GPU-to-GPU links (``NV18``, ``PIX``, ``SYS``, ``X``) that ``nvidia-smi topo -m`` prints.

    >>> links("\\tGPU0\\tGPU1\\tNIC0\\nGPU0\\t X \\tNV4\\tPIX\\nGPU1\\tNV4\\t X \\tSYS\\nNIC0\\tPIX\\tSYS\\t X \\n")
    [['X', 'NV4'], ['NV4', 'X']]
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", topology)
    lines = [line.split() for line in plain.splitlines() if line.strip()]
    if not lines:
        return []
    gpus = sum(1 for word in lines[0] if re.fullmatch(r"GPU\d+", word))
    return [line[1 : gpus + 1] for line in lines[1:] if re.fullmatch(r"GPU\d+", line[0]) and len(line) > gpus]


def _linked(level: Level, preset: str, topology: str) -> Level:
    """A node's inner level as its links say: all on NVLink is a switch of that many links, anything less shares PCIe."""
    between = [word for i, row in enumerate(links(topology)) for j, word in enumerate(row) if i != j]
    if not between:
        return level
    counts = [int(word[2:]) if re.fullmatch(r"NV\d+", word) else 0 for word in between]
    if min(counts) > 0 and level.kind == "switch":
        return replace(level, bandwidth_bytes_per_s=min(counts) * _NVLINK.get(preset, 25e9))
    if min(counts) > 0 or (max(counts) > 0 and level.kind == "ring"):
        return level
    return Level(level.name, level.size, _PCIE_BYTES_PER_S, 5e-6, "bus")


def _preset(platform: str, kind: str) -> str:
    if platform == "cpu":
        return "cpu"
    for word, preset in (*_PRESETS, *_MORE):
        if word in kind.upper():
            return preset
    raise ClusterError(
        f"no figures for devices of kind {kind!r} ({platform}): describe the machine in a TOML file and pass its path"
    )
