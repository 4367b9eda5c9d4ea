# pyright: basic
"""Cases of matrix multiplication and convolution, their gradients included as JAX emits them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardplan.tdl.proof.case import (
    FLOATS,
    Case,
    Draw,
    array,
    bound,
    case,
    extent,
    shape,
    shuffled,
    traced,
)


def _mixed(draw: Draw, *groups: tuple[str, tuple[int, ...]]) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]]]:
    """A shape with the dims of all groups in random order, and the positions of each group's dims."""
    tags = [(tag, n, size) for tag, sizes in groups for n, size in enumerate(sizes)]
    order = shuffled(draw, tags)
    places = {tag: tuple(order.index((tag, n, size)) for n, size in enumerate(sizes)) for tag, sizes in groups}
    return tuple(size for _, _, size in order), places


@case("dot_general")
def _dot_general(name: str, draw: Draw) -> Case:
    batch, summed, left, right = (
        shape(draw, draw.choose(ranks), sizes=(2, 3, 4, 6), largest=24) for ranks in ((0, 1, 2), (0, 1, 1, 2), (0, 1, 2), (0, 1))
    )
    x, at_x = _mixed(draw, ("batch", batch), ("sum", summed), ("free", left))
    y, at_y = _mixed(draw, ("batch", batch), ("sum", summed), ("free", right))
    dtype = draw.choose((*FLOATS, "int32"))
    preferred = draw.choose((None, "float32")) if dtype != "int32" else None
    return bound(
        name, array(draw, x, dtype), array(draw, y, dtype), precision=None, out_sharding=None,
        dimension_numbers=((at_x["sum"], at_y["sum"]), (at_x["batch"], at_y["batch"])),
        preferred_element_type=None if preferred is None else np.dtype(preferred),
    )  # fmt: skip


@case("scaled_dot")
def _scaled_dot(name: str, draw: Draw) -> Case:
    b, m, k, n = draw.choose((1, 2)), draw.choose((2, 6)), 12, draw.choose((2, 6))
    coarse = draw.choose((2, 3, 6))
    operands = [array(draw, s, "bfloat16") for s in ((b, m, k), (b, n, k), (b, m, coarse), (b, n, coarse))]
    return bound(name, *operands, dimension_numbers=(((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.dtype("float32"))


@case("scaled_matmul_wrapper")
def _scaled_matmul(name: str, draw: Draw) -> Case:
    b, m, k, n, kind = (
        draw.choose((1, 2)),
        draw.choose((2, 6)),
        12,
        draw.choose((2, 6)),
        draw.choose(("bfloat16", "float8_e4m3fn")),
    )
    coarse = draw.choose((2, 3, 6))
    operands = [array(draw, s, kind) for s in ((b, m, k), (b, n, k))]
    scales = [array(draw, s, "bfloat16") for s in ((b, m, coarse), (b, n, coarse))]
    return bound(name, *operands, *scales, preferred_element_type=jnp.dtype("float32"))


@case("ragged_dot_general")
def _ragged_dot(name: str, draw: Draw) -> Case:
    """Ragged rows (a mixture of experts) or a ragged sum (the gradient of its weights)."""
    groups, m, k, n = draw.choose((2, 3)), 6, draw.choose((2, 4)), draw.choose((2, 6))
    first = draw.choose(range(m))
    sizes = np.array([first, m - first] + [0] * (groups - 2), np.int32)
    kind = draw.choose(("rows", "sum"))
    if kind == "rows":
        numbers = (((1,), (1,)), ((), ()))
        shapes, group_dims, ragged = ((m, k), (groups, k, n)), [0], [0]
    else:
        numbers = (((0,), (0,)), ((), ()))
        shapes, group_dims, ragged = ((m, k), (m, n)), [], [0]
    ragged_numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=numbers, lhs_ragged_dimensions=ragged, rhs_group_dimensions=group_dims
    )
    x, y = (array(draw, s) for s in shapes)
    return traced(name, lambda x, y, s: lax.ragged_dot_general(x, y, s, ragged_numbers), x, y, sizes)


def _convolution_numbers(draw: Draw, spatial: int) -> lax.ConvDimensionNumbers:
    specs = [shuffled(draw, range(spatial + 2)) if draw.choose((False, True)) else tuple(range(spatial + 2)) for _ in range(3)]
    return lax.ConvDimensionNumbers(*specs)


def _laid(spec: Sequence[int], sizes: tuple[int, ...]) -> tuple[int, ...]:
    dims = [0] * len(spec)
    for place, size in zip(spec, sizes, strict=True):
        dims[place] = size
    return tuple(dims)


@case("conv_general_dilated")
def _convolution(name: str, draw: Draw) -> Case:
    """Forward, or one of its two gradients: strides, dilation of both operands, feature or batch groups, any numbers."""
    spatial = draw.choose((1, 2))
    numbers = _convolution_numbers(draw, spatial)
    groups = draw.choose((("plain", 1), ("plain", 1), ("feature", 2), ("feature", 4), ("feature", 8), ("batch", 2)))
    features, batches = (groups[1], 1) if groups[0] == "feature" else (1, groups[1])
    batch, channels, out = (
        extent(draw, draw.choose((2, 6))) * batches,
        draw.choose((1, 2, 3)) * features,
        6 * max(batches, features // 2),
    )
    out = out if out % (features * batches) == 0 else features * batches
    out = extent(draw, out) if features * batches == 1 else out
    size, window = (extent(draw, draw.choose((6, 12))),) * spatial, tuple(draw.choose((1, 2, 3)) for _ in range(spatial))
    stride = tuple(draw.choose((1, 1, 2, 3)) for _ in range(spatial))
    apart, wide = (tuple(draw.choose((1, 1, 2)) for _ in range(spatial)) for _ in range(2))
    padding: list[tuple[int, int]] = []
    for n in range(spatial):
        spread, dilated = (window[n] - 1) * wide[n] + 1, (size[n] - 1) * apart[n] + 1
        total = max(0, (-(-size[n] * apart[n] // stride[n]) - 1) * stride[n] + spread - dilated)  # SAME, over the dilated operand
        low = draw.choose((total // 2, 0, total))
        padding.append(draw.choose(((low, total - low), (low, total - low), (1, 2))))
    x = array(draw, _laid(numbers.lhs_spec, (batch, channels, *size)))
    kernel = array(draw, _laid(numbers.rhs_spec, (out, channels // features, *window)))

    def forward(x: Any, kernel: Any) -> Any:
        return lax.conv_general_dilated(
            x, kernel, stride, padding, apart, wide, numbers, feature_group_count=features, batch_group_count=batches
        )

    match draw.choose(("forward", "forward", "input", "kernel")):
        case "forward":
            return traced(name, forward, x, kernel)
        case which:
            seed = array(draw, jax.eval_shape(forward, x, kernel).shape)
            if which == "input":
                return traced(name, lambda g: jax.linear_transpose(lambda x: forward(x, kernel), x)(g), seed)
            return traced(name, lambda g: jax.linear_transpose(lambda k: forward(x, k), kernel)(g), seed)
