"""Arrays of several processes, made from the part that this process has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardplan.errors import ArgumentError
from shardplan.frontend.deleted import refuse_deleted
from shardplan.plans.runner import shape_text


def from_local(path: str, planned: jax.ShapeDtypeStruct, part: Any, sharding: NamedSharding) -> jax.Array:
    """The array at ``path`` with this sharding, made from ``part``, the part of this process.

    Raises:
        ArgumentError: if that is another part than this process holds, or has another dtype.
        ShardplanError: for a deleted part.
    """
    refuse_deleted([path], [part])
    local = np.asarray(part)
    local = local.astype(jax.dtypes.canonicalize_dtype(local.dtype))
    given, whole = f"given as {shape_text(local)}", shape_text(planned)
    own = own_shape(sharding.addressable_devices_indices_map(planned.shape).values(), planned.shape)
    if local.dtype != planned.dtype or (own is not None and local.shape != own):
        raise ArgumentError(path, whole, given, remedy=_remedy(planned, own))
    try:
        return jax.make_array_from_process_local_data(sharding, local, planned.shape)
    except ValueError as error:
        raise ArgumentError(path, whole, given, remedy=_remedy(planned, own)) from error


def own_shape(indices: Iterable[Sequence[slice] | None], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of the block that these parts of an array form; None if they form none."""
    parts = {tuple(own.indices(n)[:2] for own, n in zip(index or (), shape, strict=True)) for index in indices}
    extents = tuple(sum(end - start for start, end in set(own)) for own in zip(*parts, strict=True))
    return extents if math.prod(extents) == sum(math.prod(end - start for start, end in part) for part in parts) else None


def _remedy(planned: jax.ShapeDtypeStruct, own: tuple[int, ...] | None) -> str:
    """What this process has to give."""
    number, count = jax.process_index(), jax.process_count()
    if own is None:
        return f"process {number} holds blocks that do not lie side by side: give the whole array with plan.put"
    wanted = shape_text(jax.ShapeDtypeStruct(own, planned.dtype))
    if count == 1:
        return f"the one process of this run gives all of it: pass {wanted}"
    if own == planned.shape:
        return f"the plan keeps it whole in each of {count} processes: pass {wanted}, or pin it (pins=) so that they share it"
    return f"process {number} of {count} gives the part that its devices hold: pass {wanted}"
