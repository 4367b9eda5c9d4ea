"""One array of a step's caller as its parts on the groups of devices of a pipeline, and back; no block is copied."""

# pyright: basic
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardplan import _jax
from shardplan.regions.layer_parts import STAGE, whole_entries


def whole_spec(part: PartitionSpec) -> PartitionSpec:
    """The spec of an array whose parts along dim 0 have this spec in each stage."""
    return PartitionSpec(*whole_entries(tuple(part)))


def whole_sharding(parts: Sequence[NamedSharding]) -> NamedSharding:
    """The sharding of an array whose parts along dim 0 lie so, each on a mesh of its own."""
    meshes: list[Any] = [own.mesh for own in parts]
    devices = np.stack([mesh.devices for mesh in meshes])
    joined = Mesh(devices, (STAGE, *meshes[0].axis_names), axis_types=(AxisType.Auto,) * devices.ndim)
    return NamedSharding(joined, whole_spec(parts[0].spec))


def parts_of(x: Any, whole: NamedSharding, parts: Sequence[NamedSharding]) -> list[Any]:
    """The parts along dim 0 of an array that lies, or is put, in the sharding ``whole``."""
    if not isinstance(x, jax.Array) or not x.sharding.is_equivalent_to(whole, x.ndim):
        x = jax.device_put(x, whole)
    blocks = {shard.device: shard.data for shard in x.addressable_shards}
    shape = (x.shape[0] // len(parts), *x.shape[1:])
    return [_array(shape, own, [b for d, b in blocks.items() if d in own.device_set], x.dtype) for own in parts]


def whole_of(parts: Sequence[Any], whole: NamedSharding) -> Any:
    """The array that has these parts along dim 0."""
    shape = (sum(x.shape[0] for x in parts), *parts[0].shape[1:])
    return _array(shape, whole, [shard.data for x in parts for shard in x.addressable_shards], parts[0].dtype)


def _array(shape: tuple[int, ...], sharding: NamedSharding, blocks: Sequence[Any], dtype: Any) -> Any:
    if not blocks:
        return _jax.absent_array(jax.ShapeDtypeStruct(shape, dtype), sharding)
    return jax.make_array_from_single_device_arrays(shape, sharding, blocks)
