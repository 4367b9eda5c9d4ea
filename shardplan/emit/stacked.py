"""Partial sums as arrays: a partial value has a leading axis for each factor that it is partial over, split over that factor.

The value is the array's sum over those axes, so XLA sees plain arithmetic. A reduction is a sum over a leading axis. An op that
passes terms on runs under `vmap` or on each device's share (`emit.calls`); an op that makes terms runs on shares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardplan.ir import Layout, Use


def partition_spec(layout: Layout | None, names: Sequence[str]) -> PartitionSpec:
    """A layout as a `PartitionSpec` over axes named like the factors; trailing whole dims are left out.

    A partial sum is an array of its terms, with a leading dim for each factor that it is partial over.
    """
    return PartitionSpec() if layout is None else PartitionSpec(*(names[f] for f in layout.partial), *layout.entries(names))


def stacked_shape(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> tuple[int, ...]:
    """The shape of the array that holds a value in a layout, dims of terms included."""
    return (*(sizes[f] for f in layout.partial), *shape)


def summed(value: Any, before: Sequence[int], keep: Sequence[int]) -> Any:
    """A value that is partial over ``before``, reduced over all of these factors but ``keep``."""
    axes = tuple(i for i, f in enumerate(before) if f not in keep)
    return jnp.sum(value, axis=axes) if axes else value


def term_factors(use: Use) -> tuple[int, ...]:
    """The factors over which an op makes or passes on separate terms; over any other factor terms are summed at once."""
    late = {f for layout in use.stored if layout is not None for f in layout.partial}
    return tuple(f for f, v in enumerate(use.loops) if v < -1 or (v >= 0 and f in late))


def map_terms(
    op: Callable[..., Sequence[Any]], values: Sequence[Any], stacked: Sequence[tuple[int, ...]], over: Sequence[int]
) -> list[Any]:
    """An op applied to every combination of terms: ``stacked[i]`` are operand i's factors, ``over`` all, outermost first."""
    mapped = op
    for f in reversed(over):
        mapped = jax.vmap(mapped, in_axes=tuple(0 if f in factors else None for factors in stacked))
    return list(mapped(*values))
