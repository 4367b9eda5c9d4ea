# pyright: basic
"""Slices and scatters rewritten so that a compiler may cut them further.

XLA merges two nested dynamic slices into one that starts at the sum of their starts. That is wrong where the inner start is out
of range and would be clamped. A partitioned program has such pairs that its author never wrote: the partitioner slices each
device's share out of a dynamic slice, and a scatter of one row reads the row that it may have to keep from a slice of its
operand. So starts are clamped here, which changes no result, and a scatter's operand gets an optimization barrier.

XLA's CPU compiler runs an FFT only in row-major order, so its operand and result are held in that order.
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

    ``constant``: the first input depends on no argument of the step. Each device computes its own share of a constant, so nothing
    is sliced.
    """
    rewritten = list(inputs)
    match primitive:
        case "fft":
            rewritten[0] = _jax.row_major(rewritten[0])
        case "dynamic_slice":
            rewritten[1:] = _clamped(rewritten[1:], rewritten[0].shape, params["slice_sizes"])
        case "dynamic_update_slice":
            rewritten[2:] = _clamped(rewritten[2:], rewritten[0].shape, rewritten[1].shape)
        case "gather" if params["mode"] == lax.GatherScatterMode.CLIP:
            dims = params["dimension_numbers"].start_index_map
            last = [rewritten[0].shape[d] - params["slice_sizes"][d] for d in dims]
            if np.iinfo(rewritten[1].dtype).max >= max(last, default=0):
                rewritten[1] = jnp.clip(rewritten[1], 0, np.asarray(last, rewritten[1].dtype))
        case _ if primitive.startswith("scatter") and not constant:
            rewritten[0] = lax.optimization_barrier(rewritten[0])
        case _:
            pass
    return rewritten


def in_row_major_order(primitive: str, results: Sequence[Any]) -> list[Any]:
    """The results of an op, held in row-major order in memory where XLA's CPU compiler needs it.

    Its FFTs refuse to run in any other order, but the compiler may choose one for them.
    """
    return [_jax.row_major(x) for x in results] if primitive == "fft" else list(results)


def _clamped(starts: Sequence[Any], shape: Sequence[int], sizes: Sequence[int]) -> list[Any]:
    rewritten: list[Any] = []
    for start, n, size in zip(starts, shape, sizes, strict=True):
        dtype = np.dtype(start.dtype)
        last = min(n - size, int(np.iinfo(dtype).max))
        rewritten.append(lax.clamp(np.asarray(0, dtype), start, np.asarray(last, dtype)))
    return rewritten
