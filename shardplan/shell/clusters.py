"""Resolves ``cluster=`` arguments: a preset, a file, a shape, or a mesh of present devices."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import numpy as np
from jax.sharding import Mesh

from shardplan.errors import ClusterError
from shardplan.mesh import Cluster
from shardplan.mesh.devices import auto, detect, device_numbers
from shardplan.mesh.factoring import read_order

_log = logging.getLogger("shardplan")

ClusterLike = Cluster | Mesh | str | PathLike[str]


def resolve_cluster(cluster: ClusterLike, *, unequal: bool = False) -> tuple[Cluster, Mesh | None]:
    """The cluster that the user means, and the user's Mesh with Auto axes (None if no Mesh was given).

    A Mesh gives one level per mesh axis. GPUs that a preset knows get that preset's figures. Simulated devices get those of
    H100s, as a shape does. Other devices, and a Mesh that does not follow the machine's levels, also get them, with a warning.
    ``unequal`` allows single devices and links to differ.

    Raises:
        UnequalDevicesError: for a cluster file whose single devices differ, where they may not.
    """
    if not isinstance(cluster, Mesh):
        if not isinstance(cluster, Cluster | str | PathLike):
            raise ClusterError(
                f"cluster={cluster!r} is not a cluster: "
                "give a preset ('dgx-h100:4'), a TOML file, a shape ('2x4') or a jax.sharding.Mesh"
            )
        loaded = Cluster.load(cluster)
        if not unequal:
            loaded.check_equal()
        return loaded, None
    names = tuple(str(n) for n in cluster.axis_names)
    first: Any = cluster.devices.ravel()[0]
    if first.platform != "cpu":
        try:
            return like_machine(detect(cluster.devices.ravel().tolist()), device_numbers(cluster), names), auto(cluster)
        except ClusterError as error:
            _log.warning("the mesh of %s is priced as H100s: %s", first.device_kind, error)
    return like_shape(cluster.devices.shape, names), auto(cluster)


def like_shape(shape: Sequence[int], names: Sequence[str]) -> Cluster:
    """A cluster of H100s with one level per axis: the last on NVSwitch, those above it on InfiniBand."""
    like = Cluster.load("x".join(str(int(n)) for n in shape))
    levels = tuple(replace(level, name=name) for level, name in zip(like.levels, names, strict=True))
    return replace(like, name="mesh, priced as H100s", levels=levels)


def like_machine(machine: Cluster, order: np.ndarray[Any, Any], names: Sequence[str]) -> Cluster:
    """The cluster of a mesh on a machine's devices, with one level per mesh axis.

    ``order`` has the device numbers, with one array axis for each of ``names``. A level has the link of the slowest machine level
    that its axis crosses.

    Raises:
        ClusterError: if an axis does not follow the machine's levels, or a faster axis comes before a slower one.
    """
    factors, groups = read_order(machine, order)
    crossed = [min((factors[f].level for f in group), default=len(machine.levels) - 1) for group in groups]
    if crossed != sorted(crossed):
        raise ClusterError(f"the axes {', '.join(names)} do not go from slow links to fast ones")
    levels = tuple(
        replace(machine.levels[at].resized(n), name=name) for at, n, name in zip(crossed, order.shape, names, strict=True)
    )
    return Cluster(f"mesh, priced as {machine.name}", levels, machine.device, source="a mesh")
