"""Fused attention: the Pallas kernels of JAX and of tokamax, which never hold the scores in memory.

JAX has them in `jax.experimental.pallas.ops.gpu.attention`, tokamax in ``tokamax.dot_product_attention`` with
``implementation="triton"``.

A Pallas kernel runs once for each element of a grid, on blocks of its operands. So its grid says how the kernel may be cut: along
a grid dim that counts blocks of every result, unless the body reads its index in that dim. These are the batch and the heads. In
the forward pass without a mask or segment ids, they include the queries. Where several heads of queries share one of keys and
values, consecutive programs share a block, and only whole groups of heads are cut.
"""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardplan.ir import GridBlock, KernelGrid
from shardplan.tdl.describe import rule
from shardplan.tdl.description import Call, Lambda
from shardplan.tdl.language import Named, Opaque, Scalar, TensorRef

_JAX = "jax/experimental/pallas/ops/gpu/attention.py"
_TOKAMAX = "tokamax/_src/ops/attention/pallas_triton"
_ALL = slice(None)


def pairs(queries: int, keys: int, *, causal: bool, window: int | None = None) -> int:
    """The number of (query, key) pairs whose scores a kernel computes, in one head of one example.

    All pairs count; if ``causal``, only pairs whose key is not ahead of the query (about half). With a ``window``, each query
    has at most that many keys, the last ones.

    >>> pairs(4, 4, causal=True), pairs(4, 2, causal=True), pairs(4, 4, causal=False), pairs(4, 4, causal=True, window=2)
    (10, 7, 16, 7)
    """
    if not causal:
        return queries * keys
    return sum(max(0, min(i + 1, keys) - max(0, i + 1 - (window or keys + queries))) for i in range(queries))


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A kernel by its file. ``first`` is the argument that holds its queries; keys and values follow.

    For each pair of a query and a key, it computes ``by_head`` matrix products over a head of queries and keys, and ``by_value``
    over a head of values.
    """

    source: str
    first: int
    by_head: int
    by_value: int

    @property
    def arguments(self) -> tuple[str, str, str]:
        """The names of queries, keys and values in a grid. An operand that is quantized has other names."""
        return f"args[{self.first}]", f"args[{self.first + 1}]", f"args[{self.first + 2}]"

    def flops(self, call: Call, grid: KernelGrid) -> float:
        """The flops of the matrix products in the whole call."""
        if not self.by_head:
            return 0.0
        queries, keys, values = (call.operands[grid.names.index(name)] for name in self.arguments)
        *batch, length, heads, _ = call.results[0]
        products = self.by_head * queries[-1] + self.by_value * values[-1]
        return 2 * math.prod(batch) * heads * pairs(length, keys[-3], causal=grid.skips) * products


_FORWARD, _BACKWARD = (1, 1), (4, 3)
"""Products over (head, value). Backward they are seven, not five: scores and their gradients are computed once for queries, once
for keys."""
_KERNELS: Mapping[str, _Kernel] = {
    "pallas_call:mha_forward": _Kernel(_JAX, 0, *_FORWARD),
    "pallas_call:mha_preprocess_backward": _Kernel(_JAX, 0, 0, 0),
    "pallas_call:mha_backward": _Kernel(_JAX, 0, *_BACKWARD),
    "pallas_call:pallas_flash_attention": _Kernel(f"{_TOKAMAX}.py", 2, *_FORWARD),
    "pallas_call:pallas_flash_attention_fwd_res": _Kernel(f"{_TOKAMAX}.py", 2, *_FORWARD),
    "pallas_call:pallas_flash_attention_vjp": _Kernel(f"{_TOKAMAX}_vjp.py", 0, *_BACKWARD),
}


def _is_known(call: Call) -> bool:
    """Whether this is the kernel in JAX's or tokamax's own file on plain operands, and not another kernel of the same name."""
    grid, kernel = call.params.get("kernel_grid"), _KERNELS[call.primitive]
    if not isinstance(grid, KernelGrid) or not grid.source.endswith(kernel.source):
        return False
    return not kernel.by_head or set(kernel.arguments) <= set(grid.names)


@rule(*_KERNELS, only=_is_known)
def _attention_kernel(call: Call, *operands: TensorRef) -> tuple[Lambda, ...]:
    """The kernel's results: opaque, except for the grid dims along which the kernel may be cut."""
    grid: KernelGrid = call.params["kernel_grid"]
    free = _free_dims(call, grid)
    flops = _KERNELS[call.primitive].flops(call, grid)

    def result(number: int) -> Lambda:
        """One result: loops over its dims, named alike in all results where the kernel may be cut."""
        own = grid.blocks[len(operands) + number]
        names = tuple(f"g{b.dim}" if b.dim in free else f"r{number}_{d}" for d, b in enumerate(own))

        def element(*i: Any) -> Scalar:
            """One element of the result, from the blocks that its program reads."""
            at = {b.dim: i[d] for d, b in enumerate(own) if b.dim in free}
            reads = [x for n, ref in enumerate(operands) for x in _reads(ref, grid.blocks[n], at)]
            return Opaque(0.0 if number else flops, attention=True)(*reads)[
                tuple(i[d] for d, b in enumerate(own) if b.dim not in free)
            ]

        return Named(names, element)

    return tuple(result(n) for n in range(len(call.results)))


def _free_dims(call: Call, grid: KernelGrid) -> frozenset[int]:
    """The grid dims along which the kernel may be cut: they count equal blocks of each result, and the body reads no index.

    Several programs may share a block only if it is a block of an operand and has one element.
    """
    shapes = (*call.operands, *call.results)
    counted: dict[int, set[tuple[int, int]]] = {}
    for shape, own in zip(shapes, grid.blocks, strict=True):
        for extent, block in zip(shape, own, strict=True):
            counted.setdefault(block.dim, set()).add((block.programs(extent), block.size))
    results = grid.blocks[len(call.operands) :]
    whole = {-1, *grid.fixed, *(b.dim for own in grid.blocks for b in own if b.per > 1 and b.size > 1)}
    alike = {g for g, found in counted.items() if len(found) == 1 and g not in whole}
    return frozenset(g for g in alike if all([b.dim for b in own if b.per == 1].count(g) == 1 for own in results))


def _reads(x: TensorRef, own: tuple[GridBlock, ...], at: Mapping[int, Any]) -> list[Scalar]:
    """The accesses of a program to an operand. A second one, to the block's start, makes cuts inside a block illegal."""
    reads: list[Scalar] = [x[tuple(at[b.dim] // b.per if b.dim in at else _ALL for b in own)]]
    if any(b.dim in at and b.size > 1 for b in own):
        reads.append(x[tuple(at[b.dim] // b.size * b.size // b.per if b.dim in at else _ALL for b in own)])
    return reads
