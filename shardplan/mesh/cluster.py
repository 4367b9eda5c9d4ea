"""A cluster: a machine that is read from presets, TOML files and shapes, and written to TOML."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from . import load
from .machine import Machine
from .matrix import Matrix
from .profile import load_machine


@dataclass(frozen=True, slots=True)
class Cluster(Machine):
    """The machine that a plan is for.

    >>> Cluster.load("2x4").shape
    (2, 4)
    """

    def device_order(self, matrix: Matrix | Mapping[str, Any]) -> NDArray[np.int64]:
        """The device numbers arranged by a parallelism matrix, one array axis for each row.

        ``jax.sharding.Mesh(np.array(jax.devices())[cluster.device_order(matrix)], names)`` is the mesh. ``plan.matrix``
        is accepted too.
        """
        if isinstance(matrix, Mapping):
            matrix = Matrix(tuple(tuple(row) for row in matrix["factors"]))
        return matrix.device_order(self)

    def fingerprint(self) -> str:
        """A short digest of everything that prices depend on: equal clusters have equal fingerprints."""
        content = _plain({"name": self.name, "levels": [asdict(level) for level in self.levels], "device": asdict(self.device)})
        for key, own in (("single_devices", self.single_devices), ("single_links", self.single_links)):
            if own:
                content[key] = _plain([asdict(item) for item in own])
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @staticmethod
    def load(spec: str | PathLike[str] | Cluster) -> Cluster:
        """The cluster that ``spec`` names: a preset (``dgx-h100:4``), a TOML file, a shape of H100s (``2x4``), a measured profile
        (``profile.json``), or one of the first three on a profile's devices (``2x4@profile.json``, `shardplan.mesh.profile`).
        """
        return spec if isinstance(spec, Cluster) else cluster_of(load_machine(spec))

    @staticmethod
    def from_toml(text: str, *, source: str = "<text>") -> Cluster:
        """The cluster that a TOML text describes; ``source`` names it in messages."""
        return cluster_of(load.from_toml(text, source=source))

    def to_toml(self) -> str:
        """The TOML text from which `from_toml` builds an equal cluster."""
        return load.to_toml(self)


def cluster_of(machine: Machine) -> Cluster:
    """The machine as a cluster."""
    return Cluster(machine.name, machine.levels, machine.device, machine.source, machine.single_devices, machine.single_links)


def _plain(value: Any) -> Any:
    """Numbers as floats: 100 and 100.0 are the same figure."""
    match value:
        case dict():
            return {k: _plain(v) for k, v in cast(dict[str, Any], value).items()}
        case list() | tuple():
            return [_plain(v) for v in cast(list[Any], value)]
        case bool() | None | str():
            return value
        case _:
            return float(value)
