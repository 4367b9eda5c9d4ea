"""Facts about ops beyond their index maps: which run on the host, and which cuts XLA's partitioner gets wrong.

A *fenced* cut is not left to the partitioner: each device runs it on its own share (`shardplan.emit.calls`), and only where it
divides. The fenced cuts were found by running every cut of every primitive (`tests/emit/proof`) with the jaxlib of `PROVEN_WITH`;
docs/accuracy.md has the table.
"""

from __future__ import annotations

from shardplan.ir import PAIRS
from shardplan.tdl import language as lang
from shardplan.tdl.description import Call, Description, children
from shardplan.tdl.index import loops_of
from shardplan.tdl.strategies import in_step

PROVEN_WITH = "0.10.2"
"""The jaxlib with which the emission of every primitive was last proven."""

HOST = frozenset({"debug_callback", "debug_print", "io_callback", "pure_callback"})
"""Primitives that run whole without ``replicate=``: XLA gathers their operands, and every device has their results."""

PLATFORM = "platform_index"
"""Selects the platform's branch of `jax.lax.platform_dependent`: it has no operands, and devices of one kind agree on it."""

KERNELS = frozenset({"mosaic"})
"""Platforms for which JAX lowers only the bodies of kernels, never a step: a branch for these alone does not run."""

_KEYS = "use keys of another kind, such as jax.random.key(seed, impl='threefry2x32')"
UNCOMPILED = {
    "mulhi": "multiply in a wider type and shift",
    "philox2x32": _KEYS,
    "philox4x32": _KEYS,
}
"""Primitives that XLA compiles for one device only ("Unable to convert MHLO to StableHLO", however sharded), with the remedy."""


def uncompiled(primitive: str) -> str | None:
    """The remedy for a primitive that XLA compiles for one device only; None for any other."""
    return UNCOMPILED.get(primitive)


_AND_OR = ("and", "or")
_EXTREMES = ("max", "min")
_REDUCTIONS = ("reduce_max", "reduce_min")

_WINDOWS = frozenset({"reduce_window", "select_and_scatter_add"})
"""In max pooling's gradient, the partitioner compares zeros beyond a block. In window reductions, it counts an initial value that
is not the identity again at the edges."""

_SPLIT_BY_JAX = frozenset({"scaled_matmul_wrapper"})
"""cuDNN's kernels, which JAX itself splits for the partitioner, and only in some ways."""

_SCATTERS = frozenset({"scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"})
"""The padding of unevenly cut updates lands in row 0."""

_MISALIGNED = frozenset({"pad", "slice"})
"""Under constraints inside a program, the partitioner turns strided slices and interior padding into programs that its own
verifier refuses, where a loop is not read at its own index alone."""

_WINDOW_EXTREMES = ("reduce_window_max", "reduce_window_min")

_UNBATCHED = frozenset({"conv_general_dilated", "tie"})
"""Their terms are added up at once: under `vmap` a convolution becomes a grouped one, whose operands the partitioner gathers, and
a tie has no batching rule."""


def fenced_loops(call: Call, description: Description | None, *, run_by_user: bool) -> frozenset[int]:
    """The loops of a call that each device must cut itself, on its own share; they are never padded.

    - Calls that a user runs or that the partitioner cannot cut at all (`uncuttable`), and scatters: every loop.
    - Convolutions: the spatial loops. The partitioner adds up gradients over axes that cut nothing, and misplaces halos under
      strides and dilations.
    - Slices and padding: the loops along which elements move.
    - Integers reduced by and/or: the reduced loops, for which the partitioner has no collective. Windows of floats reduced by
      max/min: also the reduced loops, since it loses NaN (as it does in plain reductions, see `loses_nan`).
    """
    if description is None:
        return frozenset()
    if run_by_user or uncuttable(call, description) or call.primitive in _SCATTERS:
        return frozenset(range(len(description.loops)))
    if call.primitive == "conv_general_dilated":
        return _spatial_loops(call, description)
    if call.primitive in _MISALIGNED:
        return frozenset(v for v in range(len(description.loops)) if in_step(description, v) is None)
    reducers = _AND_OR if call.dtypes and call.dtypes[0] != "bool" else ()
    reducers += _EXTREMES if loses_nan(call, True) and call.primitive not in _REDUCTIONS else ()
    return frozenset(v for v, loop in enumerate(description.loops) if loop.reducer in reducers)


def loses_nan(call: Call, partial: bool) -> bool:
    """Whether the partitioner could lose NaN in reducing terms of this call; ``partial``: whether there are terms to reduce."""
    return partial and bool(call.dtypes) and "float" in call.dtypes[0] and call.primitive in (*_REDUCTIONS, *_WINDOW_EXTREMES)


def shared_loops(call: Call, description: Description | None, *, run_by_user: bool) -> frozenset[int]:
    """The loops of a call that each device cuts on its own share where they divide.

    These are the fenced loops, and all loops of a call that keeps a loop whole or reduces pairs: XLA would gather its operands.
    """
    if description is not None and _keeps_whole(description):
        return frozenset(range(len(description.loops)))
    return fenced_loops(call, description, run_by_user=run_by_user)


def uncuttable(call: Call, description: Description | None) -> bool:
    """Whether the partitioner cannot cut this call: named calls, kernels, windows, opaque functions, grouped convolutions."""
    if ":" in call.primitive or call.primitive in _WINDOWS or call.primitive in _SPLIT_BY_JAX:
        return True
    if description is None:
        return False
    whole = any(loop.whole for loop in description.loops)
    return _in_groups(description.call) or (whole and any(_is_opaque(tree) for tree in description.trees))


def adds_up_at_once(call: Call, description: Description | None, *, run_by_user: bool) -> bool:
    """Whether this call may neither keep partial sums nor pass them on."""
    if run_by_user or uncuttable(call, description) or call.primitive in _UNBATCHED:
        return True
    return description is not None and _keeps_whole(description)


def _keeps_whole(description: Description) -> bool:
    """Whether a call keeps a loop whole, or reduces pairs."""
    return any(loop.whole or loop.reducer in PAIRS for loop in description.loops)


def _spatial_loops(call: Call, description: Description) -> frozenset[int]:
    numbers = call.params["dimension_numbers"]
    out, kernel = (tuple(map(int, spec[2:])) for spec in (numbers.out_spec, numbers.rhs_spec))
    spatial = {description.results[0][d] for d in out}
    for operand, indices in description.accesses:
        if operand == 1:
            spatial.update(v for d in kernel for v in loops_of(indices[d]))
    return frozenset(spatial)


def _is_opaque(tree: lang.Scalar) -> bool:
    """Whether an opaque function has arguments; an `Opaque` without arguments only marks loops that stay whole."""
    match tree:
        case lang.HiddenLoops(args) | lang.OpaqueResult(args) if args:
            return True
        case lang.Apply("where", _, "transformed"):
            return True
        case _:
            return any(_is_opaque(child) for child in children(tree))


def _in_groups(call: Call) -> bool:
    """Whether this is a grouped convolution, including depthwise ones and their gradients.

    XLA gathers all operands of groups with several channels. It loses blocks of depthwise convolutions where two axes cut the
    channels, and adds up the gradients of their kernels over axes that cut nothing too.
    """
    if call.primitive != "conv_general_dilated":
        return False
    images, features = call.params["batch_group_count"], call.params["feature_group_count"]
    return images > 1 or features > 1
