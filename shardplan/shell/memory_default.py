"""The memory limit of a plan: the user's, or what JAX's allocator gives a program on such a device.

On a GPU, JAX's allocator owns a fraction of the device: 0.75 of it, unless ``XLA_CLIENT_MEM_FRACTION`` (by its old name
``XLA_PYTHON_CLIENT_MEM_FRACTION``) says otherwise. With ``XLA_PYTHON_CLIENT_PREALLOCATE=false`` it grows up to the same size,
so that variable changes nothing here. Only ``XLA_PYTHON_CLIENT_ALLOCATOR=platform`` asks the driver for every array, and may
fill the device (jaxlib 0.10, `generate_pjrt_gpu_plugin_options`; XLA, `CreateBFCAllocator`). On other devices the limit is all
of the memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardplan.errors import ShardplanError, size_text
from shardplan.mesh import Device
from shardplan.sizes import parse_bytes

AUTO = "auto"
"""The limit that stands for the default, as None does."""
FRACTION = 0.75
"""The part of a GPU that JAX's allocator takes by default."""
_ALLOCATORS = ("default", "bfc", "cuda_async", "vmm", "platform")
_NEW, _OLD, _ALLOCATOR = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR"


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The bytes that one device may hold, and where that figure comes from (empty: from the user)."""

    nbytes: int
    origin: str = ""


def memory_limit(given: object, device: Device, environment: Mapping[str, str]) -> MemoryLimit:
    """The limit that the user gives (bytes, or text); for None or "auto", the default of this device in this environment.

    Raises:
        ShardplanError: for an invalid size, or a variable that JAX would refuse.
    """
    if given is not None and given != AUTO:
        return MemoryLimit(parse_bytes(given))
    whole = size_text(device.memory_bytes)
    if device.platform != "gpu":
        return MemoryLimit(device.memory_bytes, f"all {whole} of the device")
    name, fraction = _fraction(environment)
    if _allocator(environment) == "platform":
        return MemoryLimit(device.memory_bytes, f"all {whole} of the device, as {_ALLOCATOR}=platform")
    said = f"as {name} says" if name else "what JAX's allocator takes by default"
    return MemoryLimit(int(device.memory_bytes * fraction), f"{fraction:g} of the device's {whole}, {said}")


def _fraction(environment: Mapping[str, str]) -> tuple[str, float]:
    """The variable that sets the fraction (empty: none does), and the fraction."""
    known = [name for name in (_NEW, _OLD) if environment.get(name)]
    if not known:
        return "", FRACTION
    if len(known) == 2:
        raise ShardplanError(f"{_NEW} and {_OLD} are both set, which JAX refuses: unset {_OLD}, the old name")
    (name,) = known
    text = environment[name]
    try:
        fraction = float(text)
    except ValueError:
        fraction = math.nan
    if not 0 < fraction <= 1:
        raise ShardplanError(
            f"{name}={text!r} is not a fraction of a GPU's memory: set a number above 0, at most 1, or a memory limit"
        )
    return name, fraction


def _allocator(environment: Mapping[str, str]) -> str:
    text = environment.get(_ALLOCATOR, "default")
    if text.lower() not in _ALLOCATORS:
        raise ShardplanError(
            f"{_ALLOCATOR}={text!r} is no allocator of JAX: set one of {', '.join(_ALLOCATORS)}, or a memory limit"
        )
    return text.lower()
