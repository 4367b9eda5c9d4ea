"""Partial sums as arrays: over each factor that a value is partial over it has a leading axis, split over that factor.

The array's sum over those axes is the value, so that what XLA is told is plain arithmetic: an op on terms is the op under `vmap`,
and reducing is a sum over a leading axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardplan.ir import Layout
from shardplan.search.extract import Use


def stacked_shape(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> tuple[int, ...]:
    """The shape of the array of a value in a layout."""
    return (*(sizes[f] for f in layout.partial), *shape)


def summed(value: Any, before: Sequence[int], keep: Sequence[int]) -> Any:
    """A value that is partial over ``before``, reduced over all of these but ``keep``."""
    axes = tuple(i for i, f in enumerate(before) if f not in keep)
    return jnp.sum(value, axis=axes) if axes else value


def term_factors(use: Use) -> tuple[int, ...]:
    """The factors whose terms an op makes or hands on one by one; over any other the partitioner adds up on the spot."""
    late = {f for layout in use.stored if layout is not None for f in layout.partial}
    return tuple(f for f, v in enumerate(use.loops) if v < -1 or (v >= 0 and f in late))


def split_terms(
    value: Any, need: Layout, over: Sequence[int], sizes: Sequence[int], constrain: Callable[[Any, Layout], Any]
) -> tuple[Any, tuple[int, ...]]:
    """(the operand with a leading axis for each of ``over`` that splits it or that it is partial over, these factors)."""
    for d, factors in enumerate(need.dims):
        mine = [f for f in factors if f in over]
        if not mine:
            continue
        at = len(need.partial) + d
        parts = [sizes[f] for f in factors]
        blocks = value.reshape(*value.shape[:at], *parts, value.shape[at] // math.prod(parts), *value.shape[at + 1 :])
        # the terms' factors first among the leading axes, the others back into their dim
        rest = [f for f in factors if f not in over]
        order = [at + factors.index(f) for f in mine]
        blocks = jnp.moveaxis(blocks, order, range(len(mine)))
        start = len(mine) + at
        value = blocks.reshape(*blocks.shape[:start], -1, *blocks.shape[start + len(rest) + 1 :])
        partial = (*mine, *need.partial)
        dims = tuple(tuple(rest) if i == d else fs for i, fs in enumerate(need.dims))
        ranked = sorted(range(len(partial)), key=partial.__getitem__)
        value = jnp.transpose(value, (*ranked, *range(len(partial), value.ndim)))
        need = Layout(dims, tuple(partial[i] for i in ranked))
        value = constrain(value, need)
    return value, need.partial


def map_terms(
    op: Callable[..., Sequence[Any]], values: Sequence[Any], stacked: Sequence[tuple[int, ...]], over: Sequence[int]
) -> list[Any]:
    """An op on every combination of terms: ``stacked[i]`` are operand i's factors, ``over`` all of them, outermost first."""
    mapped = op
    for f in reversed(over):
        mapped = jax.vmap(mapped, in_axes=tuple(0 if f in own else None for own in stacked))
    return list(mapped(*values))
