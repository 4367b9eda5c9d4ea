"""The objective that a search minimizes: tables hold time or bytes, and others ask `Objective.counts_time` which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..ir import Factor
from ..mesh import Device
from ..mesh.cluster import Cluster
from ..mesh.machine import DEFAULT_CONTENTION
from .network import Network
from .overlap import SERIAL, Weights, weights_at
from .wire import WireBytes


@dataclass(frozen=True, slots=True)
class Objective:
    """An objective: tables hold picoseconds of a step, or bytes that a device sends.

    The search counts 1e12 of either as a second. ``everything_split``: Tofu's premise holds (every level cuts every op and
    splits every tensor that it can); baselines do not share it. ``overlaps``: communication may hide behind compute. ``weights``
    say what a second of compute and one of hideable communication cost.
    """

    name: Literal["time", "bytes"]
    everything_split: bool
    overlaps: bool = False
    weights: Weights = SERIAL

    @property
    def counts_time(self) -> bool:
        """Whether tables hold time; else they hold bytes, and compute costs nothing."""
        return self.name == "time"

    def network(self, cluster: Cluster, factors: Sequence[Factor]) -> Network | WireBytes:
        """The prices of collectives in this unit."""
        if self.counts_time:
            return Network(cluster, tuple(factors))
        return WireBytes(cluster, tuple(factors))

    def device(self, cluster: Cluster) -> Device | None:
        """The device that computes; None where that costs nothing."""
        return cluster.device if self.counts_time else None


TIME = Objective("time", everything_split=False)
OVERLAP = Objective("time", everything_split=False, overlaps=True, weights=weights_at(1.0, DEFAULT_CONTENTION))
"""The time of a step in which communication hides behind compute; the search sets the weights."""
BYTES = Objective("bytes", everything_split=True)


def objective_of(name: str) -> Objective:
    """The objective with this name.

    Raises:
        ValueError: if there is none.
    """
    for known in (TIME, BYTES):
        if known.name == name:
            return known
    raise ValueError(f"unsupported objective {name!r}: use 'time', or 'bytes' for Tofu's")
