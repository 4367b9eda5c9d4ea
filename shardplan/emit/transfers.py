"""The steps of a resharding as JAX's collectives, inside a `shard_map` over the plan's mesh.

A block lies as its layout says: a dim's factors are major first, so that the order of gathers, and of a device's place among
them, follows the layout and not the mesh. A tensor that is split over its *buffer* is flat and padded in between.
"""

# pyright: basic
from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, assert_never

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardplan.collectives.divided import read
from shardplan.collectives.dsl import Master, Reduction, groups
from shardplan.collectives.laying import Laying
from shardplan.collectives.lower import collective, run, run_steps
from shardplan.collectives.ranking import entries
from shardplan.collectives.step import Step
from shardplan.cost import Network
from shardplan.emit.reductions import all_reduced, combined
from shardplan.ir import PAIRS, Collective, Reducer
from shardplan.schedule import Bundle, DimChange, Move, Reblock, later_splits, splits_buffer


class Transfers:
    """Moves values between layouts on a mesh whose axes are named like the plan's factors."""

    def __init__(self, network: Network, names: Sequence[str], sizes: Sequence[int]) -> None:
        self.network, self.names, self.sizes = network, tuple(names), tuple(sizes)

    def move(self, x: Any, move: Move, extreme: Any = None) -> Any:
        """A block after all steps of a move, each in a named scope of its own.

        ``extreme`` holds the extremes beside places that are reduced as pairs (argmax, argmin).
        """
        buffered: _Buffered | None = None
        for n, step in enumerate(move.steps):
            with jax.named_scope(f"{move.scope}.{n}"):
                if buffered is None and splits_buffer(step, move):
                    buffered = _Buffered(self, x, move, n)
                if buffered is None:
                    x = self.fitted(self.step(self.fitted(x, step, move, 1), step, move, extreme), step, move, -1)
                else:
                    x = buffered.step(step)
                    buffered = None if x is not None else buffered
        return x

    def fitted(self, x: Any, step: Step, move: Move, way: int) -> Any:
        """A block padded in a dim that the step begins to split (``way`` 1), or cut to its true extent in one that the step makes
        whole again (``way`` -1).
        """
        for d, (n, padded) in enumerate(zip(move.shape, move.extents, strict=True)):
            if n != padded:
                was, now = bool(step.before.dims[d]), bool(step.after.dims[d])
                if way == 1 and now and not was:
                    x = _padded(x, d, padded)
                if way == -1 and was and not now:
                    x = lax.slice_in_dim(x, 0, n, axis=d)
        return x

    def bundle(self, values: Sequence[Any], bundle: Bundle) -> list[Any]:
        """The blocks of several moves after their steps; one collective carries all of them."""
        with jax.named_scope(bundle.scope):
            return self.together(values, bundle.steps, bundle.step)

    def together(self, blocks: Sequence[Any], steps: Sequence[Step], step: Step) -> list[Any]:
        """The blocks after one collective that carries all of them, packed into rows: a row for each part that a device sends or
        gets.
        """
        ways, change = self.ways(step.over), DimChange.of(step)
        dims = [c.longer if c.gained else c.shorter for c in map(DimChange.of, steps)]
        match step.kind:
            case Collective.ALL_REDUCE:
                sent = jnp.concatenate([x.ravel() for x in blocks])
                parts = _columns(self.all_reduce(sent, step, "sum", None)[None], [x.size for x in blocks])
                return [p.reshape(x.shape) for p, x in zip(parts, blocks, strict=True)]
            case Collective.REDUCE_SCATTER:
                split = [
                    x.reshape(*x.shape[:d], ways, x.shape[d] // ways, *x.shape[d + 1 :])
                    for x, d in zip(blocks, dims, strict=True)
                ]
                rows = [jnp.moveaxis(x, d, 0) for x, d in zip(split, dims, strict=True)]
                sent = jnp.concatenate([x.reshape(ways, -1) for x in rows], 1)
                parts = _columns(self.reduce_scatter(sent, step, change.gained, "sum", 0), [x.size // ways for x in blocks])
                return [p.reshape(x.shape[1:]) for p, x in zip(parts, rows, strict=True)]
            case Collective.ALL_GATHER:
                sent = jnp.concatenate([x.ravel() for x in blocks])[None]
                parts = _columns(self.gather(sent, step, change.lost, 0), [x.size for x in blocks])
                apart = [jnp.moveaxis(p.reshape(ways, *x.shape), 0, d) for p, x, d in zip(parts, blocks, dims, strict=True)]
                return [
                    p.reshape(*x.shape[:d], ways * x.shape[d], *x.shape[d + 1 :])
                    for p, x, d in zip(apart, blocks, dims, strict=True)
                ]
            case Collective.ALL_TO_ALL | Collective.PERMUTE | Collective.SHIFT | Collective.SLICE:
                raise AssertionError(f"{step.kind} travels alone")
            case _:
                assert_never(step.kind)

    def reblocked(self, x: Any, reblock: Reblock) -> Any:
        """The same value in blocks of another extent of one dim. Blocks keep their order, so each device gets the rows that it
        lacks from its nearest neighbours on one side.
        """
        dim, factors = reblock.dim, reblock.layout.dims[reblock.dim]
        ways, axes, number = self.ways(factors), self.axes(sorted(factors)), self.mesh_numbers(factors)
        old, new = x.shape[dim], reblock.extent // ways
        worker = lax.axis_index(self.axes(factors))
        parts = [x]
        for n, rows in enumerate(reblock.heads(ways)):
            far = n + 1
            with jax.named_scope(f"{reblock.scope}.{n}"):
                if new > old:
                    sent = lax.slice_in_dim(x, 0, rows, axis=dim)
                    parts.append(self.permute(sent, axes, [(number[w + far], number[w]) for w in range(ways - far)]))
                else:
                    sent = lax.slice_in_dim(x, old - rows, old, axis=dim)
                    parts.insert(0, self.permute(sent, axes, [(number[w], number[w + far]) for w in range(ways - far)]))
        x = jnp.concatenate(parts, dim)
        if new > old:
            x = _padded(x, dim, (ways - 1) * (new - old) + new)
            return lax.dynamic_slice_in_dim(x, worker * (new - old), new, dim)
        before = x.shape[dim] - old
        x = _padded(x, dim, max(x.shape[dim], before + new))
        return lax.dynamic_slice_in_dim(x, jnp.maximum(before - worker * (old - new), 0), new, dim)

    def axes(self, factors: Sequence[int]) -> tuple[str, ...]:
        """The mesh axes of some factors, in their order."""
        return tuple(self.names[f] for f in factors)

    def ways(self, factors: Sequence[int]) -> int:
        """How many devices there are along some factors."""
        return math.prod(self.sizes[f] for f in factors)

    def step(self, x: Any, step: Step, move: Move, extreme: Any) -> Any:
        """A block after one step."""
        change = DimChange.of(step)
        match step.kind:
            case Collective.SLICE:
                return self.sliced(x, change.longer, change.gained)
            case Collective.ALL_GATHER:
                return self.gather(x, step, change.lost, change.shorter)
            case Collective.ALL_TO_ALL:
                return self.all_to_all(x, change.lost, change.longer, change.shorter)
            case Collective.PERMUTE:
                return self.permute(x, self.names, self.pairs(step.before.dims, step.after.dims))
            case Collective.ALL_REDUCE:
                return self.all_reduce(x, step, move.reducer, extreme)
            case Collective.REDUCE_SCATTER:
                return self.reduce_scatter(x, step, change.gained, move.reducer, change.longer)
            case Collective.SHIFT:
                raise AssertionError("shifts are of halos")
            case _:
                assert_never(step.kind)

    def sliced(self, x: Any, dim: int, factors: Sequence[int]) -> Any:
        """A device's block along a dim."""
        size = x.shape[dim] // self.ways(factors)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axes(factors)) * size, size, dim)

    # -- gathers -----------------------------------------------------------------------------------------------------

    def gather(self, x: Any, step: Step, over: Sequence[int], dim: int) -> Any:
        """All blocks along a dim, in the order of the factors ``over``."""
        if not step.program:
            return lax.all_gather(x, self.axes(over), axis=dim, tiled=True)
        program, laying, own = self.program(step)
        ways, shape = self.ways(over), x.shape
        flat = jnp.ravel(x)
        held = _places(laying)
        for one in program.steps:
            low, high = one.span(len(laying.shape))
            masters = isinstance(one.form, Master)
            axes = None if masters else laying.whole_axes(low, high)
            flat = collective(flat, one.collective, laying.groups(one), laying, axes=axes)
            held = _gathered(held, one.collective, groups(laying.shape, one))
        order = np.argsort(np.array(_in_order(held)))
        parts = flat.reshape(ways, -1)[order]  # by the hierarchy's own order of devices
        sizes = [self.sizes[f] for f in own]
        parts = parts.reshape(*sizes, -1).transpose(*(own.index(f) for f in over), len(own))
        parts = parts.reshape(ways, *shape)
        return jnp.concatenate([parts[i] for i in range(ways)], axis=dim)

    def program(self, step: Step) -> tuple[Reduction, Laying, tuple[int, ...]]:
        """A step's program, how it lies on the mesh, and its factors in the order of the hierarchy."""
        program, of = read(self.network, step.over, step.program)
        return program, of.laying(self.names), tuple(f for entry in entries(self.network, step.over) for f in entry)

    # -- reductions --------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Any, step: Step, reducer: Reducer, extreme: Any) -> Any:
        """The reduction of the terms that the devices along some factors hold, on each of them."""
        axes = self.axes(step.over)
        if reducer == "sum" and step.program:
            program, laying, _ = self.program(step)
            return run(x, program, laying)
        return all_reduced(x, extreme, reducer, axes)

    def reduce_scatter(self, x: Any, step: Step, over: Sequence[int], reducer: Reducer, dim: int) -> Any:
        """A device's block of the reduction, along a dim. For reductions other than sums, devices exchange their terms of each
        block and combine them here.
        """
        axes, ways = self.axes(over), self.ways(over)
        assert reducer not in PAIRS, "pairs are reduced by all-reduces"
        if reducer == "sum" and not step.program:
            return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
        parts = x.reshape(*x.shape[:dim], ways, x.shape[dim] // ways, *x.shape[dim + 1 :])
        if reducer != "sum":
            sent = lax.all_to_all(parts, axes, split_axis=dim, concat_axis=dim, tiled=True)
            return combined(jnp.moveaxis(sent, dim, 0), reducer)
        program, laying, own = self.program(step)
        rows = jnp.moveaxis(parts, dim, 0)
        shape = rows.shape[1:]
        # the blocks in the hierarchy's own order of devices
        rows = rows.reshape(*(self.sizes[f] for f in over), -1).transpose(*(over.index(f) for f in own), len(own))
        return run_steps(rows.ravel(), program, laying).reshape(shape)

    def all_to_all(self, x: Any, over: Sequence[int], split: int, joined: int) -> Any:
        """The part of dim ``split`` that each device sends here, concatenated along dim ``joined``."""
        return lax.all_to_all(x, self.axes(over), split_axis=split, concat_axis=joined, tiled=True)

    def permute(self, x: Any, axes: tuple[str, ...], pairs: Sequence[tuple[int, int]]) -> Any:
        """The values that another device sends; zeros if none sends any."""
        return lax.ppermute(x, axes, pairs)

    # -- permutes ----------------------------------------------------------------------------------------------------

    def mesh_numbers(self, factors: Sequence[int]) -> list[int]:
        """The number in the mesh's order, which permutes use, of each place along some factors, major first."""
        numbers = np.arange(self.ways(factors)).reshape([self.sizes[f] for f in sorted(factors)])
        return numbers.transpose([sorted(factors).index(f) for f in factors]).ravel().tolist()

    def pairs(self, before: Sequence[tuple[int, ...]], after: Sequence[tuple[int, ...]]) -> list[tuple[int, int]]:
        """(sender, receiver) of each message, numbered as in the mesh.

        Each device gets the block that it needs from one that has it. Data crosses no factor that splits neither layout: along
        such a factor, blocks may be terms of a sum.
        """
        moved = sorted({f for dims in (before, after) for dim in dims for f in dim})

        def order(dims: Sequence[tuple[int, ...]]) -> list[int]:
            used = [f for dim in dims for f in dim]
            return used + [f for f in moved if f not in used]

        first, last = order(before), order(after)
        messages: list[tuple[int, int]] = []
        for at in itertools.product(*(range(n) for n in self.sizes)):
            # the device whose block before has the same number in every dim, and the same place among those that hold it
            place = functools.reduce(lambda n, f: n * self.sizes[f] + at[f], last, 0)
            source = list(at)
            for f in reversed(first):
                place, source[f] = divmod(place, self.sizes[f])
            sender, receiver = (int(np.ravel_multi_index(c, self.sizes)) for c in (source, at))
            messages.append((sender, receiver))
        return messages


def _columns(rows: Any, sizes: Sequence[int]) -> list[Any]:
    """Rows taken apart into columns of these widths."""
    ends = list(itertools.accumulate(sizes))
    return [lax.slice_in_dim(rows, end - n, end, axis=1) for n, end in zip(sizes, ends, strict=True)]


def _padded(x: Any, dim: int, extent: int) -> Any:
    """A block padded to an extent of a dim, or cut to it. The padding (zeros, or copies of a key) is no part of the tensor."""
    if x.shape[dim] >= extent:
        return lax.slice_in_dim(x, 0, extent, axis=dim) if x.shape[dim] > extent else x
    short = [(0, extent - x.shape[dim]) if d == dim else (0, 0) for d in range(x.ndim)]
    return jnp.pad(x, short, mode="edge" if jnp.issubdtype(x.dtype, jax.dtypes.extended) else "constant")


class _Buffered:
    """A block while it is split over its buffer: its elements in a row, cut over some factors.

    Dims that are split meanwhile are blocked first: the array is [a dim for each such split, the elements of a block in a row],
    so that what is gathered at the end is a block of the new layout.
    """

    def __init__(self, transfers: Transfers, x: Any, move: Move, start: int) -> None:
        self.transfers = transfers
        self.reducer: Reducer = move.reducer
        self.splits = list(later_splits(move, start))
        for d, factors in enumerate(move.steps[start].before.dims):
            if not factors and any(dim == d for dim, _ in self.splits):
                x = _padded(x, d, move.extents[d])
        shape: list[list[int]] = [[n] for n in x.shape]
        for dim, factors in self.splits:
            ways = transfers.ways(factors)
            shape[dim] = [*shape[dim][:-1], ways, shape[dim][-1] // ways]
        self.shape = [own[-1] for own in shape]
        at = list(itertools.accumulate([0, *map(len, shape)]))
        seen = [0] * len(shape)
        front: list[int] = []
        for dim, _ in self.splits:
            front.append(at[dim] + seen[dim])
            seen[dim] += 1
        back = [at[d + 1] - 1 for d in range(len(shape))]
        blocks = x.reshape([n for own in shape for n in own]).transpose(*front, *back)
        self.x = blocks.reshape(*(transfers.ways(factors) for _, factors in self.splits), -1)

    def step(self, step: Step) -> Any:
        """Takes a step; the block in its own shape after the last one, None before."""
        own, change = self.transfers, DimChange.of(step)
        row = self.x.ndim - 1
        buffer = len(self.shape)
        match step.kind:
            case Collective.REDUCE_SCATTER if change.longer == buffer:
                short = -self.x.shape[row] % own.ways(change.gained)
                x = jnp.pad(self.x, [(0, 0)] * row + [(0, short)])
                self.x = own.reduce_scatter(x, step, change.gained, self.reducer, row)
            case Collective.ALL_GATHER:
                self.x = own.gather(self.x, step, change.lost, row)
                if len(step.after.dims) == buffer:
                    return self.x[: math.prod(self.shape)].reshape(self.shape)
            case Collective.REDUCE_SCATTER:
                self.x = lax.squeeze(own.reduce_scatter(self.x, step, change.gained, self.reducer, 0), (0,))
            case Collective.SLICE:
                self.x = lax.squeeze(own.sliced(self.x, 0, change.gained), (0,))
            case Collective.ALL_REDUCE:
                self.x = own.all_reduce(self.x, step, self.reducer, None)
            case Collective.PERMUTE:
                self.x = own.permute(self.x, own.names, own.pairs(step.before.dims, step.after.dims))
            case Collective.ALL_TO_ALL | Collective.SHIFT:
                raise AssertionError(f"{step.kind} of a buffer")
            case _:
                assert_never(step.kind)
        return None


def _places(laying: Laying) -> list[list[int]]:
    """The parts that each device of a hierarchy holds before a gather: only its own."""
    return [[d] for d in range(math.prod(laying.shape))]


def _gathered(held: list[list[int]], kind: Collective, among: Sequence[Sequence[int]]) -> list[list[int]]:
    """The parts that each device holds after a step. Devices that take no part hold fewer: -1 fills them up to the same size."""
    after = [list(h) for h in held]
    for group in among:
        if kind == Collective.ALL_GATHER:
            parts = [p for d in group for p in held[d]]
            for d in group:
                after[d] = parts
        else:
            assert kind == Collective.BROADCAST, "a gather's program gathers and broadcasts"
            for d in group:
                after[d] = list(held[group[0]])
    if kind == Collective.ALL_GATHER:
        longest = max(map(len, after))
        after = [h if len(h) == longest else [*h, *([-1] * (longest - len(h)))] for h in after]
    return after


def _in_order(held: list[list[int]]) -> list[int]:
    """The parts in the order in which every device holds them at the end."""
    assert all(h == held[0] for h in held), "all devices gather alike"
    return held[0]
