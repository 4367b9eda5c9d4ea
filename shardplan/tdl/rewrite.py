# pyright: basic
"""Slices and scatters written so that a compiler may cut them further.

XLA makes one dynamic slice of two that are nested, with the sum of their starts. That is wrong where the inner start lies outside
and would be clamped, and a partitioned program has such pairs that its author never wrote: the partitioner slices each device's
share out of a dynamic slice, and a scatter of one row reads the row that it may have to keep from a slice of its operand. So
starts are clamped here, which changes nothing, and a scatter's operand is fenced.

The CPU's compiler runs a transform only in row-major order; its operand and result are held in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardplan import _jax


def cuttable(primitive: str, inputs: Sequence[Any], params: Mapping[str, Any], *, constant: bool = False) -> list[Any]:
    """The inputs with which an op gives the same results however it is partitioned.

    ``constant``: the first depends on no argument of the step; of a constant each device makes its own share, nothing is sliced.
    """
    found = list(inputs)
    match primitive:
        case "fft":
            found[0] = _jax.row_major(found[0])
        case "dynamic_slice":
            found[1:] = _clamped(found[1:], found[0].shape, params["slice_sizes"])
        case "dynamic_update_slice":
            found[2:] = _clamped(found[2:], found[0].shape, found[1].shape)
        case "gather" if params["mode"] == lax.GatherScatterMode.CLIP:
            dims = params["dimension_numbers"].start_index_map
            last = [found[0].shape[d] - params["slice_sizes"][d] for d in dims]
            if np.iinfo(found[1].dtype).max >= max(last, default=0):
                found[1] = jnp.clip(found[1], 0, np.asarray(last, found[1].dtype))
        case _ if primitive.startswith("scatter") and not constant:
            found[0] = lax.optimization_barrier(found[0])
        case _:
            pass
    return found


def in_row_major_order(primitive: str, results: Sequence[Any]) -> list[Any]:
    """The results of an op, in row-major order in memory where XLA's CPU compiler knows no other.

    Its transforms refuse to run in another order, and nothing keeps the compiler from choosing one for them.
    """
    return [_jax.row_major(x) for x in results] if primitive == "fft" else list(results)


def _clamped(starts: Sequence[Any], shape: Sequence[int], sizes: Sequence[int]) -> list[Any]:
    found: list[Any] = []
    for start, n, size in zip(starts, shape, sizes, strict=True):
        dtype = np.dtype(start.dtype)
        last = min(n - size, int(np.iinfo(dtype).max))
        found.append(lax.clamp(np.asarray(0, dtype), start, np.asarray(last, dtype)))
    return found
