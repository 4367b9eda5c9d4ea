"""What a dim that does not divide costs: the size that would, and the step planned anew with that size in its place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardplan.graph.flatten import flatten
from shardplan.ir import Op, Program
from shardplan.search.coarsening.coarsen import coarsen
from shardplan.search.problem.problem import Objective, Problem
from shardplan.search.strategy.pins import for_pins, pinned_domains
from shardplan.search.strategy.solve import in_seconds, search

if TYPE_CHECKING:
    from shardplan.plans.plan import Plan

_TILE = 128
"""Matrix units work on tiles of this many elements: a large dim is padded to a multiple of it too."""
_LARGE = 1024
_SIZES = frozenset(
    "batch_group_count feature_group_count fft_lengths length limit_indices new_sizes padding_config reps shape sizes slice_sizes"
    " start_indices".split()
)
"""Parameters of primitives that hold sizes of dims (a depthwise convolution has a group for each channel); all others hold axes,
counts, strides or modes, which stay as they are.
"""


@dataclass(frozen=True, slots=True)
class Uneven:
    """A dim that not every axis divides: ``axes`` do not, ``padded`` is the next size that all devices divide."""

    dim: int
    size: int
    axes: tuple[str, ...]
    padded: int


def uneven(shape: Sequence[int], axes: Mapping[str, int]) -> tuple[Uneven, ...]:
    """The dims that some axis does not divide although they have an element for every device.

    >>> uneven((768, 50257), {"node": 2, "gpu": 4})
    (Uneven(dim=1, size=50257, axes=('node', 'gpu'), padded=50304),)
    """
    found: list[Uneven] = []
    for dim, n in enumerate(shape):
        bad = tuple(name for name, k in axes.items() if n % k)
        if bad and n >= math.prod(axes.values()):
            found.append(Uneven(dim, n, bad, padded(n, math.prod(axes.values()))))
    return tuple(found)


def padded(size: int, devices: int) -> int:
    """The next size that ``devices`` divide, and tiles too where the dim is large."""
    unit = math.lcm(devices, _TILE) if size >= _LARGE else devices
    return -(-size // unit) * unit


def priced(size: int) -> bool:
    """Whether padding a dim of this size can be priced: smaller numbers stand in a program for other things too."""
    return size >= _TILE


def padded_seconds(plan: Plan, old: int, new: int) -> float | None:
    """Step time of the best plan of the step with ``new`` in place of every ``old`` in its shapes; infinite where none fits.

    None where nobody can tell: the step makes other sizes out of this one. The plan's pins hold, and its objective. It takes as
    long as planning.
    """
    program = _resized(plan.program, old, new)
    if not _whole(plan.program, program):
        return None
    graph = flatten(program, replicate=plan.replicate)
    coarse, donated = coarsen(graph, plan.extractor.problem.coarse.one_choice), frozenset(plan.donated_leaves)
    objective: Objective = "bytes" if plan.objective == "bytes" else "time"
    pins = {glob: tuple(spec) for glob, spec in plan.pins.items()}
    problem = for_pins(Problem(graph, coarse, plan.cluster, plan.factors, objective=objective), pins)
    outcome = search(
        problem,
        limit=plan.memory_limit,
        donated=donated,
        domains=pinned_domains(problem, pins),
        deadline=None,
        observer=lambda _what, _part: None,
    )
    if not outcome.best.fits(plan.memory_limit):
        return math.inf
    return outcome.best.seconds if objective == "time" else in_seconds(problem, outcome, donated)[1].best.seconds


def _resized(program: Program, old: int, new: int) -> Program:
    tensors = tuple(replace(t, shape=_swap(t.shape, old, new)) for t in program.tensors)
    ops = tuple(_resized_op(op, old, new) for op in program.ops)
    return replace(program, tensors=tensors, ops=ops)


def _resized_op(op: Op, old: int, new: int) -> Op:
    params = {name: _swap(value, old, new) if name in _SIZES else value for name, value in op.params.items()}
    return replace(
        op, params=params, trips=_swap(op.trips, old, new), bodies=tuple(_resized(body, old, new) for body in op.bodies)
    )


def _whole(before: Program, after: Program) -> bool:
    """Whether operands and results of an op that had as many elements still have: a reshape of a part of the size would not."""
    for op, other in zip(before.ops, after.ops, strict=True):
        tensors = (*op.tensors, *op.outputs)
        if len({(before.tensors[t].size, after.tensors[t].size) for t in tensors}) != len(
            {before.tensors[t].size for t in tensors}
        ):
            return False
        if not all(_whole(a, b) for a, b in zip(op.bodies, other.bodies, strict=True)):
            return False
    return True


def _swap(value: Any, old: int, new: int) -> Any:
    """Sizes that are multiples of ``old`` become the same multiples of ``new``, in tuples as deep as they go."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value // old * new if value and value % old == 0 else value
    if isinstance(value, tuple):
        items = [_swap(v, old, new) for v in value]  # type: ignore[reportUnknownVariableType]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)  # type: ignore[reportUnknownVariableType]
    return value
