"""Prices of reduction programs on a network, and the best program (P2, section 5).

The steps of a program run one after another, so its time is the sum of theirs. A step runs in all its groups at once, on the
part of the data that its members then hold, with the fastest algorithm unless one is forced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..cost.network import Algorithm, Network
from ..ir import Collective
from .dsl import Instruction, Master, Reduction, ReductionError, Shape, groups
from .states import Goal, P2Collective
from .synthesis import Order, synthesize

Floats = NDArray[np.float64]
Entries = tuple[tuple[int, ...], ...]


def entries(network: Network, over: Sequence[int]) -> Entries:
    """The synthesis hierarchy of a reduction over factors: one entry per level, slowest first, its factors collapsed."""
    by_level: dict[int, list[int]] = {}
    for i in sorted(set(over), key=lambda i: (network.factors[i].level, -network.factors[i].stride)):
        if network.factors[i].size > 1:
            by_level.setdefault(network.factors[i].level, []).append(i)
    return tuple(tuple(by_level[level]) for level in sorted(by_level))


def shape_of(network: Network, levels: Entries) -> Shape:
    """The sizes of a hierarchy's entries."""
    return tuple(int(np.prod([network.factors[i].size for i in entry])) for entry in levels)


def names_of(network: Network, levels: Entries) -> tuple[str, ...]:
    """The names of a hierarchy's entries: those of the cluster's levels."""
    return tuple(network.cluster.level_names[network.factors[entry[0]].level] for entry in levels)


@lru_cache(maxsize=65536)
def payloads(program: Reduction, shape: Shape, goal: Goal = Collective.ALL_REDUCE) -> tuple[float, ...]:
    """The part of the data that each step moves per device: its operand, for an AllGather its result.

    >>> from .dsl import parse
    >>> text = "(n, InsideGroup, ReduceScatter) (n, Parallel(root), AllReduce) (n, InsideGroup, AllGather)"
    >>> payloads(parse(text, ("n", "g")), (4, 8))
    (1.0, 0.125, 1.0)
    """
    # a device's part depends only on whether it is the first member of each level, so two devices a level stand for all
    twos = tuple(min(n, 2) for n in shape)
    start = 1.0 / np.prod(shape) if goal == Collective.ALL_GATHER else 1.0
    held = [float(start)] * int(np.prod(twos))
    moved: list[float] = []
    for step in program.steps:
        among = groups(twos, step)
        low, high = step.span(len(shape))
        members = float(np.prod(shape[low:high]))
        moved.append(max(held[g[0]] for g in among) * (members if step.collective == Collective.ALL_GATHER else 1.0))
        for group in among:
            after = held_after(step.collective, [held[d] for d in group], members)
            for device, part in zip(group, after, strict=True):
                held[device] = part
    return tuple(moved)


def held_after(collective: P2Collective, held: Sequence[float], members: float) -> list[float]:
    """The parts that a group's members hold after a collective; ``members`` is the group's true size."""
    match collective:
        case Collective.ALL_REDUCE:
            return list(held)
        case Collective.REDUCE_SCATTER:
            return [part / members for part in held]
        case Collective.ALL_GATHER:
            return [part * members for part in held]
        case Collective.REDUCE:
            return [held[0]] + [0.0] * (len(held) - 1)
        case Collective.BROADCAST:
            return [held[0]] * len(held)


def step_lines(network: Network, levels: Entries, step: Instruction, algorithm: Algorithm) -> Floats:
    """The rows (latency_s, seconds_per_byte) of one step over the entries of a hierarchy. # [A, 2]"""
    low, high = step.span(len(levels))
    over = tuple(i for entry in levels[low:high] for i in entry)
    below = tuple(i for entry in levels[high:] for i in entry) if isinstance(step.form, Master) else ()
    return network.lines(step.collective, over, first=below, algorithm=algorithm)


def check_bytes(nbytes: float) -> None:
    """Refuse a negative or non-finite number of bytes, for which no program is the best."""
    if not math.isfinite(nbytes) or nbytes < 0:
        raise ReductionError(f"{nbytes} bytes cannot be reduced: give a finite number of at least 0")


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Programs of one hierarchy, priced for any number of bytes.

    ``costs`` [U, A, 2] are the lines of the distinct steps, already per byte of the whole operand. ``steps`` [P, S] are the rows
    of each program's steps in ``costs``, padded with the step that costs nothing.
    """

    programs: tuple[Reduction, ...]
    costs: Floats
    steps: NDArray[np.int64]

    def seconds(self, nbytes: float) -> Floats:
        """The time of each program.  # [P]"""
        step_seconds = np.min(self.costs[:, :, 0] + self.costs[:, :, 1] * nbytes, axis=1)
        return step_seconds[self.steps].sum(axis=1)

    def best(self, nbytes: float) -> tuple[float, Reduction]:
        """The least time and its program; ties go to the earlier program, which is the shorter one of synthesized programs."""
        check_bytes(nbytes)
        times = self.seconds(nbytes)
        first = int(np.flatnonzero(times <= times.min() * (1 + 1e-12))[0])
        return float(times[first]), self.programs[first]


def table(
    network: Network,
    over: Sequence[int],
    programs: Sequence[Reduction] | None = None,
    *,
    algorithm: Algorithm = "auto",
    max_size: int = 5,
    goal: Goal = Collective.ALL_REDUCE,
    order: Order | None = None,
    levels: Entries | None = None,
) -> Table:
    """Prices of all programs of at most ``max_size`` steps (or of those given) for a reduction over these factors.

    ``levels`` is the hierarchy, by default the `entries` of the factors.
    """
    levels = entries(network, over) if levels is None else levels
    shape = shape_of(network, levels)
    if programs is None:
        programs = synthesize(len(levels), max_size, goal, order) if levels else (Reduction((), 0),)
    rows: dict[tuple[Instruction | None, float], int] = {(None, 0.0): 0}
    costs = [np.zeros((1, 2))]
    steps = np.zeros((len(programs), max((len(p.steps) for p in programs), default=0)), np.int64)
    for p, program in enumerate(programs):
        for s, (step, part) in enumerate(zip(program.steps, payloads(program, shape, goal), strict=True)):
            if (step, part) not in rows:
                rows[step, part] = len(costs)
                costs.append(step_lines(network, levels, step, algorithm) * np.array([1.0, part]))
            steps[p, s] = rows[step, part]
    widest = max(len(c) for c in costs)
    padded = np.stack([np.concatenate([c, np.repeat(c[-1:], widest - len(c), axis=0)]) for c in costs])
    return Table(tuple(programs), padded, steps)


def program_seconds(
    network: Network,
    over: Sequence[int],
    program: Reduction,
    nbytes: float,
    *,
    algorithm: Algorithm = "auto",
    goal: Goal = Collective.ALL_REDUCE,
) -> float:
    """The time of one program over these factors."""
    return float(table(network, over, [program], algorithm=algorithm, goal=goal).seconds(nbytes)[0])
