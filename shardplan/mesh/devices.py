"""Builds a `jax.sharding.Mesh` from factors: the one place where the machine meets JAX's devices."""

# pyright: basic
from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from ..errors import ClusterError, DeviceError
from ..ir import Factor
from .cluster import Cluster
from .detect import Detected, machine, nvidia_smi_topology
from .factoring import check_cover, device_order

_log = logging.getLogger("shardplan")


def build_mesh(
    cluster: Cluster,
    factors: Sequence[Factor],
    axes: Mapping[str, Sequence[int]],
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh over the first ``cluster.size`` devices. Each axis is Auto, and a group of factors (by index, major first).

    Device ``i`` is the cluster's device ``i``: its coordinates are those of ``i`` in row-major order of the levels. ``axes`` must
    name every factor once. Raises `DeviceError` if there are too few devices.
    """
    check_cover(cluster, factors)
    named = [f for group in axes.values() for f in group]
    if sorted(named) != list(range(len(factors))):
        raise ClusterError(f"the axes name the factors {named}: each of 0 to {len(factors) - 1} belongs to exactly one axis")
    order = device_order(cluster, factors, tuple(axes.values()))
    return Mesh(cluster_devices(cluster, devices)[order], tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def cluster_devices(cluster: Cluster, devices: Sequence[Any] | None = None) -> np.ndarray[Any, Any]:
    """The devices of a cluster, by number: the first of these, by default of `jax.devices()`.

    Raises:
        DeviceError: if they are too few, no devices, or named twice.
    """
    everything = cast("Any", jax).devices  # jax.devices returns an untyped list
    found: list[Any] = np.asarray(everything() if devices is None else devices, dtype=object).ravel().tolist()
    strange = next((d for d in found if not isinstance(d, jax.Device)), None)
    if strange is not None:
        raise DeviceError(f"devices={devices!r}: {strange!r} is no device: give a list such as jax.devices()")
    if len(set(found)) < len(found):
        twice = next(d for i, d in enumerate(found) if d in found[:i])
        raise DeviceError(f"devices names {twice} twice: give each device once")
    if len(found) < cluster.size:
        if devices is not None:
            fewer = f", or plan for a cluster of {len(found)}" if found else ""
            raise DeviceError(
                f"the cluster {cluster.name!r} has {cluster.size} devices, and devices= gives {len(found)}: give {cluster.size} "
                f"or more{fewer}"
            )
        kind = f" ({found[0].platform})" if len(found) else ""
        raise DeviceError(
            f"the cluster {cluster.name!r} has {cluster.size} devices, {len(found)} are present{kind}; to simulate them on "
            f'one machine, call jax.config.update("jax_num_cpu_devices", {cluster.size}) before JAX starts, or set '
            f"JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES={cluster.size} in the environment; `shardplan verify` simulates them itself, "
            f"and so does pytest --shardplan-devices {cluster.size}"
        )
    result = np.empty(cluster.size, dtype=object)
    result[:] = found[: cluster.size]
    return result


def device_numbers(mesh: Mesh) -> np.ndarray[Any, Any]:
    """The number in its cluster of each device of a mesh. Devices count by process and id, as `jax.devices` lists them."""
    flat: list[Any] = mesh.devices.ravel().tolist()
    order = sorted(range(len(flat)), key=lambda i: (flat[i].process_index, flat[i].id))
    numbers = np.empty(len(flat), np.int64)
    numbers[order] = np.arange(len(flat))
    return numbers.reshape(mesh.devices.shape)


def detect(devices: Sequence[Any] | None = None, *, topology: str | None = None) -> Cluster:
    """The running machine as a cluster, with the figures of the nearest preset; logs the assumptions of `detected`."""
    found = detected(devices, topology=topology)
    for assumed in found.assumed:
        _log.warning("%s: %s", found.cluster.name, assumed)
    return found.cluster


def detected(devices: Sequence[Any] | None = None, *, topology: str | None = None) -> Detected:
    """The running machine as a cluster of slices, hosts and devices, and the assumptions made where JAX does not say.

    ``topology`` is the output of ``nvidia-smi topo -m``, which tells NVLink from PCIe. If it is not given,
    the program is run where the devices are this machine's GPUs. Raises `ClusterError` for devices without figures in a preset.
    """
    found: list[Any] = np.asarray(cast("Any", jax).devices() if devices is None else devices, dtype=object).ravel().tolist()
    if not found:
        raise ClusterError("no devices to detect a cluster from")
    if topology is None and found[0].platform == "gpu" and found[0] in cast("Any", jax).local_devices():
        topology = nvidia_smi_topology()
    seats = [(int(getattr(d, "slice_index", None) or 0), int(d.process_index)) for d in found]
    return machine(str(found[0].platform), str(found[0].device_kind), seats, topology=topology)


def auto(mesh: Mesh) -> Mesh:
    """The mesh with Auto axes: XLA's partitioner carries out the constraints on them."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
