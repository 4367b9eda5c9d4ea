"""The smaller op that one worker runs: shapes and parameters of its share, without the halo.

`shrink` serves the recursion over levels: it gives the same primitive on smaller shapes, to be described and cut again. Running
that op also takes halos and offsets, which ``localize`` adds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shardplan.ir import Placement, Split
from shardplan.tdl.description import Call
from shardplan.tdl.strategies import Strategy

Shape = tuple[int, ...]
ShrinkParams = Callable[[Call, Call, Strategy], Mapping[str, Any]]
_PARAMS: dict[str, ShrinkParams] = {}


def block(shape: Shape, placement: Placement, ways: int) -> Shape:
    """A worker's share of a shape, without the halo."""
    match placement:
        case Split(dim, _):
            return (*shape[:dim], shape[dim] // ways, *shape[dim + 1 :])
        case _:
            return shape


def shrink(call: Call, strategy: Strategy) -> Call:
    """The call that each of ``strategy.ways`` workers makes, as if its block were the whole."""
    return _with_blocks(call, strategy, lambda shape, placement: block(shape, placement, strategy.ways))


def resized(call: Call, strategy: Strategy, extent: int) -> Call:
    """The call with another extent of the loop that a strategy cuts, which everything reads at its own index."""

    def longer(shape: Shape, placement: Placement) -> Shape:
        match placement:
            case Split(dim, _):
                return (*shape[:dim], extent, *shape[dim + 1 :])
            case _:
                return shape

    return _with_blocks(call, strategy, longer)


def _with_blocks(call: Call, strategy: Strategy, block_of: Callable[[Shape, Placement], Shape]) -> Call:
    small = replace(
        call,
        operands=tuple(block_of(s, p) for s, p in zip(call.operands, strategy.operands, strict=True)),
        results=tuple(block_of(s, p) for s, p in zip(call.results, strategy.results, strict=True)),
    )
    change = _PARAMS.get(call.primitive)
    return small if change is None else replace(small, params={**call.params, **change(call, small, strategy)})


def shrinks(*primitives: str) -> Callable[[ShrinkParams], ShrinkParams]:
    """Registers ``function(call, small, strategy)``, which returns the parameters that differ for a worker's share."""

    def register(function: ShrinkParams) -> ShrinkParams:
        for name in primitives:
            _PARAMS[name] = function
        return function

    return register


@shrinks("broadcast_in_dim", "iota", "empty", "empty2", "iota_2x32_shape", "iota_2x32_shape_at")
def _shape(call: Call, small: Call, strategy: Strategy) -> Mapping[str, Any]:
    return {"shape": small.results[0]}


@shrinks("reshape")
def _reshape(call: Call, small: Call, strategy: Strategy) -> Mapping[str, Any]:
    return {"new_sizes": small.results[0]}


@shrinks("random_bits", "random_split", "random_bits_at", "random_split_at")
def _random(call: Call, small: Call, strategy: Strategy) -> Mapping[str, Any]:
    return {"shape": small.results[0][len(small.operands[0]) :]}


@shrinks("slice")
def _slice(call: Call, small: Call, strategy: Strategy) -> Mapping[str, Any]:
    starts = tuple(int(n) for n in call.params["start_indices"])
    strides = tuple(int(n) for n in call.params["strides"] or (1,) * len(starts))
    limits = tuple(a + (n - 1) * s + 1 if n else a for a, n, s in zip(starts, small.results[0], strides, strict=True))
    return {"limit_indices": limits}


@shrinks("split")
def _split(call: Call, small: Call, strategy: Strategy) -> Mapping[str, Any]:
    axis = int(call.params["axis"]) % len(call.operands[0])
    return {"sizes": tuple(shape[axis] for shape in small.results)}


@shrinks("gather")
def _gather(call: Call, small: Call, strategy: Strategy) -> Mapping[str, Any]:
    old = tuple(int(n) for n in call.params["slice_sizes"])
    sizes = [now if n == whole else n for n, whole, now in zip(old, call.operands[0], small.operands[0], strict=True)]
    return {"slice_sizes": tuple(sizes)}


@shrinks("dynamic_slice")
def _dynamic_slice(call: Call, small: Call, strategy: Strategy) -> Mapping[str, Any]:
    return {"slice_sizes": small.results[0]}


@shrinks("conv_general_dilated")
def _convolution(call: Call, small: Call, strategy: Strategy) -> Mapping[str, Any]:
    """Each worker gets whole groups."""
    p, (batch, features) = call.params, call.params["dimension_numbers"].lhs_spec[:2]
    return {
        "feature_group_count": _groups(int(p["feature_group_count"]), call, small, int(features)),
        "batch_group_count": _groups(int(p["batch_group_count"]), call, small, int(batch)),
    }


def _groups(count: int, call: Call, small: Call, dim: int) -> int:
    whole, now = call.operands[0][dim], small.operands[0][dim]
    return count if count == 1 else count * now // whole


@shrinks("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def _window(call: Call, small: Call, strategy: Strategy) -> Mapping[str, Any]:
    """A cut of a window loop gives each worker a part of the window."""
    if strategy.loop < len(call.results[0]):
        return {}
    dim = strategy.loop - len(call.results[0])
    window = tuple(int(n) for n in call.params["window_dimensions"])
    return {"window_dimensions": (*window[:dim], window[dim] // strategy.ways, *window[dim + 1 :])}
