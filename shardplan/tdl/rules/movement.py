"""Data movement: each element of the result is one element of an operand, at another index."""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

from math import prod
from typing import Any

from shardplan.tdl.describe import rule
from shardplan.tdl.description import Call, Lambda
from shardplan.tdl.language import (
    Named,
    Opaque,
    Scalar,
    TensorRef,
    given,
    where,
)

_ALL = slice(None)


def held(*loops: Any) -> Scalar:
    """A condition over loops that must stay whole: the operand or offset that it selects does not follow even blocks."""
    return Opaque()()[loops]


@rule("broadcast_in_dim")
def _broadcast(call: Call, x: TensorRef, *_: TensorRef) -> Lambda:
    dims = tuple(call.params["broadcast_dimensions"])
    return lambda *i: x[tuple(i[d] for d in dims)]


@rule("reshape")
def _reshape(call: Call, x: TensorRef, *_: TensorRef) -> Lambda:
    """Dims are grouped where running products are equal; inside a group ``//`` and ``%`` split the flat index.

    The operand's dims are first put into the order of ``dimensions``, if there is one.
    """
    new = call.results[0]
    order = tuple(call.params.get("dimensions") or range(len(x.shape)))
    old = tuple(x.shape[d] for d in order)
    groups = _groups(old, new)

    def element(*i: Any) -> Scalar:
        """The operand's element at the same flat position."""
        index: list[Any] = [0] * len(x.shape)
        for old_dims, new_dims in groups:
            flat = sum(i[d] * prod(new[e] for e in new_dims if e > d) for d in new_dims)
            stride = prod(old[d] for d in old_dims)
            for n, d in enumerate(old_dims):
                stride //= old[d]
                rows = flat // stride
                index[order[d]] = rows if n == 0 else rows % old[d]
        return x[tuple(index)]

    return element


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """The shortest runs of old and new dims, paired in order, with equal products; dims of size 1 are left out."""
    if 0 in old:
        return []
    olds, news = [d for d, n in enumerate(old) if n > 1], [d for d, n in enumerate(new) if n > 1]
    groups: list[tuple[list[int], list[int]]] = []
    while olds:
        a, b = [olds.pop(0)], [news.pop(0)]
        left, right = old[a[0]], new[b[0]]
        while left != right:
            if left < right:
                a.append(olds.pop(0))
                left *= old[a[-1]]
            else:
                b.append(news.pop(0))
                right *= new[b[-1]]
        groups.append((a, b))
    return groups


@rule("transpose")
def _transpose(call: Call, x: TensorRef) -> Lambda:
    place = {d: n for n, d in enumerate(call.params["permutation"])}
    return lambda *i: x[tuple(i[place[d]] for d in range(len(x.shape)))]


@rule("squeeze")
def _squeeze(call: Call, x: TensorRef) -> Lambda:
    gone = {d % len(x.shape) for d in call.params["dimensions"]}

    def element(*i: Any) -> Scalar:
        kept = iter(i)
        return x[tuple(0 if d in gone else next(kept) for d in range(len(x.shape)))]

    return element


@rule("expand_dims")
def _expand_dims(call: Call, x: TensorRef) -> Lambda:
    rank = len(call.results[0])
    new = {d % rank for d in call.params["dimensions"]}
    return lambda *i: x[tuple(loop for d, loop in enumerate(i) if d not in new)]


@rule("slice")
def _slice(call: Call, x: TensorRef) -> Lambda:
    starts = call.params["start_indices"]
    strides = call.params["strides"] or (1,) * len(starts)
    return lambda *i: x[tuple(loop * int(s) + int(o) for loop, s, o in zip(i, strides, starts, strict=True))]


@rule("rev")
def _rev(call: Call, x: TensorRef) -> Lambda:
    turned = set(call.params["dimensions"])
    return lambda *i: x[tuple(x.shape[d] - 1 - loop if d in turned else loop for d, loop in enumerate(i))]


@rule("pad")
def _pad(call: Call, x: TensorRef, value: TensorRef) -> Lambda:
    """The operand's elements, with the padding value around and between them."""
    config = call.params["padding_config"]
    lone = [
        d for d, n in enumerate(x.shape) if n == 1 and call.results[0][d] > 1
    ]  # a single element among padding is not broadcast
    return lambda *i: where(
        held(*(i[d] for d in lone)),
        x[tuple((loop - int(lo)) / (int(gap) + 1) for loop, (lo, _, gap) in zip(i, config, strict=True))],
        value[()],
    )


@rule("concatenate")
def _concatenate(call: Call, *operands: TensorRef) -> Lambda:
    along = int(call.params["dimension"])
    if len(operands) == 1:
        return lambda *i: operands[0][i]

    def element(*i: Any) -> Scalar:
        parts = [x[tuple(_ALL if d == along else loop for d, loop in enumerate(i))] for x in operands]
        value = parts[-1]
        for part in reversed(parts[:-1]):
            value = where(held(i[along]), part, value)
        return given(held(i[along]), value)

    return element


@rule("stack")
def _stack(call: Call, *operands: TensorRef) -> Lambda:
    along = int(call.params["axis"]) % len(call.results[0])

    def element(*i: Any) -> Scalar:
        parts = [x[i[:along] + i[along + 1 :]] for x in operands]
        value = given(held(i[along]), parts[-1])
        for part in reversed(parts[:-1]):
            value = where(held(i[along]), part, value)
        return value

    return element


@rule("split")
def _split(call: Call, x: TensorRef) -> tuple[Lambda, ...]:
    along = int(call.params["axis"]) % len(x.shape)

    def part(number: int) -> Lambda:
        names = tuple(f"part{number}" if d == along else f"i{d}" for d in range(len(x.shape)))
        return Named(names, lambda *i: given(held(i[along]), x[tuple(_ALL if d == along else loop for d, loop in enumerate(i))]))

    return tuple(part(n) for n in range(len(call.results)))


@rule("unstack")
def _unstack(call: Call, x: TensorRef) -> tuple[Lambda, ...]:
    along = int(call.params["axis"]) % len(x.shape)
    return tuple(lambda *i: x[(*i[:along], _ALL, *i[along:])] for _ in call.results)


@rule("tile")
def _tile(call: Call, x: TensorRef) -> Lambda:
    """The operand repeated: a repeated dim stays whole."""
    reps = tuple(int(r) for r in call.params["reps"])

    def element(*i: Any) -> Scalar:
        repeated = [loop for loop, r in zip(i, reps, strict=True) if r != 1]
        return given(held(*repeated), x[tuple(loop if r == 1 else _ALL for loop, r in zip(i, reps, strict=True))])

    return element


@rule("iota")
def _iota(call: Call, *_: TensorRef) -> Lambda:
    return lambda *i: given(held(), 1)


@rule("empty", "empty2")
def _empty(call: Call, *_: TensorRef) -> Lambda:
    return lambda *i: given(held(), 1)
