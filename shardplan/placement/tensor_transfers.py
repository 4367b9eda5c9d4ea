"""The transfers of one tensor between two operators under their configurations (FlexFlow, section 5.1, step 2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.placement.configurations import Configuration
from shardplan.placement.device_topology import DeviceTopology
from shardplan.placement.operators import Edge
from shardplan.placement.shared_regions import copies_of, shared_bytes, sharing_pairs

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SharedRegions:
    """Pairs of parts [m] that share a region, sorted by ``source``.

    ``message`` [m] numbers the messages between two devices, which take ``ticks`` on ``link`` [messages]; -1: both parts are on
    one device.
    """

    source: Ints
    target: Ints
    message: Ints
    ticks: Ints
    link: Ints


def forward_transfers(edge: Edge, made: Configuration, read: Configuration, machine: DeviceTopology) -> SharedRegions:
    """The regions that each part of the consumer fetches. If there are several copies, it takes the one on its own device, or
    else the nearest.
    """
    devices, targets = np.array(made.devices), np.array(read.devices)
    copies = copies_of(edge.produced, made.degrees)
    if copies.shape[1] == 1:
        pairs = sharing_pairs(edge, made.degrees, read.degrees)
        return _between(machine, devices, targets, pairs.source, pairs.target, pairs.nbytes)
    nbytes = shared_bytes(edge, made.degrees, read.degrees)
    region, target = np.nonzero(nbytes[copies[:, 0]])
    offered = copies[region]  # [pairs, copies]
    size = nbytes[offered[:, 0], target]
    at, to = devices[offered], targets[target][:, None]
    seconds = np.where(at == to, -1.0, machine.latency_ticks[at, to] + size[:, None] * machine.ticks_per_byte[at, to])
    turn = (np.arange(copies.shape[1])[None, :] - target[:, None]) % copies.shape[1]  # equal copies take turns
    nearest = seconds == seconds.min(axis=1, keepdims=True)
    source = offered[np.arange(len(offered)), np.where(nearest, turn, copies.shape[1]).argmin(axis=1)]
    order = np.lexsort((target, source))
    return _between(machine, devices, targets, source[order], target[order], size[order])


def backward_transfers(edge: Edge, made: Configuration, read: Configuration, machine: DeviceTopology) -> SharedRegions:
    """The gradients that the parts of the consumer send back, to every copy: each reader's is a term of the sum."""
    pairs = sharing_pairs(edge, made.degrees, read.degrees)
    source, target, nbytes = pairs.target[pairs.back], pairs.source[pairs.back], pairs.nbytes[pairs.back]
    return _between(machine, np.array(read.devices), np.array(made.devices), source, target, nbytes)


def _between(machine: DeviceTopology, sources: Ints, targets: Ints, source: Ints, target: Ints, nbytes: Ints) -> SharedRegions:
    at, to = sources[source], targets[target]
    remote = at != to
    message = np.where(remote, np.cumsum(remote) - 1, -1)
    at, to, size = at[remote], to[remote], nbytes[remote]
    ticks = machine.latency_ticks[at, to] + np.rint(size * machine.ticks_per_byte[at, to]).astype(np.int64)
    return SharedRegions(source, target, message, np.maximum(ticks, 1), machine.link[at, to])
