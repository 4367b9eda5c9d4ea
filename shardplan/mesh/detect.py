"""Reads a cluster from the running machine: device kind, processes and slices, and ``nvidia-smi topo -m``."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from ..errors import ClusterError
from .cluster import Cluster
from .gpus import Gpu, gpu
from .machine import Level

# Bytes per second of one NVLink each way, by preset: the data sheet's total divided by its number of links.
_NVLINK = {"dgx-h200": 25e9, "dgx-h100": 25e9, "gb200-nvl72": 50e9, "dgx-a100": 25e9, "gcp-v100": 25e9, "flexflow-p100": 20e9}
_ACROSS_HOSTS = ("gb200-nvl72",)  # presets whose NVLink joins the GPUs of many hosts
_PCIE_BYTES_PER_S = 25e9
_CORRECT = "if not so, save the cluster (`shardplan mesh detect -o cluster.toml`), correct it and pass its path"


@dataclass(frozen=True, slots=True)
class Detected:
    """A cluster read from its devices, and the assumptions made for it, a sentence each."""

    cluster: Cluster
    assumed: tuple[str, ...] = ()


def machine(platform: str, kind: str, seats: Sequence[tuple[int, int]], *, topology: str | None = None) -> Detected:
    """The cluster of devices, all of one kind; ``seats`` has the (slice, process) of each.

    JAX gives the GPUs of one host, or of one NVLink domain, one slice. A process is not a host: a host may run one for each GPU.

    Raises `ClusterError` if there are no devices, if their kind has no figures, and if slices, or processes that stand for hosts,
    hold different numbers of devices.
    """
    if not seats:
        raise ClusterError("no devices to detect a cluster from")
    figures, remarks = gpu(platform, kind)
    base = Cluster.load(figures.preset)
    node, device = base.levels[0], base.levels[-1]
    tiers, assumed = _tiers(platform, figures, seats, device.size)
    slices, nodes, inner = tiers
    inside = device.resized(inner)
    if topology is not None:
        inside = _linked(inside, figures.preset, topology)
    elif figures.pcie and inner > 1:
        inside = _pcie(inside)
    nics = replace(node, size=nodes)
    if node.rails > 1:  # one NIC a device, as in the preset
        each = node.bandwidth_bytes_per_s / node.rails
        nics = replace(nics, rails=inside.size, bandwidth_bytes_per_s=each * inside.size)
    levels = [replace(nics, name="slice", size=slices, latency_s=2 * node.latency_s)] if slices > 1 else []
    levels += [nics] if nics.size > 1 or not levels else []
    cluster = Cluster(f"detected-{figures.preset}", (*levels, inside), figures.device(), source="this machine")
    return Detected(cluster, (*remarks, *assumed))


def _tiers(
    platform: str, figures: Gpu, seats: Sequence[tuple[int, int]], most: int
) -> tuple[tuple[int, int, int], tuple[str, ...]]:
    """The numbers of slices, of nodes in a slice and of devices in a node; and the assumptions.

    ``most`` is the number of devices that the preset joins in a node.
    """
    per_slice, per_process = Counter(s for s, _ in seats), Counter(seats)
    total, slices = len(seats), len(per_slice)
    if platform == "cpu":
        slice_size, process_size = _even(per_slice.values(), "slices"), _even(per_process.values(), "processes")
        return (slices, slice_size // process_size, process_size), ()
    assumed = () if _contiguous(seats) else (f"the processes of different hosts are numbered in turn; {_CORRECT}",)
    if figures.preset in _ACROSS_HOSTS and len(per_process) > 1:
        unit = _even(per_slice.values(), "slices") if slices > 1 else _even(per_process.values(), "processes")
        inner = _largest(total, unit, most)
        domains = (
            f"{total // unit} groups of {unit} GPUs are taken for NVLink domains of {inner}, {total // inner} in all; {_CORRECT}"
        )
        return (1, total // inner, inner), (*assumed, domains)
    slice_size = _even(per_slice.values(), "slices")
    processes = len(per_process) // slices
    if processes == 1 or (slices > 1 and slice_size <= most):
        return (1, slices, slice_size), assumed
    unit = 1 if slice_size <= most else _even(per_process.values(), "processes")
    inner = _largest(slice_size, unit, most)
    hosts = (
        f"the {total} GPUs of {len(per_process)} processes are taken for hosts of {inner}, {total // inner} in all; {_CORRECT}"
    )
    return ((slices, slice_size // inner, inner) if slice_size > inner else (1, slices, inner)), (*assumed, hosts)


def _largest(total: int, unit: int, most: int) -> int:
    """The largest multiple of ``unit`` that divides ``total`` and is at most ``most``; ``unit`` if there is none."""
    return max((n for n in range(unit, most + 1, unit) if total % n == 0), default=unit)


def _even(counts: Iterable[int], what: str) -> int:
    sizes = sorted(set(counts))
    if len(sizes) > 1:
        raise ClusterError(f"the {what} of this machine are of different sizes, {sizes}: describe it in a TOML file")
    return sizes[0]


def _contiguous(seats: Sequence[tuple[int, int]]) -> bool:
    """Whether the processes of each slice follow one another."""
    order = [s for s, _ in sorted(set(seats), key=lambda seat: seat[1])]
    return len(list(itertools.groupby(order))) == len(set(order))


@cache
def nvidia_smi_topology() -> str | None:
    """The output of ``nvidia-smi topo -m``, cached; None if the program is missing or fails."""
    try:
        completed = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return completed.stdout


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
    """A node's inner level, by its links.

    A switch needs NVLink between all pairs; the pair with the fewest links sets its bandwidth. A ring needs NVLink somewhere. All
    other GPUs share PCIe.
    """
    between = [word for i, row in enumerate(links(topology)) for j, word in enumerate(row) if i != j]
    if not between:
        return level
    counts = [int(word[2:]) if re.fullmatch(r"NV\d+", word) else 0 for word in between]
    if min(counts) > 0 and level.kind == "switch":
        return replace(level, bandwidth_bytes_per_s=min(counts) * _NVLINK.get(preset, 25e9))
    if min(counts) > 0 or (max(counts) > 0 and level.kind == "ring"):
        return level
    return _pcie(level)


def _pcie(level: Level) -> Level:
    return Level(level.name, level.size, _PCIE_BYTES_PER_S, 5e-6, "bus")
