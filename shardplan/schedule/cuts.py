"""The cuts of an op: those that a plan chose, or those that follow from the layout of its results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardplan.graph import Node
from shardplan.ir import Layout, Reducer, Split, Use
from shardplan.schedule.instructions import Cut


class Cuts:
    """The cuts of ops over factors of these ``sizes``; equal ops that are cut alike are worked out once."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._planned: dict[tuple[int, tuple[int, ...]], tuple[Cut, ...]] = {}
        self._following: dict[tuple[int, Layout], tuple[Cut, ...] | None] = {}

    def planned(self, node: Node, use: Use) -> tuple[Cut, ...]:
        """The cuts of a use, from the last loop to the first: cutting a loop down to one element may remove it from the
        remaining op.
        """
        key = node.signature.id, use.loops
        if key not in self._planned:
            over = {v: tuple(f for f, at in enumerate(use.loops) if at == v) for v in use.loops if v >= 0}
            self._planned[key] = _cuts(node, over, self._sizes)
        return self._planned[key]

    def following(self, node: Node, layout: Layout) -> tuple[Cut, ...] | None:
        """The cuts with which an op makes its results in a layout; None for an op that cannot, and runs whole."""
        key = node.signature.id, layout
        if key not in self._following:
            self._following[key] = _following(node, layout, self._sizes)
        return self._following[key]


def _following(node: Node, layout: Layout, sizes: Sequence[int]) -> tuple[Cut, ...] | None:
    signature, description = node.signature, node.signature.description
    if description is None or not (signature.aligned or signature.resizes):
        return None
    rank = len(layout.dims)
    dims = next(dims for dims in description.results if len(dims) == rank)
    over = {v: factors for v, factors in zip(dims, layout.dims, strict=True) if factors}
    cuts = _cuts(node, over, sizes)
    return None if any(signature.cut(c.loop, c.ways) is None for c in cuts) else cuts


def _cuts(node: Node, over: Mapping[int, tuple[int, ...]], sizes: Sequence[int]) -> tuple[Cut, ...]:
    """Loops cut over these factors, the last loop first."""
    description = node.signature.description
    if not over:
        return ()
    assert description is not None, "only what is described is cut"
    loops = description.loops
    return tuple(
        Cut(v, over[v], math.prod(sizes[f] for f in over[v]), extent=loops[v].extent) for v in sorted(over, reverse=True)
    )


def taking(cuts: Sequence[Cut], whole: set[int]) -> tuple[Cut, ...]:
    """The cuts, where these operands are whole on every device."""
    return tuple([replace(c, whole=frozenset(whole)) for c in cuts]) if whole else tuple(cuts)


def operand_layouts(node: Node, cuts: Sequence[Cut], names: Sequence[str]) -> list[Layout | None]:
    """The layout of the block of each operand that a device needs; None for all of it, or for a block with a halo."""
    signature = node.signature
    if signature.manual is not None:
        return [at if any(at.dims) else None for at in signature.manual.layouts(names)[0]]
    dims: list[list[tuple[int, ...]] | None] = [[()] * len(shape) for shape in signature.call.operands]
    for c in cuts:
        strategy = signature.cut(c.loop, c.ways)
        assert strategy is not None, "a plan cuts what may be cut"
        for i, place in enumerate(strategy.operands):
            own = dims[i]
            if isinstance(place, Split) and own is not None:
                if place.halo != (0, 0):
                    dims[i] = None
                else:
                    own[place.dim] = c.factors
    return [None if own is None or not any(own) else Layout(tuple(own)) for own in dims]


def reducer_of(node: Node, use: Use) -> Reducer:
    """How the terms of an op's results are reduced."""
    description = node.signature.description
    if description is None:
        return "sum"
    reducers: list[Reducer] = [r for v in use.loops if v >= 0 and (r := description.loops[v].reducer) is not None]
    assert len(set(reducers)) <= 1, "an op reduces in one way"
    return reducers[0] if reducers else "sum"


def whole_layout(layout: Layout) -> Layout:
    """A layout of the same rank that splits nothing."""
    return Layout.whole(len(layout.dims))
