"""What is known of ops beside their index maps: which run on the host, and which cuts XLA's partitioner gets wrong.

A cut that is *fenced* is not left to the partitioner: each device runs it on its own share (`shardplan.emit.calls`), and only
where it divides. What is fenced comes from running every cut of every primitive (`tests/emit/proof`) with the jaxlib of
`PROVEN_WITH`; docs/accuracy.md has the table.
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
"""Kept whole without being asked: XLA gathers what they read, and what they return is on every device."""

PLATFORM = "platform_index"
"""Which branch of `jax.lax.platform_dependent` is for the platform: made of nothing, and the same on all devices of one kind."""

KERNELS = frozenset({"mosaic"})
"""Platforms that JAX lowers the insides of kernels for, and never a step: a branch for these alone does not run."""

_KEYS = "use keys of another kind, such as jax.random.key(seed, impl='threefry2x32')"
UNCOMPILED = {
    "mulhi": "multiply in a wider type and shift",
    "philox2x32": _KEYS,
    "philox4x32": _KEYS,
}
"""What XLA compiles for one device alone ("Unable to convert MHLO to StableHLO", however it is sharded), with what to do."""


def uncompiled(primitive: str) -> str | None:
    """What to do about a primitive that XLA compiles for one device alone; None for any other."""
    return UNCOMPILED.get(primitive)


_AND_OR = ("and", "or")
_EXTREMES = ("max", "min")
_REDUCTIONS = ("reduce_max", "reduce_min")

_WINDOWS = frozenset({"reduce_window", "select_and_scatter_add"})
"""The partitioner fills with zeros what max pooling's gradient compares beyond a block, and counts a start that is no identity
once more at the edges."""

_SCATTERS = frozenset({"scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"})
"""The padding of updates that are cut unevenly lands in row 0."""

_MISALIGNED = frozenset({"pad", "slice"})
"""Under constraints inside a program the partitioner makes programs of strided slices and inner padding that its own verifier
refuses, where a loop is read beside its own index."""

_WINDOW_EXTREMES = ("reduce_window_max", "reduce_window_min")

_UNBATCHED = frozenset({"conv_general_dilated", "tie"})
"""Under `vmap` a convolution becomes a grouped one, whose operands the partitioner gathers, and a tie has no rule: their terms
are added up at once."""


def fenced_loops(call: Call, description: Description | None, *, run_by_user: bool) -> frozenset[int]:
    """The loops of a call that only each device itself cuts, on its own share; they are never padded.

    - Calls that the partitioner cannot cut at all (`uncuttable`), and scatters: every loop.
    - Convolutions: the loops over space, where it adds up gradients over axes that cut nothing, and misplaces halos under
      strides and dilations.
    - Slices and padding: the loops along which elements move.
    - Integers reduced by and/or: the reduced loops, for which it has no collective. Windows of floats reduced by max/min
      likewise: it loses NaN (as it does in plain reductions, see `loses_nan`).
    """
    if description is None:
        return frozenset()
    if run_by_user or uncuttable(call, description) or call.primitive in _SCATTERS:
        return frozenset(range(len(description.loops)))
    if call.primitive == "conv_general_dilated":
        return _loops_over_space(call, description)
    if call.primitive in _MISALIGNED:
        return frozenset(v for v in range(len(description.loops)) if in_step(description, v) is None)
    reducers = _AND_OR if call.dtypes and call.dtypes[0] != "bool" else ()
    reducers += _EXTREMES if loses_nan(call, True) and call.primitive not in _REDUCTIONS else ()
    return frozenset(v for v, loop in enumerate(description.loops) if loop.reducer in reducers)


def loses_nan(call: Call, partial: bool) -> bool:
    """Whether NaN could be lost where terms of this call are ``partial`` and reduced by the partitioner."""
    return partial and bool(call.dtypes) and "float" in call.dtypes[0] and call.primitive in (*_REDUCTIONS, *_WINDOW_EXTREMES)


def shared_loops(call: Call, description: Description | None, *, run_by_user: bool) -> frozenset[int]:
    """The loops of a call that each device cuts on its own share where they divide.

    Those that are fenced, and all loops of calls that keep a loop whole or reduce pairs, whose operands XLA would gather.
    """
    if description is not None and _keeps_whole(description):
        return frozenset(range(len(description.loops)))
    return fenced_loops(call, description, run_by_user=run_by_user)


def uncuttable(call: Call, description: Description | None) -> bool:
    """Whether the partitioner cannot cut this call: named calls, windows, opaque functions, convolutions in groups."""
    if ":" in call.primitive or call.primitive in _WINDOWS:
        return True
    if description is None:
        return False
    whole = any(loop.whole for loop in description.loops)
    return _in_groups(description.call) or (whole and any(_is_opaque(tree) for tree in description.trees))


def adds_up_at_once(call: Call, description: Description | None, *, run_by_user: bool) -> bool:
    """Whether partial sums may neither be kept nor passed on by this call."""
    if run_by_user or uncuttable(call, description) or call.primitive in _UNBATCHED:
        return True
    return description is not None and _keeps_whole(description)


def _keeps_whole(description: Description) -> bool:
    """Whether a call keeps a loop whole, or reduces pairs."""
    return any(loop.whole or loop.reducer in PAIRS for loop in description.loops)


def _loops_over_space(call: Call, description: Description) -> frozenset[int]:
    numbers = call.params["dimension_numbers"]
    out, kernel = (tuple(map(int, spec[2:])) for spec in (numbers.out_spec, numbers.rhs_spec))
    found = {description.results[0][d] for d in out}
    for operand, indices in description.accesses:
        if operand == 1:
            found.update(v for d in kernel for v in loops_of(indices[d]))
    return frozenset(found)


def _is_opaque(tree: lang.Scalar) -> bool:
    """Whether some function is handed whole dims; an `Opaque` that is handed nothing only marks loops."""
    match tree:
        case lang.HiddenLoops(args) | lang.OpaqueResult(args) if args:
            return True
        case lang.Apply("where", _, "transformed"):
            return True
        case _:
            return any(_is_opaque(child) for child in children(tree))


def _in_groups(call: Call) -> bool:
    """Whether this is a convolution in groups, depthwise ones and their gradients included.

    XLA gathers the operands of several channels a group whole, loses blocks of depthwise ones where two axes cut the channels,
    and adds up the gradients of their kernels over axes that cut nothing too.
    """
    if call.primitive != "conv_general_dilated":
        return False
    images, features = call.params["batch_group_count"], call.params["feature_group_count"]
    return images > 1 or features > 1
