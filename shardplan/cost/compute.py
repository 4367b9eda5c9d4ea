"""Roofline: seconds of an op on one device from its flops and bytes (peak rates times the efficiency that large kernels
reach).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from shardplan.constants import CONSTANTS
from shardplan.cost.tiles import ProductLoops
from shardplan.ir import itemsize
from shardplan.mesh import Device
from shardplan.tdl import Call, Description
from shardplan.tdl.description import children
from shardplan.tdl.index import Affine, Data, Exact, Full, IndexExpr, loops_of
from shardplan.tdl.language import Access, Apply, HiddenLoops, Match, OpaqueResult, Reduce, Scalar


def flops(description: Description, *, padding: bool = False) -> float:
    """Flops of the whole op: one for each scalar operation of each element, as XLA counts (a multiply-add is two).

    A lookup described as a sum over rows reads one row, so its loop counts once. Terms that read padding count only with
    ``padding``: a convolution's kernel multiplies by its zeros. Terms that read the gaps of dilated elements never count. Where
    an opaque function states its flops, those are all.
    """
    stated = sum(_stated(tree) for tree in description.trees)
    return stated or sum(
        _tree_flops(tree, description, math.prod(n for n in shape), padding=padding)
        for tree, shape in zip(description.trees, description.call.results, strict=True)
    )


def _stated(node: Scalar) -> float:
    own = node.flops if isinstance(node, OpaqueResult | HiddenLoops) else 0.0
    return own + sum(_stated(c) for c in children(node))


def _tree_flops(node: Scalar, description: Description, times: float, *, padding: bool) -> float:
    match node:
        case Reduce(_, loops, body):
            looked_up = _matched(body)
            inner = times * math.prod(description.loops[v].extent for v in loops if v not in looked_up)
            # a value that is scattered to one row is combined there, not in every row
            inner /= math.prod(description.loops[v].extent for v in looked_up if description.loops[v].reducer is None)
            inner *= _density(body, description, padding=padding)
            return inner + _tree_flops(body, description, inner, padding=padding)
        case Apply(how, args, _):
            operations = 0.0 if how == "where" else times * max(1, len(args) - 1)
            return operations + sum(_tree_flops(a, description, times, padding=padding) for a in args)
        case _:
            return sum(_tree_flops(c, description, times, padding=padding) for c in children(node))


def _matched(node: Scalar) -> frozenset[int]:
    matched = loops_of(node.index) if isinstance(node, Match) else frozenset[int]()
    for child in children(node):
        matched |= _matched(child)
    return matched


def _density(node: Scalar, description: Description, *, padding: bool) -> float:
    """The fraction of a sum's terms that count: those in which no operand reads a gap between dilated elements, or padding."""
    if isinstance(node, Access):
        shape = description.call.operands[node.operand]
        return math.prod(_hits(ix, n, description, padding=padding) for ix, n in zip(node.indices, shape, strict=True))
    return math.prod(_density(c, description, padding=padding) for c in children(node))


def _hits(ix: IndexExpr, extent: int, description: Description, *, padding: bool) -> float:
    """The fraction of its loops' values at which an index lies on an element of a dim of this extent, or beyond its ends."""
    match ix:
        case Affine(terms, const):
            divisor = 1
        case Exact(Affine(terms, const), divisor):
            pass
        case _:
            return 1.0
    reach = [c * (description.loops[v].extent - 1) for v, c in terms]
    inside = const + sum(r for r in reach if r < 0) >= 0 and const + sum(r for r in reach if r > 0) < extent
    count = math.prod(description.loops[v].extent for v, _ in terms)
    if ((inside or padding) and divisor == 1) or not 0 < count <= CONSTANTS.most_positions:
        return 1.0
    at: NDArray[np.int64] = np.array([const], np.int64)
    for v, c in terms:
        at = (at[:, None] + c * np.arange(description.loops[v].extent)).ravel()
    hit = at % divisor == 0
    if not padding:
        hit &= (at >= 0) & (at < extent * divisor)
    return int(hit.sum()) / count


def is_contraction(description: Description) -> bool:
    """Whether the op sums products of two operands (matrix products, convolutions)."""
    return any(_sums_products(tree) for tree in description.trees)


def _sums_products(node: Scalar) -> bool:
    if isinstance(node, Reduce) and node.reducer == "sum" and isinstance(node.body, Apply) and node.body.how == "mul":
        return True
    return any(_sums_products(c) for c in children(node))


def product_loops(description: Description) -> ProductLoops | None:
    """The loops of an op that is one product of two operands, by their roles; convolutions count as implicit products.

    A loop of the sum is depth. A loop of the result runs over rows if it indexes only the first operand, over columns if it
    indexes only the second, and over the batch if it indexes both. The rows of a convolution are thus the places of its result,
    its depth the window of all input features. None for other ops: opaque functions, lookups, ragged products.
    """
    if len(description.trees) != 1:
        return None
    match _selected(description.trees[0]):
        case Reduce("sum", summed, Apply("mul", (left, right))):
            first, second = _read_at(left), _read_at(right)
        case _:
            return None
    free = description.results[0]
    if first is None or second is None or not first | second <= {*free, *summed}:
        return None
    own = [v for v in free if description.loops[v].extent > 1]
    if not first | second >= set(own):
        return None
    return ProductLoops(
        tuple([v for v in own if v in first and v in second]),
        tuple([v for v in own if v not in second]),
        tuple([v for v in own if v not in first]),
        summed,
    )


def _selected(node: Scalar) -> Scalar:
    """The value of a node that conditions select (`language.given`): padding, or the scale of a block."""
    return node.args[1] if isinstance(node, Apply) and node.name == "given" else node


def _read_at(node: Scalar) -> frozenset[int] | None:
    """The loops at which a factor of a product reads its operand; None if it is not an operand, or is read whole or by data."""
    access = _selected(node)
    if not isinstance(access, Access) or any(isinstance(ix, Full | Data) for ix in access.indices):
        return None
    return frozenset[int]().union(*(loops_of(ix) for ix in access.indices))


def states_products(description: Description) -> bool:
    """Whether an opaque function in the description states the flops of matrix products inside it."""
    return any(_stated(tree) for tree in description.trees)


def is_attention(description: Description) -> bool:
    """Whether the op is a fused attention kernel: its products run at a rate of their own (`Device.attention_efficiency`)."""
    return any(_attends(tree) for tree in description.trees)


def _attends(node: Scalar) -> bool:
    return (isinstance(node, OpaqueResult | HiddenLoops) and node.attention) or any(_attends(c) for c in children(node))


def product_dtype(call: Call, *, contracts: bool) -> str:
    """The dtype at whose peak an op's products run: the wider of its first two operands'.

    The first counts if both have one width, as the two types of 8-bit floats do. Integers beside floats count only where the op
    ``contracts`` the two.
    """
    first, *second = [d for d in call.dtypes if d][:2] or ["float32"]
    return max([first, *(d for d in second if contracts or ("int" in d) == ("int" in first))], key=itemsize)


def seconds(
    device: Device,
    flop: float,
    nbytes: float,
    dtype: str,
    *,
    matrix: bool,
    attention: bool = False,
    launches: float | None = None,
) -> float:
    """The roofline's time: the slower of arithmetic and memory, plus launches (by default one for an op with any work).

    The arithmetic of ``matrix`` ops runs at the part of the dtype's peak that products reach, or fused ``attention``. The
    arithmetic of other ops costs nothing: the vector rate bounds no elementwise op here.
    """
    each = seconds_each(device, np.array(flop), np.array(nbytes), dtype, matrix=matrix, attention=attention, launches=launches)
    return float(each)


def seconds_each(
    device: Device,
    flop: NDArray[np.float64],
    nbytes: NDArray[np.float64],
    dtype: str,
    *,
    matrix: bool,
    attention: bool = False,
    launches: float | None = None,
) -> NDArray[np.float64]:
    """`seconds` of many ops of one kind."""
    reached = device.attention_efficiency if attention else device.flops_efficiency
    arithmetic = flop / (device.flops_per_s[rated(device, dtype)] * reached) if matrix else 0.0
    slower = np.maximum(arithmetic, moving_s(device, nbytes))
    return slower + device.launch_s * (np.where((nbytes != 0) | matrix, 1.0, 0.0) if launches is None else launches)


def rated(device: Device, dtype: str) -> str:
    """The dtype at whose peak products of a dtype are priced: itself, or else float32, or else that of the highest peak."""
    peaks = device.flops_per_s
    return dtype if dtype in peaks else "float32" if "float32" in peaks else max(peaks, key=lambda name: peaks[name])


def moving_s(device: Device, nbytes: NDArray[np.float64]) -> NDArray[np.float64]:
    """The seconds in which memory moves these bytes."""
    return nbytes / (device.memory_bytes_per_s * device.memory_efficiency)
