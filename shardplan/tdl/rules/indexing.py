"""Data-dependent indices: gather, scatter, dynamic slices.

A dim that is looked up row by row is described as a sum over all rows where ``index == row``, so each worker may own rows: this
is Megatron's vocabulary split. A dim that a slice takes whole may be cut like any other. Other indexed dims are data-dependent
and stay whole.
"""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

from typing import Any

from shardplan.tdl.describe import rule
from shardplan.tdl.description import Call, Lambda
from shardplan.tdl.language import (
    DATA,
    Max,
    Min,
    Prod,
    Scalar,
    Sum,
    TensorRef,
    apply,
    equals,
    given,
    where,
)
from shardplan.tdl.rules.movement import held

_ALL = slice(None)


def summable(dtype: str) -> bool:
    """Whether absent rows may count as zeros."""
    return dtype != "bool" and not dtype.startswith("key")


def _fills(call: Call, dtype: str) -> bool:
    """Whether rows out of range are filled with a value that a sum of partial lookups would count more than once."""
    if "FILL" not in str(call.params["mode"]).upper():
        return False
    fill = call.params.get("fill_value")
    return "float" not in dtype and "complex" not in dtype if fill is None else fill == fill and fill != 0


@rule("gather")
def _gather(call: Call, x: TensorRef, indices: TensorRef, *_: TensorRef) -> Lambda:
    numbers = call.params["dimension_numbers"]
    sizes = tuple(int(n) for n in call.params["slice_sizes"])
    offset_dims, collapsed = tuple(numbers.offset_dims), set(numbers.collapsed_slice_dims)
    start_map = tuple(numbers.start_index_map)
    batching = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    windows = [d for d in range(len(x.shape)) if d not in collapsed and d not in batching]
    filled = _fills(call, x.dtype)
    rows = [d for d in start_map if sizes[d] == 1 and x.shape[d] > 1] if summable(x.dtype) else []

    def element(*i: Any) -> Scalar:
        """The value that is looked up for one element of the result."""
        batch = tuple(loop for d, loop in enumerate(i) if d not in offset_dims)
        offsets = dict(zip(windows, (i[d] for d in offset_dims), strict=True))

        def index_of(component: int) -> Scalar:
            return indices[(*batch, component)]

        def term(*row: Any) -> Scalar:
            """One row's value if the index is that row, else 0."""
            at_row = dict(zip(rows, row, strict=True))
            at: list[Any] = []
            for d in range(len(x.shape)):
                if d in batching:
                    at.append(batch[batching[d]])
                elif d in at_row:
                    at.append(at_row[d])
                elif d in windows and sizes[d] == x.shape[d]:
                    at.append(offsets[d])
                else:
                    at.append(DATA)
            value: Scalar = apply("or fill", x[tuple(at)]) if filled else x[tuple(at)]
            for d, loop in at_row.items():
                value = where(equals(index_of(start_map.index(d)), loop), value)
            return value

        inside = [offsets[d] for d in windows if sizes[d] != x.shape[d]]
        others = [index_of(n) for n, d in enumerate(start_map) if d not in rows]
        if not start_map:  # nothing is looked up, but the indices have the batch dims too
            others.append(indices[(*batch, DATA)])
        value = Sum(term, tuple(x.shape[d] for d in rows)) if rows else term()
        return given(apply("start", held(*inside), *others), value) if inside or others else value

    return element


def row_dims(call: Call) -> tuple[int, ...]:
    """The operand dims of a scatter that are written row by row, so that each worker may own some rows."""
    numbers = call.params["dimension_numbers"]
    start_map, inserted = tuple(numbers.scatter_dims_to_operand_dims), set(numbers.inserted_window_dims)
    windows = [d for d in range(len(call.operands[0])) if d not in inserted and d not in numbers.operand_batching_dims]
    sizes = dict(zip(windows, (call.operands[2][d] for d in numbers.update_window_dims), strict=True))
    return tuple(d for d in start_map if call.operands[0][d] > 1 and (d in inserted or sizes[d] == 1))


_COMBINERS: dict[str, Any] = {"scatter-add": Sum, "scatter-sub": Sum, "scatter-mul": Prod, "scatter-min": Min, "scatter-max": Max}


@rule("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
def _scatter(call: Call, x: TensorRef, indices: TensorRef, updates: TensorRef) -> Lambda:
    """A worker may own rows of the result, or (where updates are combined, not written over) a part of the updates."""
    numbers = call.params["dimension_numbers"]
    update_windows, inserted = tuple(numbers.update_window_dims), set(numbers.inserted_window_dims)
    start_map = tuple(numbers.scatter_dims_to_operand_dims)
    batching = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    windows = [d for d in range(len(x.shape)) if d not in inserted and d not in batching]
    sizes: dict[int, int] = dict(zip(windows, (updates.shape[d] for d in update_windows), strict=True))
    scattered = [d for d in range(len(updates.shape)) if d not in update_windows]  # one for each dim of indices but the last
    ways = [n for n in range(len(scattered)) if n not in batching.values()]
    combine = _COMBINERS.get(call.primitive)

    def element(*i: Any) -> Scalar:
        """The operand's element, combined with all updates to it."""
        whole = [i[d] for d in range(len(x.shape)) if not _known(d)]

        def term(*s: Any, otherwise: Any = 0.0) -> Scalar:
            """One update's contribution, if it goes to this element."""
            place: dict[int, Any] = dict(zip(ways, s or [_ALL] * len(ways), strict=True))
            place.update({n: i[d] for d, n in batching.items()})
            at: dict[int, Any] = {scattered[n]: loop for n, loop in place.items()}
            at.update({u: i[d] if sizes[d] == x.shape[d] else _ALL for d, u in zip(windows, update_windows, strict=True)})
            hits = [_hit(n, d, place, i) for n, d in enumerate(start_map)]
            if not start_map:
                hits.append(indices[(*(place[n] for n in range(len(scattered))), DATA)])
            update = updates[tuple(at[d] for d in range(len(updates.shape)))]
            return where(apply("hit", held(*whole), *hits), update, otherwise)

        if combine is None:
            return term(otherwise=x[i])
        extents = tuple(updates.shape[scattered[n]] for n in ways)
        combined = combine(term, extents) if ways else term()
        match call.primitive:
            case "scatter-add":
                return x[i] + combined
            case "scatter-sub":
                return x[i] + -combined
            case "scatter-mul":
                return apply("mul", x[i], combined)
            case _:
                return apply(call.primitive.removeprefix("scatter-"), x[i], combined)

    def _known(d: int) -> bool:
        if d in batching:
            return True
        if d in inserted:
            return d in start_map or x.shape[d] == 1
        return sizes[d] == x.shape[d] or (sizes[d] == 1 and d in start_map)

    def _hit(component: int, d: int, place: dict[int, Any], i: tuple[Any, ...]) -> Scalar:
        index = indices[(*(place[n] for n in range(len(scattered))), component)]
        row = d in inserted or sizes.get(d) == 1
        return equals(index, i[d]) if row and x.shape[d] > 1 else index

    return element


@rule("dynamic_slice")
def _dynamic_slice(call: Call, x: TensorRef, *starts: TensorRef) -> Lambda:
    def element(*i: Any) -> Scalar:
        taken = [call.results[0][d] == x.shape[d] for d in range(len(i))]
        at = tuple(loop if whole else DATA for loop, whole in zip(i, taken, strict=True))
        moving = [loop for loop, whole in zip(i, taken, strict=True) if not whole]
        return given(apply("start", held(*moving), *(s[()] for s in starts)), x[at]) if moving else x[at]

    return element


@rule("dynamic_update_slice")
def _dynamic_update_slice(call: Call, x: TensorRef, update: TensorRef, *starts: TensorRef) -> Lambda:
    def element(*i: Any) -> Scalar:
        covered = [update.shape[d] == x.shape[d] for d in range(len(i))]
        at = tuple(loop if whole else _ALL for loop, whole in zip(i, covered, strict=True))
        moving = [loop for loop, whole in zip(i, covered, strict=True) if not whole]
        return where(apply("start", held(*moving), *(s[()] for s in starts)), update[at], x[i])

    return element
