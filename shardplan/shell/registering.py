# pyright: basic
"""`register`: a user's own descriptions, written in TDL or derived from a plain function that computes the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from shardplan import tdl
from shardplan.cost import compute
from shardplan.errors import DescriptionError
from shardplan.frontend.trace import trace
from shardplan.graph import Node, flatten
from shardplan.graph.function_cuts import FunctionCut, dependencies, function_cuts
from shardplan.tdl import register as by_description
from shardplan.tdl.cut_proof import draw_array, same_everywhere
from shardplan.tdl.language import Named, TensorRef

Function = Callable[..., Any]

_FAR = 0.02
"""The part of the largest element by which a kernel may differ from the function that it is like: each product of a bfloat16
kernel rounds by up to 2**-8, and kernels hold several; another function differs by far more.
"""


def register(
    target: Any, *, example: Sequence[Any] | None = None, run: Function | None = None, like: Function | None = None
) -> Any:
    """Registers how a kernel can be cut: a decorator of a TDL description (`shardplan.tdl.register.register`), or, with ``like``,
    at once.

    ``like(*args)`` is a plain function that computes what the kernel does. Its ops say which dims may be split, for each shape
    that is met: a dim that every op treats alike on each share can be cut, and a dim that is summed over gives terms of a sum.
    ``like`` and the kernel are compared on ``example``, which must be given, and every cut is run there on the kernel itself.

    ``target``, ``example`` and ``run`` are those of `shardplan.tdl.register.register`.

    Raises:
        DescriptionError: if the kernel computes something else than ``like``, if nothing can be cut, or where a cut fails.
    """
    if like is None:
        return by_description.register(target, example=example, run=run)
    if not callable(like):
        raise DescriptionError("like= takes a function of the kernel's arguments", expression=f"like={like!r}")
    if not isinstance(example, list | tuple):
        raise DescriptionError(
            "like= needs an example: a list of the kernel's arguments, arrays or jax.ShapeDtypeStruct", expression="example="
        )
    _compare(target if run is None else run, like, example)
    by_description.register(target, example=example, run=run)(described_like(like, example))
    return None


def described_like(like: Function, example: Sequence[Any]) -> Function:
    """The description of a function, as TDL: for operands of any shapes that it takes, with the tree of ``example``."""
    leaves, tree = jax.tree.flatten(tuple(example))

    def described(*operands: TensorRef) -> tuple[Function, ...]:
        shapes = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in operands]
        graph = flatten(trace(like, *jax.tree.unflatten(tree, shapes)).program)
        loops = function_cuts(graph, same_everywhere)
        flops = sum(_product_flops(node) for node in graph.nodes)
        read = dependencies(graph)
        ranks = [len(graph.tensors[t].shape) for t in graph.outputs]
        return tuple(_result(operands, loops, r, rank, read[r], flops) for r, rank in enumerate(ranks))

    names = [inspect.Parameter(f"operand{n}", inspect.Parameter.POSITIONAL_ONLY) for n in range(len(leaves))]
    described.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    return described


def _product_flops(node: Node) -> float:
    """The flops of a matrix product; zero for all other ops."""
    description = node.signature.description
    return node.weight * compute.flops(description) if description is not None and node.signature.contracts else 0.0


def _result(
    operands: Sequence[TensorRef], loops: Sequence[FunctionCut], result: int, rank: int, read: frozenset[int], flops: float
) -> Function:
    """The lambda of one result: an opaque function of the arguments that it reads, under the sums of which it is a term."""
    dims = {loop.results[result]: n for n, loop in enumerate(loops) if isinstance(loop.results[result], int)}
    names = [f"loop{dims[d]}" if d in dims else f"whole{result}_{d}" for d in range(rank)]
    sums = [n for n, loop in enumerate(loops) if loop.results[result] == "sum"]

    def element(*indices: Any) -> Any:
        at = {dims[d]: index for d, index in enumerate(indices) if d in dims}
        hidden = tuple(index for d, index in enumerate(indices) if d not in dims)
        return _summed(operands, loops, sums, at, hidden, (result, read, flops if result == 0 else 0.0))

    return Named(tuple(names), element)


def _summed(
    operands: Sequence[TensorRef],
    loops: Sequence[FunctionCut],
    sums: Sequence[int],
    at: dict[int, Any],
    hidden: tuple[Any, ...],
    of: tuple[int, frozenset[int], float],
) -> Any:
    """The element at these loops, with the outermost of ``sums`` that are left."""
    if sums:
        first, *rest = sums
        body = Named((f"loop{first}",), lambda index: _summed(operands, loops, rest, {**at, first: index}, hidden, of))
        return tdl.Sum(body, extents=(loops[first].extent,), shared=True)
    _, read, flops = of
    value = tdl.Opaque(flops)(*_slices(operands, loops, read, at))
    return value[hidden] if hidden else value


def _slices(
    operands: Sequence[TensorRef], loops: Sequence[FunctionCut], read: frozenset[int], at: dict[int, Any]
) -> Iterator[Any]:
    """What one element reads of each argument: its own part along the loops, all else whole."""
    for i in sorted(read):
        place = {loop.arguments[i]: at[n] for n, loop in enumerate(loops) if loop.arguments[i] is not None and n in at}
        yield operands[i][tuple(place.get(d, slice(None)) for d in range(len(operands[i].shape)))]


def _compare(kernel: Any, like: Function, example: Sequence[Any]) -> None:
    """Checks that a kernel computes what its plain function does, where it can be called.

    Raises:
        DescriptionError: if the results differ in number, shape, dtype or value.
    """
    if not callable(kernel):
        return  # a name alone: the proof needs run= too, and says so
    rng = np.random.default_rng(0)
    drawn = jax.tree.map(
        lambda x: draw_array(tuple(x.shape), str(x.dtype), rng) if isinstance(x, jax.ShapeDtypeStruct) else x, tuple(example)
    )
    own, plain = (jax.tree.leaves(f(*drawn)) for f in (kernel, like))
    if [(x.shape, x.dtype) for x in own] != [(x.shape, x.dtype) for x in plain]:
        shown = [", ".join(f"{x.dtype}{list(x.shape)}" for x in some) for some in (own, plain)]
        raise DescriptionError(f"the kernel returns {shown[0]}, the function that it is like {shown[1]}", expression="like=")
    for n, (a, b) in enumerate(zip(own, plain, strict=True)):
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        far = float(np.max(np.abs(a - b), initial=0.0))
        if not far <= _FAR * float(np.max(np.abs(b), initial=0.0)):
            raise DescriptionError(
                f"the kernel and the function that it is like differ in result {n} by {far:g}", expression="like="
            )
