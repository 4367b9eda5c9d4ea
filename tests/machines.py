"""Clusters on which cutting pays even for a handful of numbers, beside stock ones.

A name is a shape, or a shape and a kind: ``2x4``, ``2x4:eager``, ``2x2x2:crawl``, ``3x2:slow``.
"""

from __future__ import annotations

from dataclasses import replace

from shardplan.mesh import Cluster

SHAPES = ("8", "2x4", "4x2", "2x2x2", "3x2")
SPEEDS = {"eager": (1e7, 1e8), "crawl": (1e6, 1e6), "slow": (2e9, 1e9)}
"""For each kind the flops and the bytes of memory per second of one device."""
LINKS = {"eager": (1e9, 1e10, 1e11), "crawl": (1e9, 1e10, 1e11), "slow": (5e7, 1e8, 4e8)}
"""For each kind the bandwidths of the links, slowest first; fewer levels take the last ones."""


def launchless(cluster: Cluster) -> Cluster:
    """The same machine with collectives that cost their messages alone, so that programs of many steps pay."""
    return replace(cluster, device=replace(cluster.device, collective_launch_s=0.0))


def machine(name: str) -> Cluster:
    """The cluster of that name."""
    shape, _, kind = name.partition(":")
    base = Cluster.load(shape)
    if not kind:
        return base
    flops, memory = SPEEDS[kind]
    speeds = LINKS[kind][-len(base.levels) :]
    levels = tuple(
        replace(level, bandwidth_bytes_per_s=speed, latency_s=1e-12, rails=1, ring_efficiency=1.0, tree_efficiency=1.0)
        for level, speed in zip(base.levels, speeds, strict=True)
    )
    device = replace(
        base.device,
        flops_per_s={"float32": flops},
        memory_bytes_per_s=memory,
        launch_s=0.0,
        collective_launch_s=0.0,
        compute_units=None,  # a handful of numbers is less than a tile
    )
    return replace(base, name=name, levels=levels, device=device)
