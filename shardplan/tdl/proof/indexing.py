# pyright: basic
"""Cases of gather, scatter and dynamic slices, in all their modes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from shardplan.tdl.proof.case import (
    Case,
    Draw,
    array,
    case,
    shape,
    shuffled,
    traced,
)

_MODES = ("fill", "clip", "promise_in_bounds")


@dataclass(frozen=True)
class _Lookup:
    """How each operand dim is indexed, and the shapes that follow; gather and scatter share it."""

    operand: tuple[int, ...]
    indices: tuple[int, ...]
    sizes: tuple[int, ...]  # of the slice, for every operand dim
    collapsed: tuple[int, ...]
    mapped: tuple[int, ...]
    batching: tuple[int, ...]
    index_batching: tuple[int, ...]
    windows: tuple[int, ...]
    rest: tuple[int, ...]  # the other array's dims: updates, or the result
    window_dims: tuple[int, ...]


def _lookup(draw: Draw) -> _Lookup:
    operand = shape(draw, draw.choose((1, 2, 2, 3)), sizes=(2, 3, 4, 6), largest=80)
    roles = [draw.choose(("row", "row", "one", "whole", "whole", "mapped whole", "part", "batch")) for _ in operand]
    if "batch" in roles and roles.count("batch") == len(roles):
        roles[0] = "row"
    collapsed = tuple(d for d, r in enumerate(roles) if r == "row")
    batching = tuple(d for d, r in enumerate(roles) if r == "batch")
    mapped = shuffled(draw, [d for d, r in enumerate(roles) if r in ("row", "one", "mapped whole", "part")])
    sizes = tuple(
        1 if r in ("row", "one", "batch") else max(1, n - draw.choose((1, 2))) if r == "part" else n
        for r, n in zip(roles, operand, strict=True)
    )
    windows = tuple(d for d, r in enumerate(roles) if r not in ("row", "batch"))
    # XLA drops all but the last of several updates to a lone element when the index vectors are empty: no such case here.
    index_dims = shape(draw, draw.choose((0, 1, 1, 2)) if mapped else 0, sizes=(2, 3, 4), largest=12)
    tags = shuffled(draw, [("batch", d) for d in batching] + [("own", n) for n in range(len(index_dims))])
    dims = tuple(operand[d] if kind == "batch" else index_dims[d] for kind, d in tags)
    index_batching = tuple(tags.index(("batch", d)) for d in batching)
    rank = len(dims) + len(windows)
    window_dims = tuple(sorted(shuffled(draw, range(rank))[: len(windows)]))
    rest, sources, batches = [0] * rank, iter(windows), iter(dims)
    for d in range(rank):
        rest[d] = sizes[next(sources)] if d in window_dims else next(batches)
    return _Lookup(
        operand, (*dims, len(mapped)), sizes, collapsed, mapped, batching, index_batching, windows, tuple(rest), window_dims
    )


def _indices(draw: Draw, look: _Lookup, mode: str) -> Any:
    """Indices in range or, where the mode defines that, slightly out of range."""
    columns = []
    for d in look.mapped:
        last = look.operand[d] - look.sizes[d]
        slack = 0 if mode == "promise_in_bounds" else draw.choose((0, 2))
        columns.append(draw.rng.integers(-slack, last + 1 + slack, look.indices[:-1]))
    return np.stack(columns, axis=-1).astype(np.int32) if columns else np.zeros(look.indices, np.int32)


@case("gather")
def _gather(name: str, draw: Draw) -> Case:
    look, mode = _lookup(draw), draw.choose(_MODES)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=look.window_dims, collapsed_slice_dims=look.collapsed, start_index_map=look.mapped,
        operand_batching_dims=look.batching, start_indices_batching_dims=look.index_batching,
    )  # fmt: skip
    x = array(draw, look.operand, draw.choose(("float32", "int32", "bool", "bfloat16")))
    return traced(name, lambda x, i: lax.gather(x, i, numbers, look.sizes, mode=mode), x, _indices(draw, look, mode))


_SCATTERS = {
    "scatter": lax.scatter, "scatter-add": lax.scatter_add, "scatter-sub": lax.scatter_sub, "scatter-mul": lax.scatter_mul,
    "scatter-min": lax.scatter_min, "scatter-max": lax.scatter_max,
}  # fmt: skip


@case(*_SCATTERS)
def _scatter(name: str, draw: Draw) -> Case:
    look, mode = _lookup(draw), draw.choose(_MODES)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=look.window_dims, inserted_window_dims=look.collapsed, scatter_dims_to_operand_dims=look.mapped,
        operand_batching_dims=look.batching, scatter_indices_batching_dims=look.index_batching,
    )  # fmt: skip
    dtype = draw.choose(("float32", "int32"))
    x, updates = array(draw, look.operand, dtype), array(draw, look.rest, dtype)
    scatter = _SCATTERS[name]
    return traced(name, lambda x, i, u: scatter(x, i, u, numbers, mode=mode), x, _indices(draw, look, mode), updates)


@case("dynamic_slice")
def _dynamic_slice(name: str, draw: Draw) -> Case:
    dims = shape(draw)
    sizes = tuple(draw.choose((n, n, 1, max(1, n - 1))) for n in dims)
    starts = [np.int32(draw.rng.integers(-1, n - k + 2)) for n, k in zip(dims, sizes, strict=True)]
    x = array(draw, dims, draw.choose(("float32", "int32", "bool")))
    return traced(name, lambda x, *s: lax.dynamic_slice_p.bind(x, *s, slice_sizes=sizes), x, *starts)


@case("dynamic_update_slice")
def _dynamic_update_slice(name: str, draw: Draw) -> Case:
    dims, dtype = shape(draw), draw.choose(("float32", "int32", "bool"))
    sizes = tuple(draw.choose((n, n, 1, max(1, n - 1))) for n in dims)
    starts = [np.int32(draw.rng.integers(-1, n - k + 2)) for n, k in zip(dims, sizes, strict=True)]
    x, update = array(draw, dims, dtype), array(draw, sizes, dtype)
    return traced(name, lambda x, u, *s: lax.dynamic_update_slice_p.bind(x, u, *s), x, update, *starts)
