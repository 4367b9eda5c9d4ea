# pyright: basic
"""Cases of data movement."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import numpy as np

from shardplan.tdl.proof.case import (
    Case,
    Draw,
    array,
    bound,
    case,
    shape,
    shuffled,
    some,
    traced,
)

_DTYPES = ("float32", "int32", "bool", "bfloat16")


def _any(draw: Draw, dims: tuple[int, ...]) -> Any:
    return array(draw, dims, draw.choose(_DTYPES))


@case("broadcast_in_dim")
def _broadcast(name: str, draw: Draw) -> Case:
    new = shape(draw, draw.choose((2, 3)))
    dims = some(draw, range(len(new)))
    old = tuple(1 if draw.choose((False, False, True)) else new[d] for d in dims)
    return bound(name, _any(draw, old), shape=new, broadcast_dimensions=dims, sharding=None)


@case("reshape")
def _reshape(name: str, draw: Draw) -> Case:
    """Two groupings of the same factors, sometimes with a dim of size 1, a shuffle or a ``dimensions`` order."""
    factors = [draw.choose((2, 2, 3, 4)) for _ in range(draw.choose((2, 3, 4)))]

    def grouped() -> tuple[int, ...]:
        """The factors, perhaps shuffled, multiplied into dims."""
        dims: list[int] = []
        for f in shuffled(draw, factors) if draw.choose((True, False, False)) else factors:
            if dims and draw.choose((True, False)):
                dims[-1] *= f
            else:
                dims.append(f)
        if draw.choose((True, False, False)):
            dims.insert(draw.choose(range(len(dims) + 1)), 1)
        return tuple(dims)

    old, new = grouped(), grouped()
    assert prod(old) == prod(new)
    order = shuffled(draw, range(len(old))) if draw.choose((True, False, False)) else None
    return bound(name, _any(draw, old), new_sizes=new, dimensions=order, sharding=None)


@case("transpose")
def _transpose(name: str, draw: Draw) -> Case:
    dims = shape(draw)
    return bound(name, _any(draw, dims), permutation=shuffled(draw, range(len(dims))))


@case("squeeze")
def _squeeze(name: str, draw: Draw) -> Case:
    dims = shape(draw, sizes=(1, 1, 4, 6))
    return bound(name, _any(draw, dims), dimensions=some(draw, [d for d, n in enumerate(dims) if n == 1]))


@case("slice")
def _slice(name: str, draw: Draw) -> Case:
    dims = shape(draw)
    starts, limits, strides = [], [], []
    for n in dims:
        stride = draw.choose((1, 1, 2, 3))
        start = draw.choose(range(min(stride + 1, n)))
        starts.append(start)
        limits.append(draw.choose((n, n, max(start + 1, n - 1))))
        strides.append(stride)
    strided = None if set(strides) == {1} else tuple(strides)
    return bound(name, _any(draw, dims), start_indices=tuple(starts), limit_indices=tuple(limits), strides=strided)


@case("rev")
def _rev(name: str, draw: Draw) -> Case:
    dims = shape(draw)
    return bound(name, _any(draw, dims), dimensions=some(draw, range(len(dims))))


@case("pad")
def _pad(name: str, draw: Draw) -> Case:
    dims, dtype = shape(draw, sizes=(2, 4, 6)), draw.choose(("float32", "int32"))
    options = ((0, 0, 0), (0, 0, 0), (1, -1, 0), (-1, 1, 0), (1, 1, 0), (0, 1, 1), (1, 0, 1), (2, 0, 2), (0, 2, 0))
    config = tuple(draw.choose(options) for _ in dims)
    return bound(name, array(draw, dims, dtype), array(draw, (), dtype), padding_config=config)


@case("concatenate")
def _concatenate(name: str, draw: Draw) -> Case:
    dims, dtype = shape(draw), draw.choose(_DTYPES)
    along = draw.choose(range(len(dims)))
    parts = [(*dims[:along], draw.choose((1, 2, dims[along])), *dims[along + 1 :]) for _ in range(draw.choose((1, 2, 3)))]
    return bound(name, *(array(draw, p, dtype) for p in parts), dimension=along)


@case("stack")
def _stack(name: str, draw: Draw) -> Case:
    dims, dtype = shape(draw), draw.choose(_DTYPES)
    return bound(name, *(array(draw, dims, dtype) for _ in range(draw.choose((1, 2, 4)))), axis=draw.choose(range(len(dims) + 1)))


@case("split", "unstack")
def _split(name: str, draw: Draw) -> Case:
    dims = shape(draw)
    axis = draw.choose(range(len(dims)))
    if name == "unstack":
        return bound(name, _any(draw, dims), axis=axis)
    first = draw.choose(range(1, dims[axis]))
    return bound(name, _any(draw, dims), sizes=(first, dims[axis] - first), axis=axis)


@case("tile")
def _tile(name: str, draw: Draw) -> Case:
    dims = shape(draw, largest=100)
    return bound(name, _any(draw, dims), reps=tuple(draw.choose((1, 1, 2, 3)) for _ in dims))


@case("iota")
def _iota(name: str, draw: Draw) -> Case:
    dims = shape(draw)
    dtype = np.dtype(draw.choose(("int32", "float32", "uint8")))
    return bound(name, dtype=dtype, shape=dims, dimension=draw.choose(range(len(dims))), sharding=None)


@case("iota_2x32_shape")
def _iota_2x32(name: str, draw: Draw) -> Case:
    return bound(name, shape=shape(draw))


@case("device_put")
def _device_put(name: str, draw: Draw) -> Case:
    """With a device: without one, `jax.device_put` adds no op to a step."""
    return traced(name, lambda x: jax.device_put(x, jax.devices()[0]), _any(draw, shape(draw)))
