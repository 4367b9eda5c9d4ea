"""Ops that each device runs on its own share: ops that XLA's partitioner gets wrong or cannot cut, and ops whose partial sums
stay apart.

`shardplan.tdl.localize` gives the op that a device runs. Halos come from the neighbours. Partial results are reduced here,
except over the axes along which terms are kept.
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
    """How devices communicate: ``reduce`` is `reduced` and ``permute`` is `lax.ppermute`, or replacements for them."""

    reduce: Callable[[Any, Any, Reducer, tuple[str, ...], int | None], Any]
    permute: Callable[[Any, tuple[str, ...], Pairs], Any]


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum of terms over some axes: an all-reduce, or a reduce-scatter over a dim of the result."""

    over: tuple[int, ...]
    dim: int | None


@dataclass(frozen=True, slots=True)
class Share:
    """How an op runs on shares.

    ``loops[f]`` is the loop that axis f cuts (-1: none; below -1: the op passes on terms over the axis). ``needs`` are the
    operands' layouts (None: the layout that the cuts imply). ``kept[r]`` are the axes over which the terms of result r stay
    apart, and ``sums[r]`` the planned sums over the other axes (none: all-reduces). ``left[r]`` is its layout after these sums,
    of which only the dims count.
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
    """Whether every cut loop divides evenly, so that the call can run on shares."""
    ways: dict[int, int] = {}
    for loop, size in zip(share.loops, sizes, strict=True):
        if loop >= 0:
            ways[loop] = ways.get(loop, 1) * size
    return all(description.loops[v].extent % k == 0 for v, k in ways.items())


def on_shares(
    description: Description, share: Share, mesh: Mesh, exchanges: Exchanges, *, primitive: Any = None
) -> Callable[..., tuple[Any, ...]]:
    """A function of whole operands that runs the call on each device's share; the cuts must divide (`divides`).

    A partial operand, and a result whose terms are kept, has a leading dim for each axis of its terms (`emit.stacked`).
    ``primitive`` is the program's own primitive, which JAX need not know by name.
    """
    names = mesh.axis_names
    split = _cuts(description, share, mesh)
    call = description.call
    term_axes = tuple(name for name, at in zip(names, share.loops, strict=True) if at < -1)
    leading = tuple(0 if need is None else len(need.partial) for need in share.needs)
    expected = [tuple(s) for s in _local_shapes(call, split)]

    def local(*operands: Any) -> tuple[Any, ...]:
        """The call on a device's share. Raises `DescriptionError` if its results have other shapes than described."""
        own = [lax.squeeze(x, range(n)) if n else x for x, n in zip(operands, leading, strict=True)]
        results = _run(call, split, own, exchanges, primitive)
        actual = [x.shape for x in results[: len(expected)]]
        if actual != expected:
            raise DescriptionError(
                f"{call.primitive} on a block gives results of shapes {actual}, not {expected} as described: "
                "correct the description or its run="
            )
        return tuple(_reduced_result(results, r, split, term_axes, exchanges, share, names) for r in range(len(expected)))

    ins = tuple(
        _spec(len(s), [(c.strategy.operands[i], c.axes) for c in split]) if need is None else partition_spec(need, names)
        for i, (s, need) in enumerate(zip(call.operands, share.needs, strict=True))
    )
    outs = tuple(partition_spec(Layout(at.dims, kept), names) for at, kept in zip(share.left, share.kept, strict=True))
    return jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)


def reduced(x: Any, extreme: Any, reducer: Reducer, axes: tuple[str, ...], dim: int | None = None) -> Any:
    """The values of all devices along ``axes``, reduced.

    For argmax and argmin ``x`` holds places, and ``extreme`` the values at these places. With ``dim`` each device gets only its
    block of that dim of a sum.
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
    """The smallest place of the extreme over all devices; the place of a NaN comes before any other."""
    best, beyond = (lax.pmax, -jnp.inf) if reducer == "argmax" else (lax.pmin, jnp.inf)
    value, is_nan = extreme, jnp.zeros(extreme.shape, bool)
    if jnp.issubdtype(extreme.dtype, jnp.floating):
        is_nan = jnp.isnan(extreme)
        value = jnp.where(is_nan, jnp.asarray(beyond, extreme.dtype), extreme)
    elif extreme.dtype == bool:
        value = extreme.astype(jnp.int8)
    last = jnp.iinfo(jnp.int32).max
    ranked = jnp.where(value == best(value, axes), place.astype(jnp.int32), last)
    first = lax.pmin(jnp.where(is_nan, place.astype(jnp.int32) - last, ranked), axes)
    return jnp.where(first < 0, first + last, first).astype(place.dtype)


def _cuts(description: Description, share: Share, mesh: Mesh) -> tuple[_Cut, ...]:
    """The cuts, the last loop first: a loop cut down to one element may vanish, which renumbers only the loops after it."""
    cuts: list[_Cut] = []
    for v in sorted({v for v in share.loops if v >= 0}, reverse=True):
        over = tuple(f for f, at in enumerate(share.loops) if at == v)
        axes = tuple(mesh.axis_names[f] for f in over)
        strategy = cut(description, v, math.prod(mesh.shape[name] for name in axes))
        assert strategy is not None, "only loops that divide are cut"
        terms = frozenset(i for i, need in enumerate(share.needs) if need is not None and not {*over}.isdisjoint(need.partial))
        cuts.append(_Cut(v, axes, strategy, terms))
    return tuple(cuts)


def _run(call: Call, split: Sequence[_Cut], operands: Sequence[Any], exchanges: Exchanges, primitive: Any) -> tuple[Any, ...]:
    """A device's results from its blocks: the first cut is applied, and the other cuts within its share."""
    if not split:
        results = evaluate(call, cuttable(call.primitive, operands, call.params), primitive=primitive)
        return tuple(in_row_major_order(call.primitive, results))
    (first, *rest) = split
    description = describe(call)
    assert description is not None
    strategy = cut(description, first.loop, first.strategy.ways)
    assert strategy is not None, "a dim that was cut along another loop no longer divides"
    share = localize(call, strategy)
    worker = lax.axis_index(first.axes)
    edges = [None if e == "zero" else edge_value(e, x.dtype, operands) for e, x in zip(share.edges, operands, strict=False)]
    blocks = [
        _operand_block(x, p, first, worker, e, exchanges, own=i in first.terms)
        for i, (x, p, e) in enumerate(zip(operands, strategy.operands, edges, strict=True))
    ]
    return share.run(lambda ops: _run(share.call, rest, ops, exchanges, primitive), blocks, worker)


def _operand_block(x: Any, placement: Any, split: _Cut, worker: Any, edge: Any, exchanges: Exchanges, *, own: bool) -> Any:
    match placement:
        case Split(dim, (lo, hi)) if lo or hi:
            return _with_halo(x, dim, lo, hi, split, worker, edge, exchanges)
        case Partial() if not own:
            return jnp.where(worker == 0, x, jnp.zeros((), x.dtype))
        case _:
            return x


def _with_halo(x: Any, dim: int, lo: int, hi: int, split: _Cut, worker: Any, edge: Any, exchanges: Exchanges) -> Any:
    """The block with its neighbours' edges; beyond the ends zeros (a permute fills them in), or the value ``edge``."""
    ways = split.strategy.ways

    def with_edge(halo: Any, last: int) -> Any:
        return halo if edge is None else jnp.where(worker == last, edge, halo)

    size = x.shape[dim]
    parts = [x]
    if lo:
        last = lax.slice_in_dim(x, size - lo, size, axis=dim)
        parts.insert(0, with_edge(exchanges.permute(last, split.axes, [(w, w + 1) for w in range(ways - 1)]), 0))
    if hi:
        first = lax.slice_in_dim(x, 0, hi, axis=dim)
        parts.append(with_edge(exchanges.permute(first, split.axes, [(w + 1, w) for w in range(ways - 1)]), ways - 1))
    return jnp.concatenate(parts, dim)


def _reduced_result(
    results: Sequence[Any],
    result: int,
    split: Sequence[_Cut],
    term_axes: tuple[str, ...],
    exchanges: Exchanges,
    share: Share,
    names: Sequence[str],
) -> Any:
    """A result reduced as planned over all axes but the kept ones; it gets a leading dim for each kept axis."""
    x, extreme = results[result], results[-1]  # a reduction of pairs returns the extremes as its last result
    kept = [names[f] for f in share.kept[result]]
    for planned in share.sums[result]:
        x = exchanges.reduce(x, extreme, "sum", tuple(names[f] for f in planned.over), planned.dim)
    if not share.sums[result]:
        placements = [(c.strategy.results[result], c.axes) for c in split]
        terms: list[tuple[Reducer, tuple[str, ...]]] = [(p.reducer, axes) for p, axes in placements if isinstance(p, Partial)]
        for reducer, axes in [*terms, ("sum", term_axes)]:
            reduced_axes = tuple(name for name in axes if name not in kept)
            x = exchanges.reduce(x, extreme, reducer, reduced_axes, None) if reduced_axes else x
    return lax.expand_dims(x, range(len(kept)))


def _local_shapes(call: Call, split: Sequence[_Cut]) -> list[tuple[int, ...]]:
    shapes = [list(s) for s in call.results]
    for c in split:
        for r, place in enumerate(c.strategy.results):
            if isinstance(place, Split):
                shapes[r][place.dim] //= c.strategy.ways
    return [tuple(s) for s in shapes]


def _spec(rank: int, placements: Sequence[tuple[Any, tuple[str, ...]]]) -> PartitionSpec:
    entries: list[Any] = [None] * rank
    for place, axes in placements:
        if isinstance(place, Split):
            entries[place.dim] = axes
    return PartitionSpec(*entries)
