"""Facts about ops beyond their index maps: which run on the host, and which cuts XLA's partitioner gets wrong.

A *fenced* cut is not left to the partitioner: each device runs it on its own share (`shardplan.emit.calls`), and only where it
divides. A fence holds in all tested releases unless its ``releases`` name some; docs/accuracy.md says what goes wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shardplan.ir import PAIRS, Backend
from shardplan.tdl import language as lang
from shardplan.tdl.description import Call, Description, children
from shardplan.tdl.index import loops_of
from shardplan.tdl.strategies import in_step
from shardplan.versions import TESTED, may_have

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


_DIES_OF_EMPTY = frozenset({"0.11.2"})
"""Releases whose compiler dies (a segmentation fault) where the function of a `jax.shard_map` reads an operand without elements.
The smallest program: ``jax.jit(jax.shard_map(jnp.sum, mesh=mesh, in_specs=P(), out_specs=P()))(jnp.zeros(0))``.
"""


def may_die(
    primitives: Iterable[tuple[str, Sequence[int]]], backend: str, sizes: Sequence[int] = (), release: str | None = None
) -> str | None:
    """Why the compiler of a release of JAX, by default the installed one, may die of a program; None if no reason is known.

    ``primitives`` are the ops of the program, each with the element count of each operand. ``sizes`` are those of the mesh axes
    over which the partitioner cuts the program (none: it cuts nothing). Only the ``specs`` backend, and the step as its user
    wrote it, run a `jax.shard_map` as it is.
    """
    if may_have((), release):
        return "this release is untested"
    deadly = may_have(_DIES_OF_EMPTY, release) and backend == "specs"
    if deadly and any(name == "shard_map" and 0 in counts for name, counts in primitives):
        return "a jax.shard_map of the step has an operand without elements"
    if backend == "specs" and aborts_on_two_axes(sizes, release):
        mesh = " x ".join(map(str, sizes))
        return f"its partitioner may abort where it moves two axes of a mesh of {mesh} at once"
    return None


_ABORTS_ON_TWO_AXES = frozenset({"0.11.2", "0.12.0.1"})
"""Releases whose partitioner aborts ("Could not slice dimension") where a constraint moves two axes at once whose sizes do not
divide one another. On a mesh of 3 x 2, named n and g: from ``P(None, "n")`` to ``P(("n", "g"))``.
"""


def aborts_on_two_axes(sizes: Sequence[int], release: str | None = None) -> bool:
    """Whether a release of JAX, by default the installed one, may abort where a constraint moves two axes at once, on a mesh with
    axes of these sizes.
    """
    odd = any(a % b and b % a for a, b in itertools.combinations(sizes, 2))
    return odd and may_have(_ABORTS_ON_TWO_AXES, release)


_MERGES_SLICES = frozenset({"0.10.2", "0.11.2"})
"""Releases whose compiler merges two nested dynamic slices although a start may be out of range (`shardplan.tdl.rewrite`). The
smallest program: ``lambda x, i: lax.dynamic_slice(lax.dynamic_slice(x, (i,), (6,)), (i % 3,), (2,))`` with an ``i`` that is out
of range.
"""


def merges_slices() -> bool:
    """Whether the installed release may merge nested dynamic slices into one that starts elsewhere."""
    return may_have(_MERGES_SLICES)


_AND_OR = ("and", "or")
_EXTREMES = ("max", "min")
_REDUCTIONS = ("reduce_max", "reduce_min")
_WINDOW_EXTREMES = ("reduce_window_max", "reduce_window_min")
_WINDOWS = frozenset({"reduce_window", "select_and_scatter_add"})
_SCATTERS = frozenset({"scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"})
_MISALIGNED = frozenset({"pad", "slice"})

_SPLIT_BY_JAX = frozenset({"scaled_matmul_wrapper"})
"""cuDNN's kernels, which JAX itself splits for the partitioner, and only in some ways."""

_UNBATCHED = frozenset({"conv_general_dilated", "tie"})
"""Their terms are added up at once: under `vmap` a convolution becomes a grouped one, whose operands the partitioner gathers, and
a tie has no batching rule."""

_NONE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Fence:
    """A fault of XLA's partitioner: each device cuts these ``loops`` of a call itself, on its own share; they are never padded.

    ``fault`` says what the partitioner does; ``releases`` are the tested releases of JAX that have the fault (all of them,
    unless some are named). In the others the fence does not apply. A call that is fenced ``alone`` may neither keep partial sums
    nor pass them on. ``python -m tests.emit.proof.fences`` lifts each fence and prints what goes wrong. It proves
    ``primitives``, whose calls or gradients have the fault, with draws from ``seed`` on.
    """

    name: str
    primitives: tuple[str, ...]
    fault: str
    loops: Callable[[Call, Description], frozenset[int]]
    alone: bool = False
    seed: int = 0
    releases: tuple[str, ...] = tuple(TESTED)


def _every_loop(applies: Callable[[Call], bool]) -> Callable[[Call, Description], frozenset[int]]:
    return lambda call, description: frozenset(range(len(description.loops))) if applies(call) else _NONE


def _moving_loops(call: Call, description: Description) -> frozenset[int]:
    """The loops of a slice or a padding along which elements move: those that are not read at their own index alone."""
    if call.primitive not in _MISALIGNED:
        return _NONE
    return frozenset(v for v in range(len(description.loops)) if in_step(description, v) is None)


def _bitwise_loops(call: Call, description: Description) -> frozenset[int]:
    """The loops that integers are reduced over by and/or: the partitioner has no such collective."""
    if not call.dtypes or call.dtypes[0] == "bool":
        return _NONE
    return frozenset(v for v, loop in enumerate(description.loops) if loop.reducer in _AND_OR)


def _extreme_loops(call: Call, description: Description) -> frozenset[int]:
    """The loops over which windows of floats are reduced by max/min."""
    if call.primitive not in _WINDOW_EXTREMES or "float" not in call.dtypes[0]:
        return _NONE
    return frozenset(v for v, loop in enumerate(description.loops) if loop.reducer in _EXTREMES)


def _spatial_loops(call: Call, description: Description) -> frozenset[int]:
    """The loops of a convolution over places of the result and of the kernel."""
    if call.primitive != "conv_general_dilated":
        return _NONE
    numbers = call.params["dimension_numbers"]
    out, kernel = (tuple(map(int, spec[2:])) for spec in (numbers.out_spec, numbers.rhs_spec))
    spatial = {description.results[0][d] for d in out}
    for operand, indices in description.accesses:
        if operand == 1:
            spatial.update(v for d in kernel for v in loops_of(indices[d]))
    return frozenset(spatial)


def _in_groups(call: Call) -> bool:
    """Whether this is a grouped convolution, including depthwise ones and their gradients."""
    if call.primitive != "conv_general_dilated":
        return False
    images, features = call.params["batch_group_count"], call.params["feature_group_count"]
    return images > 1 or features > 1


_LOST_NAN = "max and min of floats: reduced loops of windows"
FENCES = (
    Fence(
        "convolution: loops over space",
        ("conv_general_dilated",),
        "adds up gradients over axes that cut nothing, misplaces halos under strides, aborts where the image is dilated",
        _spatial_loops,
        seed=7,
    ),
    Fence(
        "convolution in groups: every loop",
        ("conv_general_dilated",),
        "loses blocks of depthwise ones, adds up the gradients of their kernels over axes that cut nothing",
        _every_loop(_in_groups),
        alone=True,
    ),
    Fence(
        "scatter: every loop",
        tuple(sorted(_SCATTERS)),
        "padding of updates that are cut unevenly lands in row 0",
        _every_loop(lambda call: call.primitive in _SCATTERS),
    ),
    Fence(
        "pooling by any function, gradient of max pooling: every loop",
        tuple(sorted(_WINDOWS)),
        "compares zeros from beyond a block, counts a start that is no identity once more",
        _every_loop(lambda call: call.primitive in _WINDOWS),
        alone=True,
    ),
    Fence(
        "slice, pad: loops that move elements",
        (*sorted(_MISALIGNED), "cummax", "cumprod", "cumlogsumexp"),
        "makes programs that XLA's own verifier refuses",
        _moving_loops,
    ),
    Fence("and, or of integers: reduced loops", ("reduce_and", "reduce_or"), "has no such all-reduce on the CPU", _bitwise_loops),
    Fence(_LOST_NAN, (*_REDUCTIONS, *_WINDOW_EXTREMES), "loses NaN", _extreme_loops),
)
"""The faults of the partitioner, found by running every cut of every primitive (`tests/emit/proof`) on each tested release."""


def fences() -> tuple[Fence, ...]:
    """The fences that hold in the installed release of JAX."""
    return tuple(fence for fence in FENCES if may_have(fence.releases))


def fenced_loops(call: Call, description: Description | None, *, run_by_user: bool, backend: Backend) -> frozenset[int]:
    """The loops of a call that are never padded, and that the partitioner does not cut under ``specs``.

    These are all loops of calls that a user or a library runs, because what they do with padding is unknown. Under ``specs``,
    which runs such cuts on shares that divide, they are also all loops of calls that the partitioner cannot cut (`uncuttable`),
    and those of `fences`.
    """
    if description is None:
        return _NONE
    if run_by_user or _is_function(call) or (backend == "specs" and uncuttable(call, description)):
        return frozenset(range(len(description.loops)))
    return _NONE.union(*(fence.loops(call, description) for fence in fences())) if backend == "specs" else _NONE


def loses_nan(call: Call, partial: bool) -> bool:
    """Whether the partitioner could lose NaN in reducing terms of this call; ``partial``: whether there are terms to reduce."""
    if not (partial and call.dtypes and "float" in call.dtypes[0] and call.primitive in (*_REDUCTIONS, *_WINDOW_EXTREMES)):
        return False
    return any(fence.name == _LOST_NAN for fence in fences())


def shared_loops(call: Call, description: Description | None, *, run_by_user: bool) -> frozenset[int]:
    """Under ``specs``, the loops of a call that each device cuts on its own share where they divide.

    These are the fenced loops, and all loops of a call that keeps a loop whole or reduces pairs: XLA would gather its operands.
    """
    if description is not None and _keeps_whole(description):
        return frozenset(range(len(description.loops)))
    return fenced_loops(call, description, run_by_user=run_by_user, backend="specs")


def uncuttable(call: Call, description: Description | None) -> bool:
    """Whether the partitioner cannot cut this call: named calls, kernels, opaque functions, and calls that are fenced alone."""
    if _is_function(call):
        return True
    if description is None:
        return False
    whole = any(loop.whole for loop in description.loops)
    alone = any(fence.alone and fence.loops(call, description) for fence in fences())
    return alone or (whole and any(_is_opaque(tree) for tree in description.trees))


def adds_up_at_once(call: Call, description: Description | None, *, run_by_user: bool, backend: Backend) -> bool:
    """Whether this call may neither keep partial sums nor pass them on."""
    if run_by_user or _is_function(call) or (description is not None and _keeps_whole(description)):
        return True
    return backend == "specs" and (uncuttable(call, description) or call.primitive in _UNBATCHED)


def _is_function(call: Call) -> bool:
    """Whether a function of the user's or a library's runs this call."""
    return ":" in call.primitive or call.primitive in _SPLIT_BY_JAX


def _keeps_whole(description: Description) -> bool:
    """Whether a call keeps a loop whole, or reduces pairs."""
    return any(loop.whole or loop.reducer in PAIRS for loop in description.loops)


def _is_opaque(tree: lang.Scalar) -> bool:
    """Whether an opaque function has arguments; an `Opaque` without arguments only marks loops that stay whole."""
    match tree:
        case lang.HiddenLoops(args) | lang.OpaqueResult(args) if args:
            return True
        case lang.Apply("where", _, "transformed"):
            return True
        case _:
            return any(_is_opaque(child) for child in children(tree))
