"""Moves for XLA's partitioner in two constraints, where it aborts on one that moves two axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardplan.ir import Layout
from shardplan.tdl.xla_quirks import aborts_on_two_axes


def steps_to(before: Layout, after: Layout, sizes: Sequence[int]) -> tuple[Layout, ...]:
    """The layouts to which a value in the layout ``before`` is constrained in turn, ``after`` last.

    ``sizes`` are those of the factors. On a mesh where the partitioner may abort, a move of several factors goes through the
    layout in which these factors split nothing: their blocks are gathered, then cut.

    >>> steps_to(Layout(((), (0,))), Layout(((0, 1), ())), (2, 2))
    (Layout(dims=((0, 1), ()), partial=(), reducer='sum'),)
    """
    old, new = _places(before), _places(after)
    moved = {factor for factor in old.keys() | new.keys() if old.get(factor) != new.get(factor)}
    if len(moved) < 2 or not aborts_on_two_axes(sizes):
        return (after,)
    still = tuple(tuple(f for f in dim if f not in moved) for dim in after.dims)
    return replace(after, dims=still), after


def _places(layout: Layout) -> Mapping[int, tuple[int, tuple[int, ...]]]:
    """For each factor that splits a dim: this dim, and the factors that split it before."""
    return {factor: (d, dim[:n]) for d, dim in enumerate(layout.dims) for n, factor in enumerate(dim)}
