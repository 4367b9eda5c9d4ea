"""The role of an op inside the kernels that XLA compiles for GPUs: some ops begin a kernel, some end one, some are part of
another's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from shardplan.ir import HOST_COPY
from shardplan.tdl.describe import is_named_call, is_run_by_user
from shardplan.tdl.description import Call, Description

Part = Literal["none", "loop", "transpose", "reduction", "product", "update", "copy", "alone"]
"""The part of an op in kernels.

- ``none``: it renames a buffer: a reshape, a sum over dims of size 1. No kernel runs.
- ``loop``: each element of the result is computed from elements of the operands: XLA fuses it into its readers.
- ``transpose``: a loop that reads in another order than it writes: it ends a kernel.
- ``reduction``: it ends a kernel, which also computes the values that it reduces.
- ``product``: a library call, or a kernel of fused attention, on stored operands.
- ``update``: a loop that writes part of a buffer in place.
- ``copy``: a copy between the memories of a device and its host: no kernel runs, and nothing is fused into it.
- ``alone``: a kernel, or several, that nothing is fused into: a sort, a scan over a dim, random bits, a user's kernel.
"""

_RENAMES = frozenset(
    (
        "reshape", "squeeze", "expand_dims", "optimization_barrier", "stop_gradient", "placed", "pvary", "pcast", "copy_p",
        "bitcast_convert_type", "random_wrap", "random_unwrap", "reduced_vary_cast", "xla_metadata_value",
    )
)  # fmt: skip
_UPDATES = {
    "dynamic_update_slice": 1,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"), 2),
}
"""Primitives that write part of their first operand in place, with the operand that they write."""
_ALONE = frozenset(
    (
        "sort", "top_k", "approx_top_k", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "reduce_window",
        "reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_scatter_add", "select_and_gather_add",
        "fft", "cholesky", "eig", "eigh", "lu", "qr", "householder_product", "schur", "svd", "triangular_solve",
        "tridiagonal_solve", "tridiagonal", "hessenberg", "rng_bit_generator",
    )
)  # fmt: skip
_SLICES = frozenset(("slice", "dynamic_slice", "gather", "dynamic_index_in_dim"))


def part_of(call: Call, description: Description | None, *, multiplies: bool) -> Part:
    """The part of an op; ``multiplies`` as in `shardplan.graph.nodes.Signature`."""
    name = call.primitive
    if name in _RENAMES:
        return "none"
    if name == HOST_COPY:
        return "copy"
    if multiplies:
        return "product"
    if name in _UPDATES:
        return "update"
    if description is None or name in _ALONE or is_named_call(name) or is_run_by_user(name):
        return "alone"
    if _only_resizes(call):
        return "none"
    if any(loop.reducer is not None for loop in description.loops) and name not in _SLICES:
        return "reduction"
    return "transpose" if name == "transpose" else "loop"


def _only_resizes(call: Call) -> bool:
    """Whether the op changes dims of size 1 alone: a sum over such dims, a broadcast to them, a transpose that moves nothing
    else, a reversal of them.
    """
    match call.primitive:
        case "reduce_sum" | "reduce_max" | "reduce_min" | "reduce_prod" | "reduce_and" | "reduce_or":
            return len(call.operands) == 1 and math.prod(call.operands[0]) == math.prod(call.results[0])
        case "broadcast_in_dim":
            return math.prod(call.operands[0]) == math.prod(call.results[0])
        case "transpose":
            moved = [d for d in call.params["permutation"] if call.operands[0][d] != 1]
            return moved == sorted(moved)
        case "rev":
            reversed_dims: Sequence[int] = call.params["dimensions"]
            return all(call.operands[0][d] == 1 for d in reversed_dims)
        case _:
            return False


def drops_ones(call: Call) -> bool:
    """Whether a call sums over dims of one element alone, as the transpose of a broadcast may: it moves what it reads."""
    if call.primitive != "reduce_sum":
        return False
    axes: Sequence[int] = call.params["axes"]
    return all(call.operands[0][d] == 1 for d in axes)


def casts(call: Call) -> bool:
    """Whether a call gives its operand, element by element, another dtype."""
    return call.primitive == "convert_element_type" and call.dtypes != call.result_dtypes


def swaps(call: Call) -> bool:
    """Whether a transpose puts some leading dims behind all others: a product with its operands swapped gives and takes that."""
    if call.primitive != "transpose":
        return False
    order = [d for d in call.params["permutation"] if call.operands[0][d] != 1]
    at = order.index(min(order, default=0)) if order else 0
    return order == [*sorted(order)[len(order) - at :], *sorted(order)[: len(order) - at]]


def kept_by_zero(call: Call) -> bool:
    """Whether the op gives its first operand as it is if the second one is zero."""
    alike = call.operands[:1] == call.results and call.dtypes[:1] == call.result_dtypes
    return call.primitive in ("add", "add_any", "sub") and alike


def update_of(call: Call) -> int | None:
    """The operand that the op writes into its first operand; None where it makes a new result."""
    return _UPDATES.get(call.primitive)


def combines(call: Call) -> bool:
    """Whether the op reads what it writes in place: a scatter that adds, multiplies, or keeps the larger or smaller."""
    return call.primitive in _UPDATES and call.primitive.startswith("scatter-")


def images_of(call: Call) -> tuple[int, ...]:
    """The operands that the library of convolutions takes in one order of dims. There are none for other ops.

    In the gradient of a filter, the gradient of the result is an image too.
    """
    if call.primitive != "conv_general_dilated":
        return ()
    return (0, 1) if _is_filters_gradient(call) else (0,)


def _is_filters_gradient(call: Call) -> bool:
    """Whether the batch of the images is summed over, as their features are elsewhere."""
    return call.params["dimension_numbers"].lhs_spec[0] != 0


def filter_of(call: Call) -> Literal["operand", "result", ""]:
    """The place of a convolution's filter if it lies in an order that the library does not take: the second operand, or, in the
    gradient of the filter, the result.

    The library wants the output features first, then the input features. Empty where the filter lies so, and for other ops.
    """
    if not images_of(call):
        return ""
    numbers = call.params["dimension_numbers"]
    if not _is_filters_gradient(call):
        return "" if _ascends(numbers.rhs_spec, call.operands[1]) else "operand"
    first, second, *space = numbers.out_spec  # as the features of an image: the filter's input features are its batch
    return "" if _ascends((second, first, *space), call.results[0]) else "result"


def _ascends(dims: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether dims lie in this order in memory; dims of size 1 lie anywhere."""
    order = [d for d in dims if shape[d] != 1]
    return order == sorted(order)


def reads_slices(call: Call) -> bool:
    """Whether the op reads only as many elements of its first operand as its result has."""
    return call.primitive in _SLICES
