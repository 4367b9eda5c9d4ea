"""Fused attention: the kernels of `jax.experimental.pallas.ops.gpu.attention`, which never hold the scores in memory.

A Pallas kernel runs once for each element of a grid, on blocks of its operands. So its grid says how the kernel may be cut: along
a grid dim that counts blocks of every result, unless the body reads its index in that dim. These are the batch and the heads. In
the forward pass without a mask or segment ids, they include the queries.
"""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardplan.ir import KernelGrid
from shardplan.tdl.describe import rule
from shardplan.tdl.description import Call, Lambda
from shardplan.tdl.language import Named, Opaque, Scalar, TensorRef

_SOURCE = "jax/experimental/pallas/ops/gpu/attention.py"
_ALL = slice(None)


def pairs(queries: int, keys: int, *, causal: bool, window: int | None = None) -> int:
    """The number of (query, key) pairs whose scores a kernel computes, in one head of one example.

    All pairs count, or, if ``causal``, those whose key is not ahead of the query (about half). With a ``window``, each query has
    at most that many keys, the last ones.

    >>> pairs(4, 4, causal=True), pairs(4, 2, causal=True), pairs(4, 4, causal=False), pairs(4, 4, causal=True, window=2)
    (10, 7, 16, 7)
    """
    if not causal:
        return queries * keys
    return sum(max(0, min(i + 1, keys) - max(0, i + 1 - (window or keys + queries))) for i in range(queries))


def _forward_flops(call: Call, grid: KernelGrid) -> float:
    """Flops of two matrix products: the scores, and the weighted values."""
    return 4 * _pair_elements(call, grid)


def _backward_flops(call: Call, grid: KernelGrid) -> float:
    """Flops of seven matrix products, not five: scores and their gradients are computed once for queries, once for keys."""
    return 14 * _pair_elements(call, grid)


def _pair_elements(call: Call, grid: KernelGrid) -> float:
    (batch, queries, heads, head), keys = call.operands[0], call.operands[1][1]
    return batch * heads * head * pairs(queries, keys, causal=grid.skips)


def _no_products(call: Call, grid: KernelGrid) -> float:
    return 0.0


_FLOPS: Mapping[str, Callable[[Call, KernelGrid], float]] = {
    "pallas_call:mha_forward": _forward_flops,
    "pallas_call:mha_preprocess_backward": _no_products,
    "pallas_call:mha_backward": _backward_flops,
}


def _is_of_jax(call: Call) -> bool:
    """Whether this is the kernel in JAX's own file, and not another kernel of the same name."""
    grid = call.params.get("kernel_grid")
    return isinstance(grid, KernelGrid) and grid.source.endswith(_SOURCE)


@rule(*_FLOPS, only=_is_of_jax)
def _attention_kernel(call: Call, *operands: TensorRef) -> tuple[Lambda, ...]:
    """The kernel's results: opaque, except for the grid dims along which the kernel may be cut."""
    grid: KernelGrid = call.params["kernel_grid"]
    free = _free_dims(call, grid)
    flops = _FLOPS[call.primitive](call, grid)

    def result(number: int) -> Lambda:
        """One result: loops over its dims, named alike in all results where the kernel may be cut."""
        own = grid.blocks[len(operands) + number]
        names = tuple(f"g{g}" if g in free else f"r{number}_{d}" for d, (g, _) in enumerate(own))

        def element(*i: Any) -> Scalar:
            """One element of the result, from the blocks that its program reads."""
            at = {g: i[d] for d, (g, _) in enumerate(own) if g in free}
            reads = [x for n, ref in enumerate(operands) for x in _reads(ref, grid.blocks[n], at)]
            return Opaque(0.0 if number else flops, attention=True)(*reads)[
                tuple(i[d] for d, (g, _) in enumerate(own) if g not in free)
            ]

        return Named(names, element)

    return tuple(result(n) for n in range(len(call.results)))


def _free_dims(call: Call, grid: KernelGrid) -> frozenset[int]:
    """The grid dims along which the kernel may be cut: they count equal blocks of each result, and the body reads no index."""
    shapes = (*call.operands, *call.results)
    counted: dict[int, set[tuple[int, int]]] = {}
    for shape, own in zip(shapes, grid.blocks, strict=True):
        for extent, (g, size) in zip(shape, own, strict=True):
            counted.setdefault(g, set()).add((extent, size))
    results = grid.blocks[len(call.operands) :]
    alike = {g for g, found in counted.items() if g >= 0 and len(found) == 1 and g not in grid.placed}
    return frozenset(g for g in alike if all([dim for dim, _ in own].count(g) == 1 for own in results))


def _reads(x: TensorRef, own: tuple[tuple[int, int], ...], at: Mapping[int, Any]) -> list[Scalar]:
    """The accesses of a program to an operand. A second one, to the block's start, makes cuts inside a block illegal."""
    reads: list[Scalar] = [x[tuple(at.get(g, _ALL) for g, _ in own)]]
    if any(g in at and size > 1 for g, size in own):
        reads.append(x[tuple(at[g] // size * size if g in at else _ALL for g, size in own)])
    return reads
