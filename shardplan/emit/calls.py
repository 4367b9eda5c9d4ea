"""Ops that each device runs on its own share: those that XLA's partitioner gets wrong or cannot cut, and those whose partial sums
stay apart.

`shardplan.tdl.localize` says what a device runs. Halos come from the neighbours. Partial results are reduced here, except over
the axes that are kept.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from shardplan.emit.extremes import as_floats, as_integers
from shardplan.emit.stacked import partition_spec
from shardplan.errors import DescriptionError
from shardplan.ir import Layout, Partial, Reducer, Split
from shardplan.tdl import Call, Description, Strategy, cut, describe
from shardplan.tdl.localize import edge_value, evaluate, localize
from shardplan.tdl.rewrite import cuttable, in_row_major_order

Pairs = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Exchanges:
    """How devices talk: ``reduce`` is `reduced` and ``permute`` is `lax.ppermute`, or what stands in their place."""

    reduce: Callable[[Any, Any, Reducer, tuple[str, ...], int | None], Any]
    permute: Callable[[Any, tuple[str, ...], Pairs], Any]


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum of terms over some axes: an all-reduce, or a reduce-scatter over a dim of the result."""

    over: tuple[int, ...]
    dim: int | None


@dataclass(frozen=True, slots=True)
class Share:
    """How an op is run on shares.

    ``loops[f]`` is the loop that axis f cuts (-1: none; below -1: the axis hands terms on). ``needs`` are the operands' layouts
    (None: as the cuts say), ``kept[r]`` the axes over which the terms of result r stay apart, ``sums[r]`` the planned sums over
    the others (none: all-reduces), ``left[r]`` the dims of its layout after these.
    """

    loops: tuple[int, ...]
    needs: tuple[Layout | None, ...]
    kept: tuple[tuple[int, ...], ...]
    sums: tuple[tuple[Sum, ...], ...]
    left: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class _Cut:
    """One loop cut over some mesh axes, major first. ``terms`` are the operands of which each device holds its own term."""

    loop: int
    axes: tuple[str, ...]
    strategy: Strategy
    terms: frozenset[int]


def divides(description: Description, share: Share, sizes: Sequence[int]) -> bool:
    """Whether every loop that is cut divides, so that the call can be made on shares."""
    ways: dict[int, int] = {}
    for loop, size in zip(share.loops, sizes, strict=True):
        if loop >= 0:
            ways[loop] = ways.get(loop, 1) * size
    return all(description.loops[v].extent % k == 0 for v, k in ways.items())


def on_shares(
    description: Description, share: Share, mesh: Mesh, exchanges: Exchanges, *, primitive: Any = None
) -> Callable[..., tuple[Any, ...]]:
    """The function of whole operands that makes the call on each device's share; it `divides`.

    An operand that is partial, and a result whose terms are kept, has a leading dim for each of these axes (`emit.stacked`).
    ``primitive`` is the program's own, which JAX need not know by its name.
    """
    names = mesh.axis_names
    made = _cuts(description, share, mesh)
    call = description.call
    handed = tuple(name for name, at in zip(names, share.loops, strict=True) if at < -1)
    leading = tuple(0 if need is None else len(need.partial) for need in share.needs)
    small = [tuple(s) for s in _local_shapes(call, made)]

    def local(*operands: Any) -> tuple[Any, ...]:
        """The call on a device's share; its results must have the shapes that were promised."""
        own = [lax.squeeze(x, range(n)) if n else x for x, n in zip(operands, leading, strict=True)]
        results = _run(call, made, own, exchanges, primitive)
        got = [x.shape for x in results[: len(small)]]
        if got != small:
            raise DescriptionError(
                f"{call.primitive} on a block gives results of {got}, described are {small}; mend it or its run="
            )
        return tuple(_left(results, r, made, handed, exchanges, share, names) for r in range(len(small)))

    ins = tuple(
        _spec(len(s), [(c.strategy.operands[i], c.axes) for c in made]) if need is None else partition_spec(need, names)
        for i, (s, need) in enumerate(zip(call.operands, share.needs, strict=True))
    )
    outs = tuple(partition_spec(Layout(at.dims, kept), names) for at, kept in zip(share.left, share.kept, strict=True))
    return jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)


def reduced(x: Any, extreme: Any, reducer: Reducer, axes: tuple[str, ...], dim: int | None = None) -> Any:
    """The reduction of what each device along ``axes`` holds; of places, with the ``extreme`` that each found.

    With ``dim`` each device gets its block of that dim of a sum.
    """
    match reducer:
        case "sum" if dim is not None:
            return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
        case "argmax" | "argmin":
            return _first_place(x, extreme, reducer, axes)
        case "sum":
            return lax.psum(x, axes)
        case "max" | "or" if x.dtype == bool:
            return lax.pmax(x.astype("int8"), axes).astype(bool)
        case "min" | "and" if x.dtype == bool:
            return lax.pmin(x.astype("int8"), axes).astype(bool)
        case "max" | "min" if jnp.issubdtype(x.dtype, jnp.floating):
            best = lax.pmax if reducer == "max" else lax.pmin
            return as_floats(best(as_integers(x, reducer), axes), x.dtype)
        case "max":
            return lax.pmax(x, axes)
        case "min":
            return lax.pmin(x, axes)
        case "and" | "or":
            combine = jnp.bitwise_and if reducer == "and" else jnp.bitwise_or
            return functools.reduce(combine, lax.all_gather(x, axes))
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


def _cuts(description: Description, share: Share, mesh: Mesh) -> tuple[_Cut, ...]:
    """The cuts, the last loop's first: a loop of which one element is left may be gone from what is left to cut."""
    found: list[_Cut] = []
    for v in sorted({v for v in share.loops if v >= 0}, reverse=True):
        over = tuple(f for f, at in enumerate(share.loops) if at == v)
        axes = tuple(mesh.axis_names[f] for f in over)
        strategy = cut(description, v, math.prod(mesh.shape[name] for name in axes))
        assert strategy is not None, "only what divides is cut"
        terms = frozenset(i for i, need in enumerate(share.needs) if need is not None and not {*over}.isdisjoint(need.partial))
        found.append(_Cut(v, axes, strategy, terms))
    return tuple(found)


def _run(call: Call, made: Sequence[_Cut], operands: Sequence[Any], exchanges: Exchanges, primitive: Any) -> tuple[Any, ...]:
    """A device's results from its blocks: the outermost cut, and within what it leaves the others."""
    if not made:
        results = evaluate(call, cuttable(call.primitive, operands, call.params), primitive=primitive)
        return tuple(in_row_major_order(call.primitive, results))
    (first, *rest) = made
    description = describe(call)
    assert description is not None
    strategy = cut(description, first.loop, first.strategy.ways)
    assert strategy is not None, "a dim that was cut along another loop divides no more"
    share = localize(call, strategy)
    worker = lax.axis_index(first.axes)
    edges = [None if e == "zero" else edge_value(e, x.dtype, operands) for e, x in zip(share.edges, operands, strict=False)]
    given = [
        _given(x, p, first, worker, e, exchanges, own=i in first.terms)
        for i, (x, p, e) in enumerate(zip(operands, strategy.operands, edges, strict=True))
    ]
    return share.run(lambda ops: _run(share.call, rest, ops, exchanges, primitive), given, worker)


def _given(x: Any, placement: Any, made: _Cut, worker: Any, edge: Any, exchanges: Exchanges, *, own: bool) -> Any:
    match placement:
        case Split(dim, (lo, hi)) if lo or hi:
            return _with_halo(x, dim, lo, hi, made, worker, edge, exchanges)
        case Partial() if not own:
            return jnp.where(worker == 0, x, jnp.zeros((), x.dtype))
        case _:
            return x


def _with_halo(x: Any, dim: int, lo: int, hi: int, made: _Cut, worker: Any, edge: Any, exchanges: Exchanges) -> Any:
    """The block with the neighbours' edges; beyond the ends zeros (as nobody sends any), or the value ``edge``."""
    ways = made.strategy.ways

    def ended(halo: Any, last: int) -> Any:
        return halo if edge is None else jnp.where(worker == last, edge, halo)

    size = x.shape[dim]
    parts = [x]
    if lo:
        last = lax.slice_in_dim(x, size - lo, size, axis=dim)
        parts.insert(0, ended(exchanges.permute(last, made.axes, [(w, w + 1) for w in range(ways - 1)]), 0))
    if hi:
        first = lax.slice_in_dim(x, 0, hi, axis=dim)
        parts.append(ended(exchanges.permute(first, made.axes, [(w + 1, w) for w in range(ways - 1)]), ways - 1))
    return jnp.concatenate(parts, dim)


def _left(
    results: Sequence[Any],
    result: int,
    made: Sequence[_Cut],
    handed: tuple[str, ...],
    exchanges: Exchanges,
    share: Share,
    names: Sequence[str],
) -> Any:
    """A result reduced as planned over all axes but those that are kept, for each of which it gets a leading dim."""
    x, extreme = results[result], results[-1]  # a reduction of pairs gives the extremes as one result more
    kept = [names[f] for f in share.kept[result]]
    for planned in share.sums[result]:
        x = exchanges.reduce(x, extreme, "sum", tuple(names[f] for f in planned.over), planned.dim)
    if not share.sums[result]:
        places = [(c.strategy.results[result], c.axes) for c in made]
        terms: list[tuple[Reducer, tuple[str, ...]]] = [(p.reducer, axes) for p, axes in places if isinstance(p, Partial)]
        for reducer, axes in [*terms, ("sum", handed)]:
            gone = tuple(name for name in axes if name not in kept)
            x = exchanges.reduce(x, extreme, reducer, gone, None) if gone else x
    return lax.expand_dims(x, range(len(kept)))


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
