"""A cluster as the planner sees it: levels, slowest first, and the device at the leaves.

Device ``i`` has the coordinates of ``i`` in row-major order over the sizes of the levels: the first level varies slowest.
Everything here is a value. `Cluster`, in `shardplan.mesh.cluster`, is a machine that also reads and writes TOML.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Self, get_args

from ..errors import ClusterError, UnequalDevicesError, nearest
from .checks import check_at_least, check_count, check_name, check_part, check_positive, check_seconds
from .singles import SingleDevice, SingleLink, checked_singles

LinkKind = Literal["switch", "ring", "bus"]
Platform = Literal["gpu", "tpu", "cpu"]
LARGEST = 2**20
"""The most devices of a cluster: some arrays have an entry for each device."""
DEFAULT_CONTENTION = 1.3
"""The contention of devices for which no measurement exists (Galvatron's figure)."""
MOST_CONTENTION = 1000.0
"""The largest contention that is accepted: a larger one is a mistake."""
DEFAULT_ATTENTION_EFFICIENCY = 0.5
"""The part of the peak that fused attention reaches on devices without a published figure (FlashAttention-2, abstract)."""
DTYPES: tuple[str, ...] = (
    "float32", "bfloat16", "float16", "float64", "complex64", "complex128", "bool",
    "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "float8_e8m0fnu", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn",
    "int1", "int2", "int4", "int8", "int16", "int32", "int64",
    "uint1", "uint2", "uint4", "uint8", "uint16", "uint32", "uint64",
)  # fmt: skip
"""The dtypes that a device may have a peak for: those of arrays in JAX."""
KINDS: tuple[str, ...] = get_args(LinkKind)
PLATFORMS: tuple[str, ...] = get_args(Platform)


@dataclass(frozen=True, slots=True)
class Interconnect:
    """A second interconnect of a ring's children, for traffic that the ring's own links do not carry.

    Each ``domain`` consecutive children share one medium of ``bandwidth_bytes_per_s`` each direction (the PCIe switch under a
    CPU); where ``domain`` does not divide the children, the last medium has fewer. It carries traffic between children that are
    not neighbours on the ring, and traffic that leaves the level. The bandwidth is the one that is reached.
    """

    name: str
    domain: int
    bandwidth_bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        where = f"interconnect {self.name!r}"
        check_positive(self.bandwidth_bytes_per_s, f"{where}: bandwidth_bytes_per_s")
        check_seconds(self.latency_s, f"{where}: latency_s")
        check_count(self.domain, f"{where}: domain")


@dataclass(frozen=True, slots=True)
class Level:
    """A tier of the cluster: ``size`` children under each parent, and the link that joins ONE of these children to it.

    ``bandwidth_bytes_per_s`` is one direction's: on a ``switch``, of the link from one child into the switch (all NICs of a node
    together, if children are nodes); on a ``ring``, of the link between two neighbours; on a ``bus``, of the medium that all
    children share. ``latency_s`` is that of a message between two children. ``rails`` is the number of equal parallel links that
    ``bandwidth_bytes_per_s`` sums up: one device drives one of them at a time. The efficiencies are the parts of the bandwidth
    that ring and tree algorithms reach. ``connection_bytes_per_s`` is the most that the messages of one group of devices between
    the same two children reach in one direction, where that is less than the link (None: it is not).
    """

    name: str
    size: int
    bandwidth_bytes_per_s: float
    latency_s: float
    kind: LinkKind = "switch"
    rails: int = 1
    ring_efficiency: float = 1.0
    tree_efficiency: float = 1.0
    also: Interconnect | None = None
    connection_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        where = f"level {self.name!r}"
        check_name(self.name, f"{where}: name")
        check_count(self.size, f"{where}: size")
        check_positive(self.bandwidth_bytes_per_s, f"{where}: bandwidth_bytes_per_s")
        check_seconds(self.latency_s, f"{where}: latency_s")
        check_count(self.rails, f"{where}: rails")
        check_part(self.ring_efficiency, f"{where}: ring_efficiency")
        check_part(self.tree_efficiency, f"{where}: tree_efficiency")
        if self.connection_bytes_per_s is not None:
            check_positive(self.connection_bytes_per_s, f"{where}: connection_bytes_per_s")
        if self.kind not in KINDS:
            raise ClusterError(f"must be one of {', '.join(KINDS)}, got {self.kind!r}", where=f"{where}: kind")
        if self.rails > 1 and self.kind != "switch":
            raise ClusterError(f"parallel links belong to a switch, this level is a {self.kind}", where=f"{where}: rails")
        if self.also is not None and self.kind != "ring":
            raise ClusterError(f"a second interconnect belongs to a ring, this level is a {self.kind}", where=f"{where}: also")
        if self.also is not None and self.also.domain > self.size:
            message = f"{self.also.domain} children share a medium, but the level has only {self.size}"
            raise ClusterError(message, where=f"{where}: also.domain")

    def resized(self, size: int) -> Level:
        """The same level with another number of children; if fewer than ``also.domain``, all share one medium."""
        if self.also is None or self.also.domain <= size or size < 1:
            return replace(self, size=size)
        return replace(self, size=size, also=replace(self.also, domain=size))


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator: peaks, memory, and the parts of the peaks that kernels reach.

    ``flops_per_s`` maps a dtype (one of `DTYPES`) to its dense peak; ``flops_efficiency`` and ``memory_efficiency`` are the parts
    of the peaks that large kernels reach, ``launch_s`` the overhead of one kernel. ``collective_launch_s`` is that of one
    collective instruction before its first message, over any links; the default is ``launch_s``, since a collective is at least
    one kernel. ``platform`` is JAX's word for its kind: on GPUs, JAX's allocator takes a part of the memory. ``contention`` is
    the factor, at least 1, by which compute and communication slow each other while both run (Calculon, Galvatron). The
    default, 1.3, is Galvatron's figure for GPUs. ``attention_efficiency`` is the part of the peak that fused attention reaches,
    forward and backward together, where a causal mask's upper half counts nothing. The default, 0.5, is the least that
    FlashAttention-2 reaches on A100s (Dao 2023, abstract: 50 to 73%; section 4.1 counts so). ``compute_units`` is the number of
    processors that each compute a tile of a matrix product at a time (the multiprocessors of a GPU): a product of few tiles
    leaves some of them idle (`shardplan.cost.tiles`). None: products are not priced by tiles. ``host_bytes_per_s`` is what
    copies between the device and pinned memory of its host reach in one direction. None: nothing may be kept in host memory.
    """

    name: str
    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    memory_bytes: int
    launch_s: float = 3e-6
    flops_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    collective_launch_s: float | None = None
    platform: Platform = "gpu"
    contention: float = DEFAULT_CONTENTION
    attention_efficiency: float = DEFAULT_ATTENTION_EFFICIENCY
    compute_units: int | None = None
    host_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        where = f"device {self.name!r}"
        if not self.name:
            raise ClusterError("is empty: messages name the device by it", where="device: name")
        if not self.flops_per_s:
            raise ClusterError("needs at least one dtype, say float32", where=f"{where}: flops_per_s")
        for dtype, peak in self.flops_per_s.items():
            if dtype not in DTYPES:
                hint = nearest(dtype, DTYPES) or f" (known: {', '.join(DTYPES)})"
                raise ClusterError(f"unknown dtype{hint}", where=f"{where}: flops_per_s.{dtype}")
            check_positive(peak, f"{where}: flops_per_s.{dtype}")
        check_positive(self.memory_bytes_per_s, f"{where}: memory_bytes_per_s")
        check_count(self.memory_bytes, f"{where}: memory_bytes")
        check_seconds(self.launch_s, f"{where}: launch_s")
        if self.collective_launch_s is not None:
            check_seconds(self.collective_launch_s, f"{where}: collective_launch_s")
        if self.platform not in PLATFORMS:
            raise ClusterError(f"must be one of {', '.join(PLATFORMS)}, got {self.platform!r}", where=f"{where}: platform")
        check_part(self.flops_efficiency, f"{where}: flops_efficiency")
        check_part(self.memory_efficiency, f"{where}: memory_efficiency")
        check_at_least(self.contention, 1.0, f"{where}: contention")
        if self.contention > MOST_CONTENTION:
            raise ClusterError(
                f"must be at most {MOST_CONTENTION:g}, got {self.contention!r}: 1 is none, 1.3 a usual factor",
                where=f"{where}: contention",
            )
        check_part(self.attention_efficiency, f"{where}: attention_efficiency")
        if self.compute_units is not None:
            check_count(self.compute_units, f"{where}: compute_units")
        if self.host_bytes_per_s is not None:
            check_positive(self.host_bytes_per_s, f"{where}: host_bytes_per_s")
        object.__setattr__(self, "flops_per_s", dict(sorted(self.flops_per_s.items())))

    def __hash__(self) -> int:
        return hash((self.name, tuple(self.flops_per_s.items()), self.memory_bytes_per_s, self.memory_bytes, self.launch_s))

    @property
    def instruction_s(self) -> float:
        """The overhead of one collective instruction."""
        return self.launch_s if self.collective_launch_s is None else self.collective_launch_s


@dataclass(frozen=True, slots=True)
class Machine:
    """Levels, slowest first, and the device at the leaves. ``source`` (a file, a preset) is for messages and is not compared.

    ``single_devices`` are those that differ from ``device``, and ``single_links`` join two devices otherwise than the levels do.
    """

    name: str
    levels: tuple[Level, ...]
    device: Device
    source: str = field(default="", compare=False)
    single_devices: tuple[SingleDevice, ...] = ()
    single_links: tuple[SingleLink, ...] = ()

    def __post_init__(self) -> None:
        if not self.name:
            raise ClusterError("is empty: plans and messages name the cluster by it", where="cluster: name")
        if not self.levels:
            raise ClusterError("a cluster needs at least one level", where=f"cluster {self.name!r}: levels")
        names = [level.name for level in self.levels]
        where = f"cluster {self.name!r}: levels"
        for name in names:
            if names.count(name) > 1:
                raise ClusterError(f"two levels are called {name!r}", where=where)
        if self.size > LARGEST:
            raise ClusterError(f"{self.size} devices are more than the {LARGEST} that can be planned for", where=self.name)
        devices, links = checked_singles(self.single_devices, self.single_links, self.name, self.size)
        object.__setattr__(self, "single_devices", devices)
        object.__setattr__(self, "single_links", links)

    def host_link_bytes_per_s(self) -> float:
        """Bytes per second of copies between a device and its host's memory.

        Raises:
            ClusterError: if the device has no such figure.
        """
        if self.device.host_bytes_per_s is None:
            raise ClusterError(
                "missing: offload needs the bytes per second that copies between a device and its host's pinned memory reach",
                where=f"{self.source or self.name}: device.host_bytes_per_s",
            )
        return self.device.host_bytes_per_s

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the levels, slowest first."""
        return tuple(level.size for level in self.levels)

    @property
    def level_names(self) -> tuple[str, ...]:
        """Names of the levels, slowest first."""
        return tuple(level.name for level in self.levels)

    def level_index(self, name: str) -> int:
        """The position of a level by its name; raises `ClusterError` with the known names."""
        if name not in self.level_names:
            raise ClusterError(f"no level {name!r} in {self.name!r}: it has {', '.join(self.level_names)}")
        return self.level_names.index(name)

    def check_equal(self) -> None:
        """Refuses a cluster in which single devices or links differ.

        Raises:
            UnequalDevicesError: naming them.
        """
        kinds = {
            "single_devices": [str(d.index) for d in self.single_devices],
            "single_links": ["-".join(map(str, link.between)) for link in self.single_links],
        }
        for kind, those in kinds.items():
            if those:
                raise UnequalDevicesError(self.source or self.name, kind, tuple(those))

    def resized(self, *sizes: int) -> Self:
        """The same cluster with other level sizes, slowest first; fewer sizes than levels change the slowest ones.

        Raises:
            ClusterError: for more sizes than levels, or if single devices differ: their numbers would mean others.
        """
        if len(sizes) > len(self.levels):
            raise ClusterError(f"{len(sizes)} sizes for the {len(self.levels)} levels of {self.name!r}")
        if self.single_devices or self.single_links:
            raise ClusterError(f"{self.name!r} cannot be resized: its single_devices and single_links number its own devices")
        sized = tuple(level.resized(n) for level, n in zip(self.levels, sizes, strict=False))
        return replace(self, levels=sized + self.levels[len(sizes) :])
