"""The best programs of a collective, those that take a level apart included, and how they lie on the factors.

A ring of n devices passes messages n - 1 times. Rings over two divisors, n = a b, pass them only a + b - 2 times, at the price
of one more launch. So a level of many devices is worth taking apart for few bytes: 72 as 8 x 9. The text of such a program says
so first: ``gpu=8x9: (gpu.0, Parallel(root), AllReduce) ...``. Neither the text nor the price depends on the factors that a plan
cuts the level into: neighbouring factors that a collective runs over are joined before the level is taken apart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..cost.network import Network
from ..ir import Collective
from ..mesh.factoring import joined
from .dsl import Reduction, ReductionError, parse
from .envelope import envelope, lowest
from .laying import Laying, Part
from .parts import runs, seams
from .ranking import Entries, entries, names_of
from .states import Goal


@dataclass(frozen=True, slots=True)
class Division:
    """A level taken apart: ``major`` blocks of ``minor`` neighbours."""

    level: str
    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.level}={self.major}x{self.minor}"


@dataclass(frozen=True, slots=True, eq=False)
class Hierarchy:
    """The levels that a program runs over, as indices of the factors of a network of its own.

    ``runs`` are the factors that were joined, and ``parts`` the factors of ``network`` that each run became: one, or the two of
    the division.
    """

    network: Network
    levels: Entries
    names: tuple[str, ...]
    runs: tuple[tuple[int, ...], ...]
    parts: tuple[tuple[int, ...], ...]

    def laying(self, axes: Sequence[str]) -> Laying:
        """How the levels lie on mesh axes; ``axes`` names the axis of each factor, in the order of the factors."""
        over = {i for entry in self.levels for i in entry}
        part_of: dict[int, Part] = {}
        names: list[tuple[str, ...]] = []
        sizes: list[int] = []
        for run, parts in zip(self.runs, self.parts, strict=True):
            if over.isdisjoint(parts):
                continue
            left = math.prod(self.network.factors[i].size for i in parts)
            sizes.append(left)
            for i in parts:
                left //= self.network.factors[i].size
                part_of[i] = (len(names), self.network.factors[i].size, left)
            names.append(tuple(axes[f] for f in run))
        return Laying(tuple(names), tuple(sizes), tuple(tuple(part_of[i] for i in entry) for entry in self.levels))


@dataclass(frozen=True, slots=True)
class FastestProgram:
    """A program that is the fastest for some bytes, and its line."""

    latency_s: float
    seconds_per_byte: float
    program: Reduction
    text: str


def best_programs(network: Network, over: Sequence[int], goal: Goal = Collective.ALL_REDUCE) -> tuple[FastestProgram, ...]:
    """The fastest programs over these factors for any number of bytes, fewest first: of whole levels, or of one taken apart."""
    key = ("best programs", frozenset(over), goal)
    if key not in network.memo:
        found: list[tuple[float, float, int, FastestProgram]] = []
        for division in (None, *divisions(network, over)):
            of = hierarchy(network, over, division)
            prefix = "" if division is None else f"{division}: "
            result = envelope(of.network, [i for entry in of.levels for i in entry], goal, of.levels)
            for (latency_s, slope), program in zip(result.lines.tolist(), result.programs, strict=True):
                one = FastestProgram(latency_s, slope, program, prefix + program.text(of.names))
                found.append((latency_s, slope, len(program.steps), one))
        network.memo[key] = tuple(lowest(found))
    return network.memo[key]


def divisions(network: Network, over: Sequence[int]) -> list[Division]:
    """The ways to take one level of a collective apart."""
    of = hierarchy(network, over)
    result: list[Division] = []
    for level, entry in zip(of.names, of.levels, strict=True):
        sizes = [of.network.factors[i].size for i in entry]
        n = math.prod(sizes)
        result += [Division(level, a, n // a) for a in range(2, n) if n % a == 0 and _boundary(a, sizes)]
    return result


_DIVIDED = re.compile(r"([^\s=]+)=(\d+)x(\d+): ")


def read(network: Network, over: Sequence[int], text: str) -> tuple[Reduction, Hierarchy]:
    """The program of a text of `best_programs` over some factors, and its levels.

    Raises `ReductionError` if it is not a program over them.
    """
    found = _DIVIDED.match(text)
    division = Division(found[1], int(found[2]), int(found[3])) if found else None
    of = hierarchy(network, over, division)
    return parse(text[found.end() :] if found else text, of.names), of


def hierarchy(network: Network, over: Sequence[int], division: Division | None = None) -> Hierarchy:
    """The levels of a collective over some factors, one of them taken apart if there is a ``division``.

    Raises `ReductionError` if the factors do not allow it.
    """
    key = ("hierarchy", frozenset(over), division)
    if key not in network.memo:
        network.memo[key] = _hierarchy(network, frozenset(over), division)
    return network.memo[key]


def _hierarchy(network: Network, over: frozenset[int], division: Division | None) -> Hierarchy:
    whole_runs = runs(len(network.factors), frozenset(i for i in seams(network.factors) if {i, i + 1} <= over))
    factors = list(joined(network.cluster, network.factors, whole_runs))
    coarse = network.over(factors)
    levels = entries(coarse, [n for n, run in enumerate(whole_runs) if run[0] in over])
    names = names_of(coarse, levels)
    parts = tuple((n,) for n in range(len(whole_runs)))
    if division is None:
        return Hierarchy(coarse, levels, names, whole_runs, parts)
    which = names.index(division.level) if division.level in names else -1
    entry = levels[which] if which >= 0 else ()
    sizes = [factors[i].size for i in entry]
    boundary = _boundary(division.major, sizes) if min(division.major, division.minor) > 1 else None
    if boundary is None or math.prod(sizes) != division.major * division.minor:
        have = " x ".join(map(str, sizes)) or "none of its devices"
        raise ReductionError(f"{division} does not take apart {division.level!r}, of which the collective runs over {have}")
    at, ways = boundary
    major, minor, whole = entry[: at + 1], entry[at + 1 :], factors[entry[at]]
    if ways < whole.size:
        i = entry[at]
        rest = whole.size // ways
        factors[i : i + 1] = [replace(whole, size=ways, stride=whole.stride * rest), replace(whole, size=rest)]
        parts = tuple((n, n + 1) if n == i else (n + (n > i),) for n in range(len(whole_runs)))
        levels = tuple(tuple(j + (j > i) for j in one) for one in levels)
        major, minor = (*entry[:at], i), (i + 1, *(j + 1 for j in entry[at + 1 :]))
    levels = (*levels[:which], major, minor, *levels[which + 1 :])
    names = (*names[:which], f"{division.level}.0", f"{division.level}.1", *names[which + 1 :])
    return Hierarchy(network.over(factors), levels, names, whole_runs, parts)


def _boundary(major: int, sizes: Sequence[int]) -> tuple[int, int] | None:
    """The place in a row of factors at which the first ``major`` blocks end: a factor, and how many of its ways they take; None
    if they end within a way.
    """
    for at, size in enumerate(sizes):
        if major <= size:
            return None if size % major else (at, major)
        if major % size:
            return None
        major //= size
    return None
