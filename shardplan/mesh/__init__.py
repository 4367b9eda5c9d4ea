"""The machine: levels and links, presets, parallelism matrices (P2, section 3.1).

A `Cluster` is a tree of levels, slowest first, with devices at its leaves. The search cuts over its `factors`. Only
`shardplan.mesh.devices` imports JAX: it makes a `jax.sharding.Mesh` and is imported only where one is wanted.
"""

from .cluster import Cluster
from .factoring import coordinates, factors
from .load import preset_names
from .machine import Device, Interconnect, Level
from .matrix import Matrix, matrices
from .singles import SingleDevice, SingleLink

__all__ = [
    "Cluster",
    "Device",
    "Interconnect",
    "Level",
    "Matrix",
    "SingleDevice",
    "SingleLink",
    "coordinates",
    "factors",
    "matrices",
    "preset_names",
]
