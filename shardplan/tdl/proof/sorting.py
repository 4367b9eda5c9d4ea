# pyright: basic
"""Cases of sorting along a dim."""

from __future__ import annotations

from jax import lax

from shardplan.tdl.proof.case import (
    Case,
    Draw,
    array,
    bound,
    case,
    shape,
    traced,
)


@case("sort")
def _sort(name: str, draw: Draw) -> Case:
    dims = shape(draw)
    operands = [array(draw, dims, draw.choose(("float32", "int32"))) for _ in range(draw.choose((1, 2, 3)))]
    keys = draw.choose(range(1, len(operands) + 1))
    return bound(name, *operands, dimension=draw.choose(range(len(dims))), is_stable=True, num_keys=keys)


@case("top_k")
def _top_k(name: str, draw: Draw) -> Case:
    dims = shape(draw)
    axis = draw.choose(range(len(dims)))
    k = draw.choose(range(1, dims[axis] + 1))
    return traced(name, lambda x: lax.top_k(x, k, axis=axis), array(draw, dims))


@case("approx_top_k")
def _approx_top_k(name: str, draw: Draw) -> Case:
    x = array(draw, shape(draw))
    return traced(name, lambda x: lax.approx_max_k(x, 2), x)
