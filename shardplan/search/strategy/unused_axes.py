"""Factors over which a plan cuts nothing: the devices along them all do the same work."""

from __future__ import annotations

from dataclasses import dataclass

from shardplan.ir import Tensor
from shardplan.search.problem.extract import Decisions
from shardplan.search.problem.problem import Problem

REPEATED = "its devices all do the same"
"""The text about a factor over which devices repeat each other's work."""


@dataclass(frozen=True, slots=True)
class Idle:
    """A factor over which nothing is cut, or over which no argument can be split; ``advice`` then says what would help.

    ``works``: ops are still cut over it, on padded copies.
    """

    name: str
    size: int
    works: bool
    advice: str = ""

    @property
    def text(self) -> str:
        """The meaning and the remedy."""
        factor = f"{self.name}={self.size}"
        if not self.advice:
            return f"nothing is cut over {factor}: {REPEATED}, which is faster than any exchange"
        effect = "only ops on padded copies are cut" if self.works else REPEATED
        return f"no dim of any argument divides by {factor}: each is whole on all its devices, and {effect}; {self.advice}"


def idle(problem: Problem, decisions: Decisions) -> tuple[Idle, ...]:
    """The idle factors of a plan.

    A device count that fits no dim (mostly a prime) is still planned; this says which factors do nothing then.
    """
    layouts = [*decisions.layouts, *decisions.views.values()]
    busy = {f for layout in layouts if layout is not None for f in layout.used}
    busy |= {f for use in decisions.uses.values() for f, loop in enumerate(use.loops) if loop >= 0}
    arguments = [tensor for t in problem.graph.inputs if (tensor := problem.graph.tensors[t]).size > 1]
    result: list[Idle] = []
    for f, factor in enumerate(problem.factors):
        if arguments and not any(_divides(factor.size, tensor) for tensor in arguments):
            result.append(Idle(factor.name, factor.size, f in busy, _advice(problem, f)))
        elif f not in busy:
            result.append(Idle(factor.name, factor.size, False))
    return tuple(result)


def _advice(problem: Problem, f: int) -> str:
    """Advice to change dims, or to use a size of the factor's level that divides a dim of the largest argument."""
    factor, level = problem.factors[f], problem.cluster.levels[problem.factors[f].level]
    graph = problem.graph
    named = [(graph.tensors[t], path) for t, path in zip(graph.inputs, graph.input_paths, strict=True)]
    largest, path = max(named, key=lambda row: row[0].nbytes)
    counts = _near(level.size, largest)
    other = f"; {' or '.join(map(str, counts))} in place of {level.name}={level.size} divide it" if counts else ""
    return f"change the dims to multiples of {factor.size}; the largest argument is {path} {list(largest.shape)}{other}"


def _near(count: int, tensor: Tensor) -> tuple[int, ...]:
    """The next count below and the next above (up to twice as many) that divide a dim."""
    below = next((k for k in range(count - 1, 1, -1) if _divides(k, tensor)), None)
    above = next((k for k in range(count + 1, 2 * count + 1) if _divides(k, tensor)), None)
    return tuple(k for k in (below, above) if k is not None)


def _divides(count: int, tensor: Tensor) -> bool:
    return any(n % count == 0 for n in tensor.shape)
