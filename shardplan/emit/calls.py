"""Calls that XLA cannot partition (kernels, and functions with a description of the user's own): each device runs its share.

The share is the one of which the description was proven: `shardplan.tdl.localize` says what a worker runs, halos come from the
neighbours, and what is partial is reduced at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from shardplan.errors import DescriptionError
from shardplan.ir import Partial, Reducer, Split
from shardplan.tdl import Call, Description, Strategy, cut, describe
from shardplan.tdl.localize import edge_value, evaluate, localize

Reduce = Callable[[Any, Any, Reducer, tuple[str, ...]], Any]


@dataclass(frozen=True, slots=True)
class _Cut:
    """One loop cut over some mesh axes, major first."""

    loop: int
    axes: tuple[str, ...]
    strategy: Strategy


def share(
    description: Description, loops: Sequence[int], mesh: Mesh, reduce: Reduce, *, primitive: Any = None
) -> Callable[..., tuple[Any, ...]] | None:
    """The function of whole operands that runs the call cut as ``loops`` says (one for each mesh axis, -1 for none).

    ``primitive`` is the program's own, which JAX need not know by its name.

    None where nothing is cut, or where a loop does not divide: then the call runs whole.
    """
    made = _cuts(description, loops, mesh)
    if not made:
        return None
    call = description.call

    def local(*operands: Any) -> tuple[Any, ...]:
        """The call on a device's share; its results must have the shapes that were promised."""
        results = _run(call, made, operands, primitive)
        small = [tuple(s) for s in _local_shapes(call, made)]
        got = [x.shape for x in results[: len(small)]]
        if got != small:
            raise DescriptionError(
                f"{call.primitive} on a block gives results of {got}, described are {small}; mend it or its run="
            )
        return tuple(_reduced(results, r, made, reduce) for r in range(len(small)))

    ins = tuple(_spec(len(s), [(c.strategy.operands[i], c.axes) for c in made]) for i, s in enumerate(call.operands))
    outs = tuple(_spec(len(s), [(c.strategy.results[r], c.axes) for c in made]) for r, s in enumerate(call.results))
    return jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)


def reduced(x: Any, extreme: Any, reducer: Reducer, axes: tuple[str, ...]) -> Any:
    """The reduction of what each device along ``axes`` holds; of places, with the ``extreme`` that each found."""
    match reducer:
        case "argmax" | "argmin":
            return _first_place(x, extreme, reducer, axes)
        case "sum":
            return lax.psum(x, axes)
        case "max" | "or":
            return lax.pmax(x.astype("int8"), axes).astype(bool) if x.dtype == bool else lax.pmax(x, axes)
        case "min" | "and":
            return lax.pmin(x.astype("int8"), axes).astype(bool) if x.dtype == bool else lax.pmin(x, axes)
        case "prod":
            return jnp.prod(lax.all_gather(x, axes), axis=0, dtype=x.dtype)


def _first_place(place: Any, extreme: Any, reducer: Reducer, axes: tuple[str, ...]) -> Any:
    """The smallest place of the extreme over all devices; that of a NaN comes before any other."""
    best, beyond = (lax.pmax, -jnp.inf) if reducer == "argmax" else (lax.pmin, jnp.inf)
    value, lost = extreme, jnp.zeros(extreme.shape, bool)
    if jnp.issubdtype(extreme.dtype, jnp.floating):
        lost = jnp.isnan(extreme)
        value = jnp.where(lost, jnp.asarray(beyond, extreme.dtype), extreme)
    elif extreme.dtype == bool:
        value = extreme.astype(jnp.int8)
    last = jnp.iinfo(jnp.int32).max
    ranked = jnp.where(value == best(value, axes), place.astype(jnp.int32), last)
    first = lax.pmin(jnp.where(lost, place.astype(jnp.int32) - last, ranked), axes)
    return jnp.where(first < 0, first + last, first).astype(place.dtype)


def _cuts(description: Description, loops: Sequence[int], mesh: Mesh) -> tuple[_Cut, ...]:
    found: list[_Cut] = []
    for v in sorted(set(loops) - {-1}):
        axes = tuple(name for name, at in zip(mesh.axis_names, loops, strict=True) if at == v)
        ways = 1
        for name in axes:
            ways *= mesh.shape[name]
        strategy = cut(description, v, ways)
        if strategy is None:
            return ()
        found.append(_Cut(v, axes, strategy))
    return tuple(found)


def _run(call: Call, made: Sequence[_Cut], operands: Sequence[Any], primitive: Any) -> tuple[Any, ...]:
    """A device's results from its blocks: the outermost cut, and within what it leaves the others."""
    if not made:
        return evaluate(call, operands, primitive=primitive)
    (first, *rest) = made
    description = describe(call)
    assert description is not None
    strategy = cut(description, first.loop, first.strategy.ways)
    assert strategy is not None, "a dim that was cut along another loop divides no more"
    share = localize(call, strategy)
    worker = lax.axis_index(first.axes)
    edges = [None if e == "zero" else edge_value(e, x.dtype, operands) for e, x in zip(share.edges, operands, strict=False)]
    given = [_given(x, p, first, worker, e) for x, p, e in zip(operands, strategy.operands, edges, strict=True)]
    return share.run(lambda ops: _run(share.call, rest, ops, primitive), given, worker)


def _given(x: Any, placement: Any, made: _Cut, worker: Any, edge: Any) -> Any:
    match placement:
        case Split(dim, (lo, hi)) if lo or hi:
            return _with_halo(x, dim, lo, hi, made, worker, edge)
        case Partial():
            return jnp.where(worker == 0, x, jnp.zeros((), x.dtype))
        case _:
            return x


def _with_halo(x: Any, dim: int, lo: int, hi: int, made: _Cut, worker: Any, edge: Any) -> Any:
    """The block with the neighbours' edges; beyond the ends zeros (as nobody sends any), or the value ``edge``."""
    ways = made.strategy.ways

    def ended(halo: Any, last: int) -> Any:
        return halo if edge is None else jnp.where(worker == last, edge, halo)

    size = x.shape[dim]
    parts = [x]
    if lo:
        last = lax.slice_in_dim(x, size - lo, size, axis=dim)
        parts.insert(0, ended(lax.ppermute(last, made.axes, [(w, w + 1) for w in range(ways - 1)]), 0))
    if hi:
        first = lax.slice_in_dim(x, 0, hi, axis=dim)
        parts.append(ended(lax.ppermute(first, made.axes, [(w + 1, w) for w in range(ways - 1)]), ways - 1))
    return jnp.concatenate(parts, dim)


def _reduced(results: Sequence[Any], result: int, made: Sequence[_Cut], reduce: Reduce) -> Any:
    x, extreme = results[result], results[-1]  # a reduction of pairs gives the extremes as one result more
    for c in made:
        match c.strategy.results[result]:
            case Partial(reducer):
                x = reduce(x, extreme, reducer, c.axes)
            case _:
                pass
    return x


def _local_shapes(call: Call, made: Sequence[_Cut]) -> list[tuple[int, ...]]:
    shapes = [list(s) for s in call.results]
    for c in made:
        for r, place in enumerate(c.strategy.results):
            if isinstance(place, Split):
                shapes[r][place.dim] //= c.strategy.ways
    return [tuple(s) for s in shapes]


def _spec(rank: int, places: Sequence[tuple[Any, tuple[str, ...]]]) -> PartitionSpec:
    entries: list[Any] = [None] * rank
    for place, axes in places:
        if isinstance(place, Split):
            entries[place.dim] = axes
    return PartitionSpec(*entries)
