"""The figures of a GPU, by the name that its driver gives it: a preset's device, with the figures in which a variant differs.

Figures are from data sheets. A name that is not listed gets the figures of the preset that its words suggest, and a remark.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ..errors import ClusterError
from .cluster import Cluster
from .machine import Device


@dataclass(frozen=True, slots=True)
class Gpu:
    """The preset of a driver's name (``kind``, a regular expression), and the figures that differ; zero keeps the preset's.

    ``flops`` scales the peaks of the preset's device. ``pcie``: no NVLink joins the GPUs of a node.
    """

    kind: str
    preset: str
    name: str = ""
    memory_bytes: int = 0
    memory_bytes_per_s: float = 0.0
    flops: float = 1.0
    pcie: bool = False
    compute_units: int = 0

    def device(self) -> Device:
        """The preset's device with the figures that differ."""
        base = Cluster.load(self.preset).device
        return replace(
            base,
            name=self.name or base.name,
            memory_bytes=self.memory_bytes or base.memory_bytes,
            memory_bytes_per_s=self.memory_bytes_per_s or base.memory_bytes_per_s,
            flops_per_s={dtype: peak * self.flops for dtype, peak in base.flops_per_s.items()},
            compute_units=self.compute_units or base.compute_units,
        )


_A100_40 = 42505273344  # bytes as the driver reports them
_V100_32 = 34089730048
_KNOWN = (
    Gpu(r"H200", "dgx-h200"),
    Gpu(r"H200 NVL", "dgx-h200", "H200-NVL-141GB", flops=0.844, pcie=True),
    Gpu(r"H100 80GB HBM3", "dgx-h100"),
    Gpu(r"H100 PCIe", "dgx-h100", "H100-PCIe-80GB", 0, 2.0e12, 0.765, pcie=True, compute_units=114),
    Gpu(r"H100 NVL", "dgx-h100", "H100-NVL-94GB", int(94e9), 3.9e12, 0.844, pcie=True),
    Gpu(r"GH200 (480|120)GB", "dgx-h100", "GH200-96GB", int(96e9), 4.0e12),  # the size in the name is the CPU's
    Gpu(r"GH200 144G HBM3e", "dgx-h200", "GH200-144GB", int(144e9), 4.9e12),
    Gpu(r"GB200", "gb200-nvl72"),
    Gpu(r"A100-SXM4-80GB", "dgx-a100"),
    Gpu(r"A100-SXM4-40GB", "dgx-a100", "A100-SXM4-40GB", _A100_40, 1.555e12),
    Gpu(r"A100 80GB PCIe", "dgx-a100", "A100-PCIe-80GB", 0, 1.935e12, pcie=True),
    Gpu(r"A100-PCIE-40GB", "dgx-a100", "A100-PCIe-40GB", _A100_40, 1.555e12, pcie=True),
    Gpu(r"V100-SXM2-16GB", "gcp-v100"),
    Gpu(r"V100-SXM[23]-32GB", "gcp-v100", "V100-SXM2-32GB", _V100_32),
    Gpu(r"V100-PCIE-16GB", "gcp-v100", "V100-PCIe-16GB", flops=0.896, pcie=True),
    Gpu(r"V100-PCIE-32GB", "gcp-v100", "V100-PCIe-32GB", _V100_32, flops=0.896, pcie=True),
    Gpu(r"P100-SXM2-16GB", "flexflow-p100"),
    Gpu(r"P100-PCIE-16GB", "flexflow-p100", "P100-PCIe-16GB", flops=0.887, pcie=True),
    Gpu(r"K80", "ec2-p2.8xlarge"),
)
_FAMILIES = ("H200", "H100", "GH200", "GB200", "A100", "V100", "P100", "K80")
_MAKERS = re.compile(r"(NVIDIA|Tesla)\s+", re.IGNORECASE)


def gpu(platform: str, kind: str) -> tuple[Gpu, tuple[str, ...]]:
    """The figures of a device kind, and remarks on the assumptions.

    >>> gpu("gpu", "NVIDIA A100-SXM4-40GB")[0].memory_bytes
    42505273344
    >>> gpu("gpu", "NVIDIA H100 64GB")[1]
    ("'NVIDIA H100 64GB' is not a known GPU: it gets the figures of H100-SXM5-80GB, with 64 GB as its name says",)
    """
    if platform == "cpu":
        return Gpu("cpu", "cpu"), ()
    remedy = "describe the machine in a TOML file and pass its path (`shardplan mesh show dgx-h100 --json` has one to start from)"
    if re.search(r"\bMIG\b", kind):
        raise ClusterError(f"{kind!r} is a part of a GPU, and no figures are known for parts: {remedy}")
    plain = _MAKERS.sub("", kind).strip()
    for known in _KNOWN:
        if re.fullmatch(known.kind, plain, re.IGNORECASE):
            return known, ()
    family = next((f for f in _FAMILIES if re.search(rf"\b{f}\b", plain, re.IGNORECASE)), None)
    if family is None:
        raise ClusterError(f"no figures for devices of kind {kind!r} ({platform}): {remedy}")
    near = next(known for known in _KNOWN if known.kind.startswith(family))
    size = None if family in ("GH200", "GB200") else re.search(r"(\d+)\s?GB?\b", plain, re.IGNORECASE)
    named = near.device().name
    if size is not None:
        near = replace(near, name=plain, memory_bytes=int(float(size[1]) * 1e9))
    near = replace(near, pcie=near.pcie or "PCIE" in plain.upper())
    size_remark = f", with {size[1]} GB as its name says" if size is not None else ""
    return near, (f"{kind!r} is not a known GPU: it gets the figures of {named}{size_remark}",)
