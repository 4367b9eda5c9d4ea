# pyright: basic
"""`register`: a user's own descriptions, written in TDL or derived from a plain function that computes the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardplan import tdl
from shardplan.cost import compute
from shardplan.errors import DescriptionError, ShardplanError
from shardplan.frontend.trace import trace
from shardplan.graph import Graph, Node, flatten
from shardplan.graph.function_cuts import FunctionCut, dependencies, function_cuts
from shardplan.ir import Program
from shardplan.plans.canonical import Tokens
from shardplan.tdl import register as by_description
from shardplan.tdl.cut_proof import difference, draw_array, same_everywhere, tolerance_of
from shardplan.tdl.language import Named, TensorRef
from shardplan.user_code import users_code

Function = Callable[..., Any]

_ROUNDED = 0.5
"""The difference allowed between a kernel and its ``like`` function, as a part of what a proof of cuts allows: that one adds
results on terms 2x and -x, which round as much as two and one results on x, and compares their sum with a fourth; here one
result is compared with one.
"""


def register(
    target: Any, *, example: Sequence[Any] | None = None, run: Function | None = None, like: Function | None = None
) -> Any:
    """Registers how a kernel can be cut: at once with ``like``, else as a decorator of a TDL description
    (`shardplan.tdl.register.register`).

    ``like(*args)`` is a plain function that computes what the kernel does. Its ops say which dims can be cut, for each shape
    that occurs: a dim that every op treats alike on each share can be cut, and a dim that is summed over gives partial sums.
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
    _compare(target, run, like, example)
    by_description.register(target, example=example, run=run)(described_like(like, example))
    return None


def described_like(like: Function, example: Sequence[Any]) -> Function:
    """The TDL description of a function, for operands of any shapes that it takes, in the tree of ``example``."""
    leaves, tree = jax.tree.flatten(tuple(example))
    known: dict[tuple[jax.ShapeDtypeStruct, ...], tuple[Graph, tuple[FunctionCut, ...]]] = {}

    def described(*operands: TensorRef) -> tuple[Function, ...]:
        """The lambdas of all results."""
        shapes = tuple(jax.ShapeDtypeStruct(o.shape, o.dtype) for o in operands)
        if shapes not in known:
            known[shapes] = _cuts_of(like, tree, shapes)
        graph, loops = known[shapes]
        flops = sum(_product_flops(node) for node in graph.nodes)
        read = dependencies(graph)
        ranks = [len(graph.tensors[t].shape) for t in graph.outputs]
        return tuple(_result(operands, loops, r, rank, read[r], flops) for r, rank in enumerate(ranks))

    names = [inspect.Parameter(f"operand{n}", inspect.Parameter.POSITIONAL_ONLY) for n in range(len(leaves))]
    described.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    return described


def _cuts_of(like: Function, tree: Any, shapes: Sequence[jax.ShapeDtypeStruct]) -> tuple[Graph, tuple[FunctionCut, ...]]:
    """A function's graph for these shapes, and its cuts."""
    program = trace(like, *jax.tree.unflatten(tree, shapes)).program
    arrays = _closed_over(program)

    def again(own: Sequence[tuple[int, ...]]) -> Graph | None:
        """The function's graph for other shapes; None where it fails or closes over other arrays."""
        local = [jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(own, shapes, strict=True)]
        try:
            share = trace(like, *jax.tree.unflatten(tree, local)).program
            return flatten(share) if _closed_over(share) == arrays else None
        except ShardplanError:
            return None

    graph = flatten(program)
    return graph, function_cuts(graph, same_everywhere, again)


def _closed_over(program: Program) -> list[str]:
    """Tokens of the arrays that a program and its bodies close over."""
    tokens = Tokens()
    own = [tokens.of(value) for _, value in program.constants]
    return own + [token for op in program.ops for body in op.bodies for token in _closed_over(body)]


def _product_flops(node: Node) -> float:
    """The flops of a matrix product; zero for all other ops."""
    description = node.signature.description
    return node.weight * compute.flops(description) if description is not None and node.signature.contracts else 0.0


def _result(
    operands: Sequence[TensorRef], loops: Sequence[FunctionCut], result: int, rank: int, read: frozenset[int], flops: float
) -> Function:
    """The lambda of one result: an opaque function of the arguments that it reads, inside the sums that add up to it."""
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
    """The element at these loop indices, inside the remaining ``sums``, outermost first."""
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
    """The slice of each argument that one element reads: one index along the loops, all other dims whole."""
    for i in sorted(read):
        place = {loop.arguments[i]: at[n] for n, loop in enumerate(loops) if loop.arguments[i] is not None and n in at}
        yield operands[i][tuple(place.get(d, slice(None)) for d in range(len(operands[i].shape)))]


def _compare(target: Any, run: Function | None, like: Function, example: Sequence[Any]) -> None:
    """Checks that a kernel computes what its plain function does, where it can be called.

    Raises:
        DescriptionError: if one of them fails, or the results differ in number, shape, dtype or value.
    """
    name, own = by_description.target_of(target)
    kernel = own or run
    if kernel is None:
        return  # a name alone: the proof needs run= too, and says so
    rng = np.random.default_rng(0)
    shapes = jax.tree.leaves(tuple(example))
    leaves = [draw_array(tuple(x.shape), str(x.dtype), rng) if isinstance(x, jax.ShapeDtypeStruct) else x for x in shapes]
    drawn = jax.tree.unflatten(jax.tree.structure(tuple(example)), leaves)
    found, wanted = _called(name, kernel, drawn), _called("like=", like, drawn)
    if len(found) != len(wanted):
        raise DescriptionError(f"{name} has {len(found)} results, like= has {len(wanted)}", expression=_like_text(like))
    rounded = _ROUNDED * tolerance_of(_dtypes(trace(like, *drawn).program))
    for n, (a, b) in enumerate(zip(found, wanted, strict=True)):
        most = _largest(b)
        how = difference(a, b, rounded * most / (1.0 + most), most)
        if how:
            limit = f" (at most {rounded * most:.3g} apart is rounding)" if rounded * most else ""
            raise DescriptionError(
                f"result {n} of {name} {how}: like= computes something else{limit}", expression=_like_text(like)
            )


def _dtypes(program: Program) -> Iterator[str]:
    """The dtypes of a program's tensors, those of its bodies too."""
    yield from (tensor.dtype for tensor in program.tensors)
    for op in program.ops:
        for body in op.bodies:
            yield from _dtypes(body)


def _called(name: str, function: Function, args: Sequence[Any]) -> list[Any]:
    """The results of a user's function, flat."""

    def told(error: BaseException) -> DescriptionError:
        text = (str(error).splitlines() or ["no message"])[0]
        return DescriptionError(f"{name} fails on the example: {type(error).__name__}", expression=text)

    with users_code(told):
        return [x if hasattr(x, "dtype") else np.asarray(x) for x in jax.tree.leaves(function(*args))]


def _like_text(like: Function) -> str:
    """The plain function, for errors."""
    return f"like={getattr(like, '__name__', like)!s}"


def _largest(x: Any) -> float:
    """The largest finite magnitude in an array; zero for a dtype that does not round."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return 0.0
    sizes = np.abs(np.asarray(x).astype(np.complex128))
    return float(sizes[np.isfinite(sizes)].max(initial=0.0))
