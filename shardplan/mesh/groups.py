"""A part of a cluster as a cluster of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..errors import ClusterError
from .cluster import Cluster
from .machine import Device, Level


def group_cluster(cluster: Cluster, devices: Sequence[int]) -> Cluster:
    """The cluster that some devices form, numbered from 0 in their order, which is ascending.

    A group that takes equally many children at each level keeps these levels. Any other group is one level, joined by the slowest
    link between its devices. A group with slower or smaller devices is priced as if all were like the least of them.

    Raises:
        ClusterError: for a device that does not exist, comes twice or is absent, or for a group with a link of its own.

    >>> cluster = Cluster.load("2x4")
    >>> [group_cluster(cluster, own).shape for own in ((4, 5, 6, 7), (0, 1, 4, 5), (0, 4), (0, 1, 4), (3,))]
    [(4,), (2, 2), (2,), (3,), (1,)]
    """
    _check(cluster, devices)
    levels = _even_levels(cluster, devices) or (_spanned(cluster, devices).resized(len(devices)),)
    name = f"{cluster.name}[{','.join(map(str, devices))}]"
    device = _least_device(cluster, devices)
    return replace(cluster, name=name, levels=levels, device=device, single_devices=(), single_links=())


def _check(cluster: Cluster, devices: Sequence[int]) -> None:
    text = f"the group {', '.join(map(str, devices))} of {cluster.name}"
    if not devices or list(devices) != sorted(set(devices)):
        raise ClusterError(f"{text} must name devices, each once, in ascending order")
    if not 0 <= devices[0] <= devices[-1] < cluster.size:
        raise ClusterError(f"{text} names a device that does not exist: there are {cluster.size}, 0 to {cluster.size - 1}")
    own = set(devices)
    absent = [d.index for d in cluster.single_devices if d.absent and d.index in own]
    if absent:
        raise ClusterError(f"{text} has the device {absent[0]}, which is absent")
    for link in cluster.single_links:
        if own.issuperset(link.between):
            pair = "-".join(map(str, link.between))
            raise ClusterError(f"{text} holds the single link {pair}: plan it without, or place its two devices in two groups")


def _even_levels(cluster: Cluster, devices: Sequence[int]) -> tuple[Level, ...]:
    """The levels of a group that takes equally many children at each level, without levels of one child; else empty."""
    below, sizes = cluster.size, list[int]()
    groups = [list(devices)]
    for level in cluster.levels:
        below //= level.size
        parts = [[[d for d in own if d // below == child] for child in sorted({d // below for d in own})] for own in groups]
        counts = {len(children) for children in parts}
        if len(counts) > 1:
            return ()
        sizes += counts
        groups = [child for children in parts for child in children]
        if len({len(g) for g in groups}) > 1:
            return ()
    kept = tuple(level.resized(n) for level, n in zip(cluster.levels, sizes, strict=True) if n > 1)
    assert math.prod(sizes) == len(devices), "equal parts multiply to the whole"
    return kept or (cluster.levels[-1].resized(1),)


def _spanned(cluster: Cluster, devices: Sequence[int]) -> Level:
    """The slowest level whose link joins two of the devices."""
    below = cluster.size
    for level in cluster.levels:
        below //= level.size
        if devices[0] // below != devices[-1] // below:
            return level
    return cluster.levels[-1]


def _least_device(cluster: Cluster, devices: Sequence[int]) -> Device:
    singles = {d.index: d for d in cluster.single_devices}
    own = [singles[d] for d in devices if d in singles]
    speed = min([d.speed for d in own] + ([1.0] if len(own) < len(devices) else []))
    memory = [d.memory_bytes for d in own if d.memory_bytes is not None]
    memory += [cluster.device.memory_bytes] if len(memory) < len(devices) else []
    if speed == 1.0 and min(memory) == cluster.device.memory_bytes:
        return cluster.device
    peaks = {dtype: peak * speed for dtype, peak in cluster.device.flops_per_s.items()}
    rate = cluster.device.memory_bytes_per_s * speed
    return replace(cluster.device, flops_per_s=peaks, memory_bytes_per_s=rate, memory_bytes=min(memory))
