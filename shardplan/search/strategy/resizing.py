"""Replaces one size of a dim in all shapes of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardplan.ir import Op, Program

_SIZES = frozenset(
    "batch_group_count feature_group_count fft_lengths length limit_indices new_sizes padding_config reps shape sizes slice_sizes"
    " start_indices".split()
)
"""Parameters of primitives that hold sizes of dims (a depthwise convolution has a group for each channel); all others hold axes,
counts, strides or modes, which stay as they are.
"""


def resized(program: Program, old: int, new: int) -> Program | None:
    """The program with ``new`` in place of every ``old`` in its shapes; None where it derives other sizes from it."""
    result = _resized(program, old, new)
    return result if _whole(program, result) else None


def _resized(program: Program, old: int, new: int) -> Program:
    tensors = tuple(replace(t, shape=_swap(t.shape, old, new)) for t in program.tensors)
    ops = tuple(_resized_op(op, old, new) for op in program.ops)
    return replace(program, tensors=tensors, ops=ops)


def _resized_op(op: Op, old: int, new: int) -> Op:
    params = {name: _swap(value, old, new) if name in _SIZES else value for name, value in op.params.items()}
    return replace(
        op, params=params, trips=_swap(op.trips, old, new), bodies=tuple(_resized(body, old, new) for body in op.bodies)
    )


def _whole(before: Program, after: Program) -> bool:
    """Whether an op's tensors of equal element counts still have equal counts; a reshape to part of the size breaks this."""
    for op, other in zip(before.ops, after.ops, strict=True):
        tensors = (*op.tensors, *op.outputs)
        if len({(before.tensors[t].size, after.tensors[t].size) for t in tensors}) != len(
            {before.tensors[t].size for t in tensors}
        ):
            return False
        if not all(_whole(a, b) for a, b in zip(op.bodies, other.bodies, strict=True)):
            return False
    return True


def _swap(value: Any, old: int, new: int) -> Any:
    """Replaces sizes that are multiples of ``old`` by the same multiples of ``new``, also in nested tuples."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value // old * new if value and value % old == 0 else value
    if isinstance(value, tuple):
        items = [_swap(v, old, new) for v in value]  # type: ignore[reportUnknownVariableType]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)  # type: ignore[reportUnknownVariableType]
    return value
