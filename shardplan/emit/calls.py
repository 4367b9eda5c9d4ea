"""Ops that each device runs on its own share: ops that XLA's partitioner gets wrong or cannot cut, and ops whose partial sums
stay apart.

`shardplan.tdl.localize` gives the op that a device runs. Halos come from the neighbours. Partial results are reduced here,
except over the axes along which terms are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax
from jax.sharding import Mesh, PartitionSpec

from shardplan import _jax
from shardplan.emit.blocks import Blocks, strategy_of
from shardplan.emit.reductions import all_reduced
from shardplan.emit.stacked import partition_spec
from shardplan.ir import Layout, Partial, Reducer, Split
from shardplan.schedule import Cut
from shardplan.tdl import Description, Strategy

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
    apart, and ``sums[r]`` the planned sums over the other axes (none: all-reduces). ``left[r]`` is its layout after these sums;
    only the dims of it count.
    """

    loops: tuple[int, ...]
    needs: tuple[Layout | None, ...]
    kept: tuple[tuple[int, ...], ...]
    sums: tuple[tuple[Sum, ...], ...]
    left: tuple[Layout, ...]


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
    call, split = description.call, _cuts(description, share, mesh)
    places = [(strategy_of(call, c), tuple(names[f] for f in c.factors)) for c in split]
    term_axes = tuple(name for name, at in zip(names, share.loops, strict=True) if at < -1)
    leading = tuple(0 if need is None else len(need.partial) for need in share.needs)
    blocks = Blocks(names, exchanges.permute)

    def local(*operands: Any) -> tuple[Any, ...]:
        """The call on a device's share."""
        own = [lax.squeeze(x, range(n)) if n else x for x, n in zip(operands, leading, strict=True)]
        with blocks.body():
            results = blocks.run(call, split, own, primitive)
        return tuple(_reduced_result(results, r, places, term_axes, exchanges, share, names) for r in range(len(call.results)))

    ins = tuple(
        _spec(len(s), [(strategy.operands[i], axes) for strategy, axes in places])
        if need is None
        else partition_spec(need, names)
        for i, (s, need) in enumerate(zip(call.operands, share.needs, strict=True))
    )
    outs = tuple(partition_spec(Layout(at.dims, kept), names) for at, kept in zip(share.left, share.kept, strict=True))
    return _jax.shard_mapped(local, mesh=mesh, in_specs=ins, out_specs=outs)


def reduced(x: Any, extreme: Any, reducer: Reducer, axes: tuple[str, ...], dim: int | None = None) -> Any:
    """The values of all devices along ``axes``, reduced; with ``dim`` each device's block of that dim of a sum."""
    if reducer == "sum" and dim is not None:
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    return all_reduced(x, extreme, reducer, axes)


def _cuts(description: Description, share: Share, mesh: Mesh) -> tuple[Cut, ...]:
    """The cuts, from the last loop to the first: cutting a loop down to one element may remove it from the remaining op."""
    result: list[Cut] = []
    for v in sorted({v for v in share.loops if v >= 0}, reverse=True):
        over = tuple(f for f, at in enumerate(share.loops) if at == v)
        ways = math.prod(mesh.shape[mesh.axis_names[f]] for f in over)
        terms = frozenset(i for i, need in enumerate(share.needs) if need is not None and not {*over}.isdisjoint(need.partial))
        result.append(Cut(v, over, ways, terms, extent=description.loops[v].extent))
    return tuple(result)


def _reduced_result(
    results: Sequence[Any],
    result: int,
    places: Sequence[tuple[Strategy, tuple[str, ...]]],
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
        placements = [(strategy.results[result], axes) for strategy, axes in places]
        terms: list[tuple[Reducer, tuple[str, ...]]] = [(p.reducer, axes) for p, axes in placements if isinstance(p, Partial)]
        for reducer, axes in [*terms, ("sum", term_axes)]:
            reduced_axes = tuple(name for name in axes if name not in kept)
            x = exchanges.reduce(x, extreme, reducer, reduced_axes, None) if reduced_axes else x
    return lax.expand_dims(x, range(len(kept)))


def _spec(rank: int, placements: Sequence[tuple[Any, tuple[str, ...]]]) -> PartitionSpec:
    entries: list[Any] = [None] * rank
    for place, axes in placements:
        if isinstance(place, Split):
            entries[place.dim] = axes
    return PartitionSpec(*entries)
