"""Reductions over dims and over windows, running reductions along a dim, and positions of extremes."""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardplan.tdl import language as lang
from shardplan.tdl.describe import rule
from shardplan.tdl.description import Call, Lambda
from shardplan.tdl.language import (
    Opaque,
    Scalar,
    TensorRef,
    apply,
    given,
    transformed,
)
from shardplan.tdl.rules.movement import held

_ALL = slice(None)
_REDUCERS: dict[str, Callable[..., Scalar]] = {
    "sum": lang.Sum, "prod": lang.Prod, "max": lang.Max, "min": lang.Min, "and": lang.And, "or": lang.Or,
}  # fmt: skip


def _kept(operand: TensorRef, axes: Any, index: tuple[Any, ...], reduced: Any) -> Scalar:
    """The operand at the result's index, with ``reduced`` (an iterator) at the dims that the result lacks."""
    kept = iter(index)
    return operand[tuple(next(reduced) if d in axes else next(kept) for d in range(len(operand.shape)))]


@rule("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or")
def _reduce(call: Call, x: TensorRef) -> Lambda:
    reducer = _REDUCERS[call.primitive.removeprefix("reduce_")]
    axes = sorted(call.params["axes"])
    if not axes:
        return lambda *i: x[i]
    extents = tuple(x.shape[d] for d in axes)
    return lambda *i: reducer(lambda *k: _kept(x, axes, i, iter(k)), extents)


@rule("reduce_xor")
def _reduce_xor(call: Call, x: TensorRef) -> Lambda:
    axes = set(call.params["axes"])
    return lambda *i: Opaque()(_kept(x, axes, i, iter([_ALL] * len(axes))))


@rule("reduce")
def _reduce_any(call: Call, *operands: TensorRef) -> tuple[Lambda, ...]:
    """Reduces by a user's function: the reduced dims stay whole."""
    axes = set(call.params["dimensions"])
    half = len(operands) // 2

    def element(*i: Any) -> Scalar:
        return Opaque()(
            *(_kept(x, axes, i, iter([_ALL] * len(axes))) for x in operands[:half]), *(x[()] for x in operands[half:])
        )

    return (element,) * half


@rule("argmax", "argmin")
def _argument(call: Call, x: TensorRef) -> Lambda:
    """Reduces (position, extreme) pairs."""
    axes = sorted(call.params["axes"])
    reducer = lang.ArgMax if call.primitive == "argmax" else lang.ArgMin
    return lambda *i: reducer(lambda *k: _kept(x, axes, i, iter(k)), tuple(x.shape[d] for d in axes))


def _running(call: Call, x: TensorRef, i: tuple[Any, ...]) -> Scalar:
    axis = int(call.params["axis"])
    return x[tuple(_ALL if d == axis else loop for d, loop in enumerate(i))]


@rule("cumsum")
def _cumsum(call: Call, x: TensorRef) -> Lambda:
    return lambda *i: transformed(held(i[int(call.params["axis"])]), _running(call, x, i))


@rule("cumprod", "cummax", "cummin", "cumlogsumexp")
def _cumulative(call: Call, x: TensorRef) -> Lambda:
    return lambda *i: Opaque()(_running(call, x, i))[i[int(call.params["axis"])]]


def window_index(params: Any, i: tuple[Any, ...], w: tuple[Any, ...]) -> tuple[Any, ...]:
    """The index of the operand's element that position ``w`` of the window at ``i`` covers."""
    ones = (1,) * len(i)
    base, wide = params.get("base_dilation") or ones, params.get("window_dilation") or ones
    return tuple(
        (i[d] * int(params["window_strides"][d]) + w[d] * int(wide[d]) - int(params["padding"][d][0])) / int(base[d])
        for d in range(len(i))
    )


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def _reduce_window(call: Call, x: TensorRef) -> Lambda:
    reducer = _REDUCERS[call.primitive.removeprefix("reduce_window_")]
    window = tuple(int(n) for n in call.params["window_dimensions"])

    def element(*i: Any) -> Scalar:
        value = reducer(lambda *w: x[window_index(call.params, i, w)], window)
        lone = _lone(x, i)
        return given(held(*lone), value) if lone else value

    return element


def _lone(x: TensorRef, i: tuple[Any, ...]) -> list[Any]:
    """The loops over dims of size 1: a single element among padding is not broadcast."""
    return [loop for loop, n in zip(i, x.shape, strict=True) if n == 1]


@rule("reduce_window")
def _reduce_window_any(call: Call, *operands: TensorRef) -> tuple[Lambda, ...]:
    """Reduces windows by a user's function: the result may be cut, the window may not.

    A dim with padding may not be cut either: the function never sees padding, and no value in a halo could replace it.
    """
    half = len(operands) // 2
    window = tuple(int(n) for n in call.params["window_dimensions"])
    padded = [d for d, lohi in enumerate(call.params["padding"]) if any(int(n) > 0 for n in lohi)]

    def element(*i: Any) -> Scalar:
        def parts(*w: Any) -> Scalar:
            return apply(
                "reduce_window", *(x[window_index(call.params, i, w)] for x in operands[:half]), *(v[()] for v in operands[half:])
            )

        return apply("reduce_window", held(*_lone(operands[0], i), *(i[d] for d in padded)), lang.Sum(parts, window))

    return (element,) * half


@rule("select_and_gather_add")
def _select_and_gather(call: Call, tangents: TensorRef, x: TensorRef) -> Lambda:
    """The tangent at the position of the window's extreme."""
    window = tuple(int(n) for n in call.params["window_dimensions"])
    return lambda *i: apply(
        "select_and_gather_add",
        held(*_lone(x, i)),
        lang.Sum(lambda *w: tangents[window_index(call.params, i, w)] * x[window_index(call.params, i, w)], window),
    )


@rule("select_and_scatter_add")
def _select_and_scatter_add(call: Call, source: TensorRef, x: TensorRef) -> Lambda:
    """Adds each window's source at its extreme: a worker needs the windows on its block, and all that they cover."""
    p = call.params
    window = tuple(int(n) for n in p["window_dimensions"])
    strides, low = tuple(map(int, p["window_strides"])), tuple(int(lo) for lo, _ in p["padding"])

    def element(*i: Any) -> Scalar:
        """The sum over the windows that cover an element."""
        far = [loop for loop, n, lo in zip(i, window, low, strict=True) if lo >= n]  # windows that lie in the padding

        def term(*w: Any) -> Scalar:
            """``w`` is the element's position in a window that covers it, then the position of that window's extreme."""
            windows = [(loop + lo - at) / s for loop, lo, at, s in zip(i, low, w, strides, strict=False)]
            extremes = [o * s + at - lo for o, s, at, lo in zip(windows, strides, w[len(i) :], low, strict=True)]
            return given(held(*w, *far) + x[tuple(extremes)], source[tuple(windows)])

        return lang.Sum(term, window + window)

    return element


@rule("select_and_scatter")
def _select_and_scatter(call: Call, x: TensorRef, source: TensorRef, start: TensorRef) -> Lambda:
    """Uses a user's functions: a dim may be cut where each window lies in one block, together with its source."""
    p = call.params
    apart = [
        int(n) <= int(s)
        and not any(map(int, pad))
        and size == sources * int(s)
        and (int(s) == 1 or sources > 1)  # the source of a single window does not tell where the window lies
        for n, s, pad, size, sources in zip(
            p["window_dimensions"], p["window_strides"], p["padding"], x.shape, source.shape, strict=True
        )
    ]

    def element(*i: Any) -> Scalar:
        at_x = tuple(loop if free else _ALL for loop, free in zip(i, apart, strict=True))
        at_source = tuple(loop // int(s) if free else _ALL for loop, free, s in zip(i, apart, p["window_strides"], strict=True))
        inside = tuple(loop for loop, free in zip(i, apart, strict=True) if not free)
        return Opaque()(x[at_x], source[at_source], start[()])[inside]

    return element
