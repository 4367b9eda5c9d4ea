"""The machine: levels and links, presets, parallelism matrices (P2, section 3.1).

A `Cluster` is a tree of levels, slowest first, with the device at its leaves; `factors` are what the search cuts over. Nothing
here imports JAX except `shardplan.mesh.devices`, which makes a `jax.sharding.Mesh` and is imported only where one is wanted.
"""

from .cluster import Cluster
from .factoring import coordinates, factors
from .load import preset_names
from .machine import Device, Interconnect, Level
from .matrix import Matrix, matrices

__all__ = ["Cluster", "Device", "Interconnect", "Level", "Matrix", "coordinates", "factors", "matrices", "preset_names"]
