"""Running emitted strategies: many compiled as one program, taken apart where something in it cannot be compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from shardplan.errors import DescriptionError
from shardplan.mesh import Cluster
from shardplan.search.problem.composite_strategies import Options
from shardplan.tdl import Description, describe
from shardplan.tdl.localize import evaluate
from shardplan.tdl.proof import CASES, Case, Drawn, applications
from tests.emit.proof.cuts import Cuts, Emitted
from tests.processes import outcome

TOGETHER = 48
"""So many strategies are compiled as one program."""


@dataclass(frozen=True, order=True)
class Draw:
    """A case of a primitive by its seed, on one mesh; with ``gradient`` the ops of its vector-Jacobian product instead."""

    primitive: str
    seed: int
    mesh: str
    odd: bool = False
    gradient: bool = False


@dataclass(frozen=True)
class Task:
    """Draws to run together under a backend, at most so many strategies of each op; with ``only`` just that number's.

    The fence of the name ``without`` does not apply: the partitioner gets its cuts.
    """

    draws: tuple[Draw, ...]
    most: int
    only: int | None = None
    backend: str = "specs"
    without: str = ""


@dataclass
class Tally:
    """What was run: cuts of one loop, of several, operands or results that are partial, those that were uneven; the classes of
    parameters that were met; draws that gave no call (``undrawn``), and tasks for which there was no time (``skipped``).
    """

    cases: int = 0
    cuts: int = 0
    pairs: int = 0
    partial: int = 0
    uneven: int = 0
    idle: int = 0
    skipped: int = 0
    primitives: Counter[str] = field(default_factory=Counter[str])
    classes: Counter[str] = field(default_factory=Counter[str])
    undrawn: Counter[str] = field(default_factory=Counter[str])
    faults: list[str] = field(default_factory=list[str])

    def add(self, other: Tally) -> None:
        """Takes in what another one counted."""
        for name in (
            "cases",
            "cuts",
            "pairs",
            "partial",
            "uneven",
            "idle",
            "skipped",
            "primitives",
            "classes",
            "undrawn",
            "faults",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))


def cases_of(draw: Draw) -> list[Case]:
    """The call that is drawn, or every described op of its gradient. A case that cannot be drawn with odd dims gives none."""
    try:
        case = CASES[draw.primitive](Drawn(draw.seed, odd=draw.odd))
    except (ValueError, TypeError, AssertionError, IndexError):
        if draw.odd:
            return []
        raise
    return _of_gradient(case) if draw.gradient else [case]


def strategies(draw: Draw, most: int, backend: str = "specs") -> list[Emitted]:
    """At most so many strategies of each op of a draw, by its seed."""
    mesh = mesh_of(draw.mesh)
    found: list[Emitted] = []
    for n, case in enumerate(cases_of(draw)):
        rng = np.random.default_rng([draw.seed, n])
        cuts = Cuts(case, draw.mesh, backend)
        rows = cuts.options
        found += [cuts.emitted(rows, row, mesh, rng) for row in sorted(_chosen(rows, most, rng))]
    return found


def _chosen(rows: Options, most: int, rng: np.random.Generator) -> list[int]:
    """Strategies by which each loop, or set of operands handed on, is met on each axis if so many suffice; then any."""
    left, chosen = rng.permutation(len(rows.loops)).tolist(), list[int]()
    seen: set[tuple[int, int]] = set()
    while left and len(chosen) < most:
        fresh = [len({*enumerate(rows.loops[row].tolist())} - seen) for row in left]
        row = left.pop(int(np.argmax(fresh)))
        seen.update(enumerate(rows.loops[row].tolist()))
        chosen.append(row)
    return chosen


def mesh_of(shape: str) -> Mesh:
    """The first simulated devices as a mesh of this shape."""
    sizes = [int(n) for n in shape.split("x")]
    names = [level.name for level in Cluster.load(shape).levels]
    return Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), names)


def run(task: Task, tell: Callable[[Emitted], None]) -> Tally:
    """Runs the strategies of a task. ``tell`` hears of each that is about to run alone: it may end the process."""
    tally = Tally()
    every: list[Emitted] = []
    for draw in task.draws:
        made = outcome(lambda draw=draw: strategies(draw, task.most, task.backend))
        if isinstance(made, BaseException):
            tally.faults.append(f"{draw}: {_first_line(made)}")
        else:
            every += made
            tally.undrawn.update([] if made else [f"{draw.primitive}{' gradient' if draw.gradient else ''}"])
    every = every if task.only is None else every[task.only : task.only + 1]
    for shape in dict.fromkeys(d.mesh for d in task.draws):
        mine = [e for e in every if e.name.startswith(f"{shape} ")]
        for start in range(0, len(mine), TOGETHER):
            tally.faults += _faults(mine[start : start + TOGETHER], tell)
    for e in every:
        _count(tally, e)
    return tally


def _faults(some: Sequence[Emitted], tell: Callable[[Emitted], None]) -> list[str]:
    """The faults of strategies that are compiled together, or in halves where that raises."""
    if len(some) == 1:
        tell(some[0])
    results = outcome(lambda: _together(some))
    if not isinstance(results, BaseException):
        return [fault for e, own in zip(some, results, strict=True) for fault in e.faults(own)]
    if len(some) == 1:
        return [f"{some[0].name}: {_first_line(results)}"]
    half = len(some) // 2
    return _faults(some[:half], tell) + _faults(some[half:], tell)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"


def _together(some: Sequence[Emitted]) -> list[list[Any]]:
    """The results of each strategy, all of them compiled as one program."""
    program = jax.jit(lambda args: [e.emitter(*own) for e, own in zip(some, args, strict=True)])
    return program([e.arguments for e in some])


def _count(tally: Tally, e: Emitted) -> None:
    cut = sorted({v for v in e.loops if v >= 0})
    tally.cases += 1
    tally.cuts += len(cut) == 1
    tally.pairs += len(cut) > 1
    tally.partial += any(v < -1 for v in e.loops) or any(e.kept)
    tally.idle += -1 in e.loops and bool(cut)
    tally.uneven += e.uneven
    tally.primitives[e.primitive] += 1
    tally.classes.update(f"{e.primitive} {kind}" for kind in e.classes)


def _of_gradient(case: Case) -> list[Case]:
    """Every described op that is no elementwise one of a call's vector-Jacobian product, each once."""
    step = gradient(case)
    if step is None:
        return []
    kept: dict[str, Case] = {}
    for made in applications(*step):
        known = _described(made)
        if known is not None and not known.elementwise:
            kept.setdefault(f"{made.call.primitive} {made.call.operands} {made.call.params}", made)
    return list(kept.values())


def gradient(case: Case) -> tuple[Any, ...] | None:
    """(a call's vector-Jacobian product as a function, its arguments); None where it has none."""
    if not _plain(case):
        return None
    inexact = [i for i, x in enumerate(case.operands) if jnp.issubdtype(np.asarray(x).dtype, jnp.inexact)]

    def function(*floats: Any) -> Any:
        operands = list(case.operands)
        for i, x in zip(inexact, floats, strict=True):
            operands[i] = x
        return [y for y in evaluate(case.call, operands) if jnp.issubdtype(y.dtype, jnp.inexact)]

    def product(cotangents: Any, *floats: Any) -> Any:
        return jax.vjp(function, *floats)[1](cotangents)

    floats = [case.operands[i] for i in inexact]
    rng = np.random.default_rng(0)
    try:
        cotangents = [np.asarray(rng.standard_normal(y.shape), y.dtype) for y in jax.eval_shape(function, *floats)]
        jax.eval_shape(product, cotangents, *floats)
    except (NotImplementedError, ValueError, TypeError):
        return None  # JAX has no rule for it
    return (product, cotangents, *floats) if cotangents and floats else None


def _described(case: Case) -> Description | None:
    try:
        return describe(case.call)
    except DescriptionError:
        return None


def _plain(case: Case) -> bool:
    return all(not str(getattr(x, "dtype", "")).startswith("key") for x in case.operands)
