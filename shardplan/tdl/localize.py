# pyright: basic
"""Running one worker's share of an op (Tofu, section 4.2): local parameters, halo, offsets and masks.

`localize` gives what a worker runs, for verification and for the explicit emission. The worker may be a traced index, so one
program serves all workers: whatever depends on the worker is arithmetic (an added offset, masked rows), never a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardplan import _jax
from shardplan.ir import Partial, Placement, Split
from shardplan.tdl.describe import run_by_user
from shardplan.tdl.description import Call
from shardplan.tdl.rules.indexing import row_dims
from shardplan.tdl.shrink import shrink
from shardplan.tdl.strategies import Strategy

Edge = Literal["zero", "lowest", "highest"] | int
Bind = Callable[[Sequence[Any]], tuple[Any, ...]]
Run = Callable[[Bind, Sequence[Any], Any], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Local:
    """A worker's share of a call.

    ``call`` is the call that the primitive runs; its operand shapes include the halos. ``edges[i]`` fills operand i's halo beyond
    the tensor's own edge: zeros, the lowest or highest value of the dtype, or the scalar operand of that number.
    ``run(bind, operands, worker)`` computes the share; ``bind`` applies the primitive, or a further cut of ``call``.
    """

    call: Call
    strategy: Strategy
    edges: tuple[Edge, ...]
    run: Run


def localize(call: Call, strategy: Strategy) -> Local:
    """The share of ``call`` that each of ``strategy.ways`` workers runs."""
    small = shrink(call, strategy)
    small = replace(small, operands=tuple(_widened(s, p) for s, p in zip(small.operands, strategy.operands, strict=True)))
    local = Local(small, strategy, ("zero",) * len(call.operands), plain)
    change = _LOCAL.get(call.primitive)
    return local if change is None else change(call, local)


def run(local: Local, operands: Sequence[Any], worker: Any) -> tuple[Any, ...]:
    """The worker's results, from its regions of the operands (block and halo)."""
    return local.run(lambda ops: evaluate(local.call, ops), operands, worker)


def evaluate(call: Call, operands: Sequence[Any], *, primitive: Any = None) -> tuple[Any, ...]:
    """Applies the primitive uncut; our own index forms (``random_bits_at``) are evaluated here.

    ``primitive`` is the primitive object in the program; without it, the call's name selects one.
    """
    own = _OWN.get(call.primitive)
    if own is not None:
        return own(call, *operands)
    params = _jax.resized_kernel(call.params, call.operands, call.results)
    if call.primitive.startswith("ffi_call:"):
        params["result_avals"] = tuple(a.update(shape=s) for a, s in zip(params["result_avals"], call.results, strict=True))
    out = _jax.bind(call.primitive.split(":")[0], operands, params, own=primitive)
    return tuple(out) if isinstance(out, list | tuple) else (out,)


HALO = "@halo"
"""The suffix of a registered call's name where it runs on blocks with their halo."""


def run_as(primitive: str, function: Callable[..., Any], *, beyond: Callable[..., Any] | None = None) -> Callable[[], None]:
    """From now on ``function(*operands, **params)`` evaluates this primitive, and ``beyond`` evaluates it on blocks with a halo.
    Returns a function that undoes this.
    """
    before = {name: _OWN.pop(name, None) for name in (primitive, f"{primitive}{HALO}")}

    def undo() -> None:
        for name, old in before.items():
            del _OWN[name]
            if old is not None:
                _OWN[name] = old

    _OWN[primitive] = _evaluator(function)
    _OWN[f"{primitive}{HALO}"] = _evaluator(beyond or function)
    _LOCAL.setdefault(primitive, _named_halo)
    run_by_user(primitive)
    return undo


def _evaluator(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    def own(call: Call, *operands: Any) -> tuple[Any, ...]:
        params = {} if ":" in call.primitive else call.params
        return tuple(jax.tree.leaves(function(*operands, **params)))

    return own


def _named_halo(call: Call, local: Local) -> Local:
    if not local.strategy.has_halo:
        return local
    return replace(local, call=replace(local.call, primitive=f"{call.primitive}{HALO}"))


def edge_value(edge: Edge, dtype: Any, operands: Sequence[Any]) -> Any:
    """The scalar that fills a halo beyond the edge."""
    match edge:
        case "zero":
            return np.zeros((), dtype)
        case int():
            return operands[edge]
        case _:
            low = edge == "lowest"
            if jnp.issubdtype(dtype, jnp.floating):
                return np.asarray(-np.inf if low else np.inf, dtype)
            if dtype == np.bool_:
                return np.asarray(not low)
            return np.asarray(np.iinfo(dtype).min if low else np.iinfo(dtype).max, dtype)


_LOCAL: dict[str, Callable[[Call, Local], Local]] = {}
_OWN: dict[str, Callable[..., tuple[Any, ...]]] = {}


def _local(*primitives: str) -> Callable[[Callable[[Call, Local], Local]], Callable[[Call, Local], Local]]:
    def register(function: Callable[[Call, Local], Local]) -> Callable[[Call, Local], Local]:
        for name in primitives:
            _LOCAL[name] = function
        return function

    return register


def plain(bind: Bind, operands: Sequence[Any], worker: Any) -> tuple[Any, ...]:
    """A share that is the same whichever it is."""
    return bind(operands)


def _widened(shape: tuple[int, ...], placement: Placement) -> tuple[int, ...]:
    match placement:
        case Split(dim, (lo, hi)):
            return (*shape[:dim], shape[dim] + lo + hi, *shape[dim + 1 :])
        case _:
            return shape


def _with(local: Local, **params: Any) -> Local:
    return replace(local, call=replace(local.call, params={**local.call.params, **params}))


def _cut_dim(placement: Placement) -> tuple[int, tuple[int, int]] | None:
    return (placement.dim, placement.halo) if isinstance(placement, Split) else None


@_local("slice")
def _slice(call: Call, local: Local) -> Local:
    """A halo moves the start."""
    starts = [int(n) for n in call.params["start_indices"]]
    strides = [int(n) for n in call.params["strides"] or (1,) * len(starts)]
    for dim, (lo, _) in filter(None, [_cut_dim(local.strategy.operands[0])]):
        starts[dim] += lo
    limits = [a + (n - 1) * s + 1 if n else a for a, n, s in zip(starts, local.call.results[0], strides, strict=True)]
    return _with(local, start_indices=tuple(starts), limit_indices=tuple(limits), strides=tuple(strides))


@_local("pad")
def _pad(call: Call, local: Local) -> Local:
    """The halo replaces padding; beyond the edge it holds the padding value."""
    config = [(int(lo), int(hi), int(gap)) for lo, hi, gap in call.params["padding_config"]]
    for dim, (halo, _) in filter(None, [_cut_dim(local.strategy.operands[0])]):
        low, _, gap = config[dim]
        low -= halo * (gap + 1)
        inner = (local.call.operands[0][dim] - 1) * (gap + 1) + 1
        config[dim] = (low, local.call.results[0][dim] - low - inner, gap)
    return replace(_with(local, padding_config=tuple(config)), edges=(1, "zero"))


def _window_padding(
    size: int, out: int, old: tuple[int, int], window: int, stride: int, wide: int, apart: int, halo: int
) -> tuple[int, int]:
    """The padding of a worker's region that aligns its first output and gives ``out`` outputs."""
    low = old[0] - halo * apart
    spread, dilated = (window - 1) * wide + 1, (size - 1) * apart + 1
    return low, (out - 1) * stride + spread - dilated - low


@_local("conv_general_dilated")
def _convolution(call: Call, local: Local) -> Local:
    p, (x, kernel) = call.params, local.call.operands
    numbers = p["dimension_numbers"]
    padding = [(int(lo), int(hi)) for lo, hi in p["padding"]]
    for dim, (halo, _) in filter(None, [_cut_dim(local.strategy.operands[0])]):
        if dim in numbers.lhs_spec[2:]:
            n = numbers.lhs_spec.index(dim) - 2
            out, window = local.call.results[0][numbers.out_spec[2 + n]], kernel[numbers.rhs_spec[2 + n]]
            padding[n] = _window_padding(
                x[dim],
                out,
                padding[n],
                window,
                int(p["window_strides"][n]),
                int(p["rhs_dilation"][n]),
                int(p["lhs_dilation"][n]),
                halo,
            )
            if padding[n] == (0, 0) and int(p["lhs_dilation"][n]) > 1:
                return _with_extra_output(local, padding, n, numbers.out_spec[2 + n], int(p["window_strides"][n]))
    return _with(local, padding=tuple(padding))


def _with_extra_output(local: Local, padding: list[tuple[int, int]], n: int, dim: int, stride: int) -> Local:
    """Computes one more output in spatial dim ``n``, and crops it.

    Without padding, XLA's algebraic simplifier aborts on a dilated operand whose other dim is smaller than the kernel.
    """
    shape = local.call.results[0]

    def cropped(bind: Bind, operands: Sequence[Any], worker: Any) -> tuple[Any, ...]:
        (out,) = bind(operands)
        return (lax.slice_in_dim(out, 0, shape[dim], axis=dim),)

    padding[n] = (0, stride)
    local = replace(_with(local, padding=tuple(padding)), run=cropped)
    longer = tuple(size + (d == dim) for d, size in enumerate(shape))
    return replace(local, call=replace(local.call, results=(longer,)))


@_local("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window", "select_and_gather_add")
def _reduce_window(call: Call, local: Local) -> Local:
    p = local.call.params
    ones = (1,) * len(call.results[0])
    base, wide = p.get("base_dilation") or ones, p.get("window_dilation") or ones
    padding = [(int(lo), int(hi)) for lo, hi in p["padding"]]
    for dim, (halo, _) in filter(None, [_cut_dim(local.strategy.operands[0])]):
        padding[dim] = _window_padding(
            local.call.operands[0][dim], local.call.results[0][dim], padding[dim], int(p["window_dimensions"][dim]),
            int(p["window_strides"][dim]), int(wide[dim]), int(base[dim]), halo,
        )  # fmt: skip
    edges: tuple[Edge, ...]
    match call.primitive:
        case "reduce_window_max":
            edges = ("lowest",)
        case "reduce_window_min":
            edges = ("highest",)
        case "reduce_window":
            half = len(call.operands) // 2
            edges = tuple[Edge, ...](range(half, 2 * half)) + ("zero",) * half
        case "select_and_gather_add":
            edges = ("zero", "lowest" if str(p["select_prim"]) == "ge" else "highest")
        case _:
            edges = ("zero",)
    return replace(_with(local, padding=tuple(padding)), edges=edges)


@_local("select_and_scatter_add")
def _select_and_scatter_add(call: Call, local: Local) -> Local:
    """Runs all windows that touch the block, on all that they cover, and crops the result to the block."""
    p, (source, x) = call.params, local.call.operands
    edge: Edge = "lowest" if str(p["select_prim"]) == "ge" else "highest"
    local = replace(local, edges=("zero", edge))
    at_source, at_x = (_cut_dim(s) for s in local.strategy.operands)
    if at_source is None or at_x is None:
        return local
    dim, lo = at_x[0], at_x[1][0]
    stride, window = int(p["window_strides"][dim]), int(p["window_dimensions"][dim])
    padding = [(int(lo), int(hi)) for lo, hi in p["padding"]]
    low = padding[dim][0] + at_source[1][0] * stride - lo
    high = (source[dim] - 1) * stride + window - x[dim] - low
    padding[dim] = (low, min(0, high + stride - 1) if high < 0 else high)  # same number of windows, less negative padding
    size = local.call.results[0][dim]

    def cropped(bind: Bind, operands: Sequence[Any], worker: Any) -> tuple[Any, ...]:
        (out,) = bind(operands)
        return (lax.slice_in_dim(out, lo, lo + size, axis=dim),)

    local = replace(_with(local, padding=tuple(padding)), run=cropped)
    return replace(local, call=replace(local.call, results=(x,)))


@_local("argmax", "argmin")
def _argument(call: Call, local: Local) -> Local:
    """Adds the worker's offset to its positions, and returns the extremes found there as a second result."""
    if not isinstance(local.strategy.results[0], Partial):
        return local
    (dim,) = call.params["axes"]
    share = call.operands[0][dim] // local.strategy.ways

    def paired(bind: Bind, operands: Sequence[Any], worker: Any) -> tuple[Any, ...]:
        (at,) = bind(operands)
        extreme = jnp.take_along_axis(jnp.asarray(operands[0]), jnp.expand_dims(jnp.asarray(at), dim), dim)
        return (at + jnp.asarray(worker * share).astype(at.dtype), lax.squeeze(extreme, (dim,)))

    return replace(local, run=paired)


@_local("iota")
def _iota(call: Call, local: Local) -> Local:
    """A worker counts from its own offset."""
    if local.strategy.results[0] != Split(int(call.params["dimension"])):
        return local
    size = local.call.results[0][int(call.params["dimension"])]

    def shifted(bind: Bind, operands: Sequence[Any], worker: Any) -> tuple[Any, ...]:
        (out,) = bind(operands)
        return (out + jnp.asarray(worker * size).astype(out.dtype),)

    return replace(local, run=shifted)


@_local("random_bits", "random_split", "iota_2x32_shape")
def _counted(call: Call, local: Local) -> Local:
    """Each element's bits follow from its position in the whole: the index form takes the position of the first element."""
    leading = len(call.operands[0]) if call.operands else 0
    rank = len(call.results[0]) - leading
    placed = _cut_dim(local.strategy.results[0])
    if placed is None or placed[0] < leading:
        return local
    at = replace(
        local.call,
        primitive=f"{call.primitive}_at",
        operands=(*local.call.operands, (rank,)),
        dtypes=(*local.call.dtypes, "uint32"),
        params={**local.call.params, "whole": call.results[0][leading:]},
    )
    size = local.call.results[0][placed[0]]

    def counted(bind: Bind, operands: Sequence[Any], worker: Any) -> tuple[Any, ...]:
        return bind([*operands, jnp.zeros(rank, jnp.uint32).at[placed[0] - leading].set(jnp.asarray(worker * size, jnp.uint32))])

    return replace(local, call=at, run=counted, edges=("zero",) * len(at.operands))


def counted_in(local: Local, call: Call) -> Local:
    """A share of a padded call. It counts random bits, and rows that are looked up or written, as the unpadded ``call`` does."""
    if call.primitive == "gather" or call.primitive.startswith("scatter"):
        return (_gather if call.primitive == "gather" else _scatter)(call, local)
    if "whole" not in local.call.params or "whole" in call.params:
        return local
    leading = len(call.operands[0]) if call.operands else 0
    return _with(local, whole=call.results[0][leading:])


@_local("random_bits_at", "random_split_at", "iota_2x32_shape_at")
def _counted_further(call: Call, local: Local) -> Local:
    leading = len(call.operands[0]) if len(call.operands) > 1 else 0
    placed = _cut_dim(local.strategy.results[0])
    if placed is None or placed[0] < leading:
        return local
    size = local.call.results[0][placed[0]]

    def counted(bind: Bind, operands: Sequence[Any], worker: Any) -> tuple[Any, ...]:
        *keys, first = operands
        return bind([*keys, jnp.asarray(first).at[placed[0] - leading].add(jnp.asarray(worker * size, jnp.uint32))])

    return replace(local, run=counted)


@partial(jax.jit, static_argnums=(0, 1))
def _counts(shape: tuple[int, ...], whole: tuple[int, ...], first: Any) -> tuple[Any, Any]:
    """The row-major positions in ``whole`` of a block that starts at ``first``, as high and low 32-bit words."""
    hi = lo = jnp.zeros(shape, jnp.uint32)
    for dim, n in enumerate(whole):
        at = lax.broadcasted_iota(jnp.uint32, shape, dim) + first[dim]
        a0, a1, n0, n1 = lo & 0xFFFF, lo >> 16, n & 0xFFFF, n >> 16
        middle = (a0 * n0 >> 16) + (a0 * n1 & 0xFFFF) + (a1 * n0 & 0xFFFF)
        hi = hi * jnp.uint32(n & 0xFFFFFFFF) + a1 * n1 + (a0 * n1 >> 16) + (a1 * n0 >> 16) + (middle >> 16)
        lo = lo * jnp.uint32(n & 0xFFFFFFFF) + at
        hi = hi + (lo < at).astype(jnp.uint32)
    return hi, lo


@partial(jax.jit, static_argnums=(1, 2))
def _threefry_at(keys: Any, shape: tuple[int, ...], whole: tuple[int, ...], first: Any) -> tuple[Any, Any]:
    data = jax.random.key_data(keys)
    one, two = (data[..., n].reshape(keys.shape + (1,) * len(shape)) for n in (0, 1))
    counts = tuple(jnp.broadcast_to(c, (*keys.shape, *shape)) for c in _counts(shape, whole, first))
    out = _jax.bind("threefry2x32", [jnp.broadcast_to(one, counts[0].shape), jnp.broadcast_to(two, counts[0].shape), *counts], {})
    return out[0], out[1]


def _bits_at(call: Call, keys: Any, first: Any) -> tuple[Any, ...]:
    width = int(call.params["bit_width"])
    hi, lo = _threefry_at(keys, call.params["shape"], call.params["whole"], first)
    if width == 64:
        return ((hi.astype(jnp.uint64) << 32) | lo.astype(jnp.uint64),)
    return ((hi ^ lo).astype(f"uint{width}"),)


def _split_at(call: Call, keys: Any, first: Any) -> tuple[Any, ...]:
    both = jnp.stack(_threefry_at(keys, call.params["shape"], call.params["whole"], first), axis=-1)
    return (jax.random.wrap_key_data(both, impl="threefry2x32"),)


def _iota_at(call: Call, first: Any) -> tuple[Any, ...]:
    return _counts(call.params["shape"], call.params["whole"], first)


@partial(jax.jit, static_argnums=2)
def _gamma(keys: Any, alpha: Any, log_space: bool) -> Any:
    return _jax.bind("random_gamma", [keys, alpha], {"log_space": log_space})


def _compiled_gamma(call: Call, keys: Any, alpha: Any) -> tuple[Any, ...]:
    """Runs under one jit: op by op, its loops are compiled anew at each call, which takes seconds."""
    return (_gamma(keys, alpha, bool(call.params["log_space"])),)


def _handed_on(call: Call, x: Any) -> tuple[Any, ...]:
    return (x,)


_OWN.update(random_bits_at=_bits_at, random_split_at=_split_at, iota_2x32_shape_at=_iota_at)
_OWN.update(random_gamma=_compiled_gamma, placed=_handed_on)


def _mode(params: Mapping[str, Any]) -> str:
    return getattr(params["mode"], "name", str(params["mode"])).upper()


@_local("gather")
def _gather(call: Call, local: Local) -> Local:
    """A worker looks up the indices within its own rows and gives zeros for all others."""
    placed, numbers, mode = _cut_dim(local.strategy.operands[0]), call.params["dimension_numbers"], _mode(call.params)
    if not isinstance(local.strategy.results[0], Partial) or placed is None:
        return local
    component, size = tuple(numbers.start_index_map).index(placed[0]), call.operands[0][placed[0]]
    share = local.call.operands[0][placed[0]]

    def masked(bind: Bind, operands: Sequence[Any], worker: Any) -> tuple[Any, ...]:
        """Gathers from the worker's own rows: other workers' rows give zeros, and worker 0 alone fills rows out of range."""
        table, indices, *extra = operands
        indices = jnp.asarray(indices).astype(jnp.int32)
        row = indices[..., component]
        out_of_range = (row < 0) | (row >= size)
        if mode != "FILL_OR_DROP":
            row, out_of_range = jnp.clip(row, 0, size - 1), jnp.zeros_like(out_of_range)
        here = row - worker * share
        owned = (here >= 0) & (here < share)
        (out,) = bind([table, indices.at[..., component].set(jnp.clip(here, 0, share - 1)), *extra])
        wide = tuple(int(d) for d in numbers.offset_dims)
        fill = jnp.where(worker == 0, _fill_value(call, out.dtype), jnp.zeros((), out.dtype))
        out = jnp.where(jnp.expand_dims(owned, wide), out, jnp.zeros((), out.dtype))
        return (jnp.where(jnp.expand_dims(out_of_range, wide), fill, out),)

    return replace(local, call=_index_dtype(local.call), run=masked)


def _index_dtype(call: Call) -> Call:
    return replace(call, dtypes=(call.dtypes[0], "int32", *call.dtypes[2:])) if call.dtypes else call


def _fill_value(call: Call, dtype: Any) -> Any:
    value = call.params.get("fill_value")
    if value is not None:
        return jnp.asarray(value, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, dtype)
    info = jnp.iinfo(dtype)
    return jnp.asarray(info.max if jnp.issubdtype(dtype, jnp.unsignedinteger) else info.min, dtype)


def _window_sizes(call: Call) -> list[int]:
    """The extent of an update in each dim of a scatter's operand."""
    numbers, updates = call.params["dimension_numbers"], call.operands[2]
    alone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    sizes = iter([updates[d] for d in numbers.update_window_dims])
    return [1 if d in alone else next(sizes) for d in range(len(call.operands[0]))]


@_local("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
def _scatter(call: Call, local: Local) -> Local:
    """A worker drops the updates outside its own rows."""
    placed, numbers = _cut_dim(local.strategy.results[0]), call.params["dimension_numbers"]
    if placed is None or placed[0] not in row_dims(call):
        return local
    mode, start_map = call.params["mode"], tuple(numbers.scatter_dims_to_operand_dims)
    component, share = start_map.index(placed[0]), local.call.operands[0][placed[0]]
    window = _window_sizes(call)
    highest = np.array([call.operands[0][d] - window[d] for d in start_map])
    clipped = _mode(call.params) == "CLIP"

    def dropped(bind: Bind, operands: Sequence[Any], worker: Any) -> tuple[Any, ...]:
        x, indices, updates = operands
        indices = jnp.asarray(indices).astype(jnp.int32)
        if clipped:
            indices = jnp.clip(indices, 0, highest)
        return bind([x, indices.at[..., component].add(-worker * share), updates])

    drop = type(mode).FILL_OR_DROP if hasattr(type(mode), "FILL_OR_DROP") else mode
    local = replace(local, call=_index_dtype(local.call), run=dropped)
    return _with(local, mode=drop)
