"""Judges whether two runs of a step are equal up to rounding, and by how much they differ.

Equal means, for every leaf after every step: |sharded - single| is at most ten times the largest change that perturbations of the
arguments cause, plus 1e-6 of the leaf's largest finite number. Infinities and NaN are in the same places, except where a
perturbation makes them come or go. Integers, booleans and random keys are equal exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from shardplan.errors import ShardplanError
from shardplan.ir import Program
from shardplan.verify.fewer import Fewer

ALLOWED = 10.0
"""The multiple of the largest change by a perturbation that the tolerance allows."""
FLOOR = 1e-6
"""The part of the leaf's largest finite number that the tolerance allows in addition."""


@dataclass(frozen=True, slots=True)
class Worst:
    """The leaf of the result that came closest to its tolerance, or went furthest beyond it; ``step`` counts from one."""

    path: str
    step: int
    error: float
    tolerance: float


@dataclass(frozen=True, slots=True)
class Largest:
    """The leaf with the largest error, relative to its maximum. ``noise`` is the change, relative to the same maximum, that one
    unit in the last place of the inputs causes: where it is large, the step itself does not determine the leaf. A leaf that is
    not ``inexact`` (integers, booleans, keys) must be the same.
    """

    path: str
    step: int
    error: float
    noise: float
    inexact: bool = True


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The change that perturbations cause in a leaf. ``size`` is the largest difference among places that stay finite;
    ``unsettled`` are the places where infinities or NaN come or go (None for none).
    """

    size: float = 0.0
    unsettled: NDArray[np.bool_] | None = None

    def with_run(self, single: NDArray[Any], nudged: NDArray[Any], *, integers: bool = False) -> Sensitivity:
        """The change with one more perturbed run of the leaf. With ``integers``, places where integers differ are unsettled."""
        exact = not jnp.issubdtype(single.dtype, jnp.inexact)
        differs = single != nudged if integers and exact else _differs_in_kind(single, nudged)
        unsettled = self.unsettled if not differs.any() else differs if self.unsettled is None else self.unsettled | differs
        return Sensitivity(max(self.size, difference(single, nudged, unsettled)), unsettled)


@dataclass(frozen=True, slots=True)
class ReferenceFault:
    """The fault of the step compiled for one device, found by the same step evaluated op by op.

    ``path`` is the leaf that is furthest beyond its ``tolerance``, ``unequal`` are all that are beyond it. ``primitive`` and
    ``source`` are the first op whose compiled value differs and the user's line. If both are empty, no op was found, because
    the compiler merges other ops in a smaller program; ``ops`` then lists those on which the leaf depends. ``sharded`` says
    whether the sharded step is right, has the same fault, or differs from both. Loops that are too long to run op by op ran as
    one program: ``whole`` lists them.
    """

    path: str
    step: int
    error: float
    tolerance: float
    unequal: tuple[str, ...]
    primitive: str
    source: str
    sharded: Literal["right", "same", "wrong"]
    ops: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """The op at fault as text, or the ops that may be."""
        if self.primitive:
            return f"first at {self.primitive}, {self.source}"
        last = "; ".join(self.ops[-4:])
        ops = f"{self.path} depends on {len(self.ops)} ops, the last of which are {last}"
        return f"at an op that is right when compiled again: {ops}"

    def __str__(self) -> str:
        sharded = {
            "right": "the sharded step is right",
            "same": "the sharded step is wrong in the same way, which is the compiler's fault and not the plan's",
            "wrong": "the sharded step is wrong in another way",
        }
        return (
            f"the reference is at fault: the step compiled for one device differs from the step op by op in {self.path}, by "
            f"{self.error:.3g} ({self.tolerance:.3g} is rounding), {self.where}; {sharded[self.sharded]}"
        )

    @property
    def json(self) -> dict[str, Any]:
        """The fields as JSON values, with the whole as ``text``."""
        return asdict(self) | {"text": str(self)}


@dataclass(frozen=True, slots=True)
class Judged:
    """The paths of unequal leaves, how many of the ``numbers`` could be ``compared``, and the leaves to report. Where a
    shrunken copy of the step ran, ``fewer`` says what it had less of. If the step compiled for one device is wrong,
    ``reference`` says so, and the leaves were compared with the step op by op.
    """

    unequal: tuple[str, ...]
    compared: int
    numbers: int
    largest: Largest
    worst: Worst
    fewer: tuple[Fewer, ...] = ()
    reference: ReferenceFault | None = None

    @property
    def ran(self) -> str:
        """The step that ran, and what its run does not show."""
        return f"{ran(self.fewer)}, {NOT_SHOWN}" if self.fewer else ran(self.fewer)


def require_results(program: Program) -> None:
    """Refuses a step without a result, of which any two runs are equal.

    Raises:
        ShardplanError: if the step returns no array.
    """
    if not program.outputs:
        raise ShardplanError("the step returns no array, so there is nothing to compare: let it return what it computes")


NOT_SHOWN = (
    "which has the layouts and cuts of the plan, but not the shapes and values of the whole step: a fault that only those show "
    "goes unnoticed"
)


def ran(fewer: Sequence[Fewer]) -> str:
    """The whole step, or its shrunken copy, as text."""
    return f"a shrunken copy ({', '.join(map(str, fewer))})" if fewer else "the whole step"


def difference(a: NDArray[Any], b: NDArray[Any], left_out: NDArray[np.bool_] | None = None) -> float:
    """The largest difference outside the places left out; infinite where only one number is finite, or infinities differ."""
    gaps = _gaps(a, b)
    return float(np.max(gaps if left_out is None else np.where(left_out, 0.0, gaps), initial=0.0))


def furthest(a: NDArray[Any], b: NDArray[Any], error: float) -> tuple[int, ...]:
    """The first place at which two leaves differ by ``error``, as in `difference`."""
    return tuple(int(i) for i in np.argwhere(_gaps(a, b) == error)[0])


def _gaps(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """The difference at each place: at least 1 for unequal integers, infinite where it is no finite number."""
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return np.where(a == b, 0.0, np.maximum(1.0, np.abs(a.astype(np.float64) - b.astype(np.float64))))
    x, y = wide(a), wide(b)
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.abs(x - y)
    return np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, np.where(np.isfinite(gap), gap, np.inf))


def wide(x: NDArray[Any]) -> NDArray[Any]:
    """The numbers in double precision."""
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _differs_in_kind(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    """Places where only one number is finite, or where infinities or NaN differ."""
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return np.zeros(a.shape, np.bool_)
    x, y = wide(a), wide(b)
    same = (x == y) | (np.isnan(x) & np.isnan(y)) | (np.isfinite(x) & np.isfinite(y))
    return ~same


def judge(
    paths: Sequence[str],
    single: Sequence[Sequence[NDArray[Any]]],
    found: Sequence[Sequence[NDArray[Any]]],
    changes: Sequence[Sequence[Sensitivity]],
) -> Judged:
    """Compares the leaves after each step, given the changes that perturbations cause in each."""
    unequal: list[str] = []
    largest, compared, numbers = Largest("", 0, 0.0, 0.0), 0, 0
    worst, ratio = Worst("", 0, 0.0, 0.0), -1.0
    for n, (wanted, got, change) in enumerate(zip(single, found, changes, strict=True), 1):
        for path, a, b, c in zip(paths, wanted, got, change, strict=True):
            error = difference(b, a, c.unsettled)
            exact = not jnp.issubdtype(a.dtype, jnp.inexact)
            sizes = np.abs(wide(a))
            numbers += a.size
            compared += a.size if exact else int(np.isfinite(sizes).sum())
            scale = float(np.max(sizes, initial=0.0, where=np.isfinite(sizes)))
            tolerance = 0.0 if exact else ALLOWED * c.size + FLOOR * scale
            if error > tolerance and path not in unequal:
                unequal.append(path)
            if error:
                relative, noise = (e / scale if scale else float("inf") if e else 0.0 for e in (error, c.size))
                largest = max(largest, Largest(path, n, relative, noise, not exact), key=lambda found: found.error)
            part = error / tolerance if tolerance else float("inf") if error else 0.0
            if part > ratio:
                worst, ratio = Worst(path, n, error, tolerance), part
    return Judged(tuple(unequal), compared, numbers, largest, worst)
