"""Single devices that differ from the others of a cluster, and links between two devices that the levels do not describe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ClusterError
from .checks import check_count, check_positive, check_seconds


@dataclass(frozen=True, slots=True)
class SingleDevice:
    """The device ``index``: its speed (0.5: each op takes twice as long), its memory, or that it is ``absent``.

    ``memory_bytes`` None stands for the memory of the cluster's device.
    """

    index: int
    speed: float = 1.0
    memory_bytes: int | None = None
    absent: bool = False

    def __post_init__(self) -> None:
        where = f"device {self.index!r}"
        check_positive(self.speed, f"{where}: speed")
        if self.absent and (self.speed != 1 or self.memory_bytes is not None):
            raise ClusterError("an absent device has no speed and no memory_bytes: leave them out", where=f"{where}: absent")
        if self.memory_bytes is not None:
            check_count(self.memory_bytes, f"{where}: memory_bytes")


@dataclass(frozen=True, slots=True)
class SingleLink:
    """A connection of its own between two devices, each direction apart. None: the figure that the levels give."""

    between: tuple[int, int]
    bandwidth_bytes_per_s: float | None = None
    latency_s: float | None = None

    def __post_init__(self) -> None:
        where = "link {}-{}".format(*self.between)
        if self.bandwidth_bytes_per_s is not None:
            check_positive(self.bandwidth_bytes_per_s, f"{where}: bandwidth_bytes_per_s")
        if self.latency_s is not None:
            check_seconds(self.latency_s, f"{where}: latency_s")
        if self.bandwidth_bytes_per_s is None and self.latency_s is None:
            raise ClusterError("needs one of bandwidth_bytes_per_s and latency_s", where=f"{where}: bandwidth_bytes_per_s")
        if self.between[0] == self.between[1]:
            raise ClusterError(f"must be two devices, got {self.between[0]} twice", where=f"{where}: between")
        object.__setattr__(self, "between", (min(self.between), max(self.between)))


def checked_singles(
    devices: Sequence[SingleDevice], links: Sequence[SingleLink], cluster: str, size: int
) -> tuple[tuple[SingleDevice, ...], tuple[SingleLink, ...]]:
    """Single devices and links of a cluster of so many devices, sorted.

    Raises:
        ClusterError: if one does not exist or is there twice, or if all devices are absent.
    """
    for key, own in (
        ("single_devices[{}].index", [(d.index,) for d in devices]),
        ("single_links[{}].between", [link.between for link in links]),
    ):
        for i, numbers in enumerate(own):
            for n in numbers:
                if not 0 <= n < size:
                    raise ClusterError(f"there is no device {n}: {cluster} has {size}, 0 to {size - 1}", where=key.format(i))
            if numbers in own[:i]:
                raise ClusterError(f"{'-'.join(map(str, numbers))} is there twice", where=key.format(i))
    if sum(d.absent for d in devices) == size:
        raise ClusterError("all devices are absent: leave one", where="single_devices")
    return tuple(sorted(devices, key=lambda d: d.index)), tuple(sorted(links, key=lambda link: link.between))
