# pyright: basic
"""Slices, scatters and FFTs rewritten around faults of XLA. No rewrite changes a result.

- *The compiler* of some releases (`shardplan.tdl.xla_quirks.merges_slices`) merges two nested dynamic slices into one that
  starts at the sum of their starts. That is wrong if a start is out of range and would be clamped. A device's program has such
  pairs that its author never wrote: a device slices its share out of a dynamic slice, and a scatter of one row becomes a slice
  that reads the row which it may have to keep. So starts are clamped, and an optimization barrier stands in front of the operand
  of a scatter of one row.
- *The partitioner* of these releases may leave one row of many to a device, so in a program that it partitions, every scatter has
  that barrier. It costs a copy if the compiler would have merged a scatter with an addition to its result.
- *The compiler for CPUs* runs an FFT only in row-major order, so its operand and result are held in that order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardplan import _jax
from shardplan.tdl.xla_quirks import merges_slices


def cuttable(primitive: str, inputs: Sequence[Any], params: Mapping[str, Any], *, constant: bool = False) -> list[Any]:
    """The inputs with which an op gives the same results however the partitioner cuts it.

    ``constant``: the first input depends on no argument of the step. Each device computes its own share of a constant, so nothing
    is sliced.
    """
    rewritten = compilable(primitive, inputs, params)
    if primitive.startswith("scatter") and merges_slices() and not constant and not _writes_one_row(inputs):
        rewritten[0] = lax.optimization_barrier(rewritten[0])
    return rewritten


def compilable(primitive: str, inputs: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """The inputs with which an op gives the same results in a device's own program, whatever sliced them."""
    rewritten = list(inputs)
    if primitive == "fft":
        rewritten[0] = _jax.row_major(rewritten[0])
    if not merges_slices():
        return rewritten
    match primitive:
        case "dynamic_slice":
            rewritten[1:] = _clamped(rewritten[1:], rewritten[0].shape, params["slice_sizes"])
        case "dynamic_update_slice":
            rewritten[2:] = _clamped(rewritten[2:], rewritten[0].shape, rewritten[1].shape)
        case "gather" if params["mode"] == lax.GatherScatterMode.CLIP:
            dims = params["dimension_numbers"].start_index_map
            last = [rewritten[0].shape[d] - params["slice_sizes"][d] for d in dims]
            dtype = rewritten[1].dtype
            rewritten[1] = jnp.clip(rewritten[1], 0, np.minimum(last, np.iinfo(dtype).max).astype(dtype))
        case _ if primitive.startswith("scatter") and _writes_one_row(inputs):
            rewritten[0] = lax.optimization_barrier(rewritten[0])
        case _:
            pass
    return rewritten


def _writes_one_row(inputs: Sequence[Any]) -> bool:
    """Whether a scatter has one index only: the compiler makes a slice and an update of it."""
    return math.prod(inputs[1].shape[:-1]) == 1


def in_row_major_order(primitive: str, results: Sequence[Any]) -> list[Any]:
    """The results of an op, held in row-major order in memory where XLA's CPU compiler needs it.

    Its FFTs refuse to run in any other order, but the compiler may choose one for them.
    """
    return [_jax.row_major(x) for x in results] if primitive == "fft" else list(results)


def _clamped(starts: Sequence[Any], shape: Sequence[int], sizes: Sequence[int]) -> list[Any]:
    """The starts, clamped so that a slice of ``sizes`` lies within ``shape``."""
    rewritten: list[Any] = []
    for start, n, size in zip(starts, shape, sizes, strict=True):
        dtype = np.dtype(start.dtype)
        last = min(n - size, int(np.iinfo(dtype).max))
        rewritten.append(lax.clamp(np.asarray(0, dtype), start, np.asarray(last, dtype)))
    return rewritten
