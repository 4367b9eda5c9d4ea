"""Sums of products: matrix multiplication in all its forms, and convolution."""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

import math
from typing import Any

from shardplan.tdl.describe import rule
from shardplan.tdl.description import Call, Lambda
from shardplan.tdl.language import Opaque, Scalar, Sum, TensorRef, given
from shardplan.tdl.rules.movement import held


@rule("dot_general")
def _dot_general(call: Call, x: TensorRef, y: TensorRef, *_: TensorRef) -> Lambda:
    """Result dims: batch, then the free dims of the left operand, then those of the right."""
    (sum_x, sum_y), (batch_x, batch_y) = call.params["dimension_numbers"]
    free_x = [d for d in range(len(x.shape)) if d not in {*sum_x, *batch_x}]
    free_y = [d for d in range(len(y.shape)) if d not in {*sum_y, *batch_y}]

    def element(*i: Any) -> Scalar:
        """A row's product with a column, of one batch."""
        batch, left, right = i[: len(batch_x)], i[len(batch_x) : len(batch_x) + len(free_x)], i[len(batch_x) + len(free_x) :]

        def term(*k: Any) -> Scalar:
            """One term of the sum."""
            at_x = {
                **dict(zip(batch_x, batch, strict=True)),
                **dict(zip(free_x, left, strict=True)),
                **dict(zip(sum_x, k, strict=True)),
            }
            at_y = {
                **dict(zip(batch_y, batch, strict=True)),
                **dict(zip(free_y, right, strict=True)),
                **dict(zip(sum_y, k, strict=True)),
            }
            return x[tuple(at_x[d] for d in range(len(x.shape)))] * y[tuple(at_y[d] for d in range(len(y.shape)))]

        return Sum(term, tuple(x.shape[d] for d in sum_x)) if sum_x else term()

    return element


@rule("conv_general_dilated")
def _convolution(call: Call, x: TensorRef, kernel: TensorRef) -> Lambda:
    """Reads index ``(x*stride + window*dilation - padding) / operand dilation``; ``//`` picks the feature or batch group."""
    p = call.params
    numbers = p["dimension_numbers"]
    x_dims, k_dims, out_dims = (tuple(map(int, s)) for s in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec))
    features, batches = int(p["feature_group_count"]), int(p["batch_group_count"])
    out_features = kernel.shape[k_dims[0]]
    per_group = out_features // (features * batches)
    extents = (kernel.shape[k_dims[1]], *(kernel.shape[d] for d in k_dims[2:]))
    steps = list(zip(p["window_strides"], p["rhs_dilation"], p["padding"], p["lhs_dilation"], strict=True))

    def element(*i: Any) -> Scalar:
        """One output feature of one image, at one position."""
        b, o, *place = (i[d] for d in out_dims)

        def term(c: Any, *w: Any) -> Scalar:
            """The product of one channel with one element of the kernel."""
            at_x, at_k = [0] * len(x.shape), [0] * len(kernel.shape)
            at_x[x_dims[0]] = b if batches == 1 else (o // per_group) * (x.shape[x_dims[0]] // batches) + b
            at_x[x_dims[1]] = c if features == 1 else (o // per_group) * extents[0] + c
            at_k[k_dims[0]], at_k[k_dims[1]] = o, c
            for n, (stride, wide, (lo, _), apart) in enumerate(steps):
                at_x[x_dims[2 + n]] = (place[n] * int(stride) + w[n] * int(wide) - int(lo)) / int(apart)
                at_k[k_dims[2 + n]] = w[n]
            return x[tuple(at_x)] * kernel[tuple(at_k)]

        lone = [
            p for p, d in zip(place, x_dims[2:], strict=True) if x.shape[d] == 1
        ]  # a single element among padding is not broadcast
        return given(held(*lone), Sum(term, extents)) if lone else Sum(term, extents)

    return element


@rule("ragged_dot_general")
def _ragged_dot(call: Call, x: TensorRef, y: TensorRef, sizes: TensorRef) -> Lambda:
    """A ragged position's group depends on the sizes, so the ragged dim and the group dim stay whole."""
    numbers = call.params["ragged_dot_dimension_numbers"]
    (sum_x, sum_y), (batch_x, batch_y) = numbers.dot_dimension_numbers
    ragged, group = int(numbers.lhs_ragged_dimensions[0]), tuple(numbers.rhs_group_dimensions)
    free_x = [d for d in range(len(x.shape)) if d not in {*sum_x, *batch_x}]
    free_y = [d for d in range(len(y.shape)) if d not in {*sum_y, *batch_y, *group}]
    mode_contracting = ragged in sum_x
    all_ = slice(None)

    def element(*i: Any) -> Scalar:
        """A row's product with a column, of one batch and group."""
        groups, i = (i[:1], i[1:]) if mode_contracting else ((), i)
        batch, left, right = i[: len(batch_x)], i[len(batch_x) : len(batch_x) + len(free_x)], i[len(batch_x) + len(free_x) :]
        at_x: dict[int, Any] = {**dict(zip(batch_x, batch, strict=True)), **dict(zip(free_x, left, strict=True))}
        at_y: dict[int, Any] = {
            **dict(zip(batch_y, batch, strict=True)),
            **dict(zip(free_y, right, strict=True)),
            **dict.fromkeys(group, all_),
        }
        summed = [(a, b) for a, b in zip(sum_x, sum_y, strict=True) if a != ragged]
        whole: list[Any] = [*groups]
        if mode_contracting:
            at_x[ragged] = at_y[dict(zip(sum_x, sum_y, strict=True))[ragged]] = all_
        else:
            whole.append(at_x[ragged])

        def term(*k: Any) -> Scalar:
            for (a, b), loop in zip(summed, k, strict=True):
                at_x[a] = at_y[b] = loop
            return x[tuple(at_x[d] for d in range(len(x.shape)))] * y[tuple(at_y[d] for d in range(len(y.shape)))]

        at_sizes: Scalar = sizes[tuple(all_ for _ in sizes.shape)]
        if mode_contracting:  # the sum over the ragged dim is hidden: each of its positions is in one group
            at_sizes = Opaque(2.0 * math.prod(x.shape) * math.prod(y.shape[d] for d in free_y))(at_sizes)
        value = Sum(term, tuple(x.shape[a] for a, _ in summed)) if summed else term()
        return given(held(*whole) + at_sizes, value)

    return element


@rule("scaled_dot")
def _scaled_dot(call: Call, x: TensorRef, y: TensorRef, x_scale: TensorRef, y_scale: TensorRef) -> Lambda:
    """`_dot_general` with one scale for each run of elements along the summed dims."""
    return _scaled_product(call.params["dimension_numbers"], x, y, x_scale, y_scale)


@rule("scaled_matmul_wrapper")
def _scaled_matmul(call: Call, x: TensorRef, y: TensorRef, x_scale: TensorRef, y_scale: TensorRef) -> Lambda:
    """cuDNN's `_scaled_dot`: [batch, m, k] by [batch, n, k]."""
    return _scaled_product((((2,), (2,)), ((0,), (0,))), x, y, x_scale, y_scale)


def _scaled_product(numbers: Any, x: TensorRef, y: TensorRef, x_scale: TensorRef, y_scale: TensorRef) -> Lambda:
    (sum_x, sum_y), (batch_x, batch_y) = numbers
    free_x = [d for d in range(len(x.shape)) if d not in {*sum_x, *batch_x}]
    free_y = [d for d in range(len(y.shape)) if d not in {*sum_y, *batch_y}]

    def element(*i: Any) -> Scalar:
        """A row's product with a column, of one batch."""
        batch, left, right = i[: len(batch_x)], i[len(batch_x) : len(batch_x) + len(free_x)], i[len(batch_x) + len(free_x) :]

        def term(*k: Any) -> Scalar:
            at_x = {**dict(zip([*batch_x, *free_x, *sum_x], [*batch, *left, *k], strict=True))}
            at_y = {**dict(zip([*batch_y, *free_y, *sum_y], [*batch, *right, *k], strict=True))}
            return _scaled(x, x_scale, at_x) * _scaled(y, y_scale, at_y)

        return Sum(term, tuple(x.shape[d] for d in sum_x))

    return element


def _scaled(x: TensorRef, scale: TensorRef, at: dict[int, Any]) -> Scalar:
    """An element and its scale. The product of the two is part of the matrix unit's own: it counts no flops."""
    coarse = tuple(at[d] // (n // m) for d, (n, m) in enumerate(zip(x.shape, scale.shape, strict=True)))
    return given(scale[coarse], x[tuple(at[d] for d in range(len(x.shape)))])
