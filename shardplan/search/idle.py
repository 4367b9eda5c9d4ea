"""Factors over which a plan cuts nothing: the devices along them all do the same work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from shardplan.ir import Tensor
from shardplan.search.extract import Decisions
from shardplan.search.problem import Problem

Reason = Literal["faster", "indivisible", "padded"]
"""Why a factor is idle: any cut would cost more than it saves; there is nothing to cut; only ops on padded copies are cut."""


@dataclass(frozen=True, slots=True)
class Idle:
    """A factor over which nothing, or no argument, is cut. ``advice`` says what would let it be, where dims do not divide."""

    name: str
    size: int
    reason: Reason
    advice: str = ""

    @property
    def text(self) -> str:
        """What it means, and what to do."""
        factor = f"{self.name}={self.size}"
        if self.reason == "faster":
            return f"nothing is cut over {factor}: its devices all do the same, which is faster than any exchange"
        if self.reason == "padded":
            return (
                f"no dim of any argument divides by {factor}: each is whole on all its devices, and ops cut padded copies; "
                f"{self.advice}"
            )
        return f"no dim of the step divides by {factor}, nor is it worth padding one: its devices all do the same; {self.advice}"


def idle(problem: Problem, decisions: Decisions) -> tuple[Idle, ...]:
    """The idle factors of a plan.

    A device count that fits no dim (a prime one, mostly) is planned all the same; this says what came of it.
    """
    layouts = [*decisions.layouts, *decisions.views.values()]
    busy = {f for layout in layouts if layout is not None for f in layout.used}
    busy |= {f for use in decisions.uses.values() for f, loop in enumerate(use.loops) if loop >= 0}
    possible = _possible(problem) if len(busy) < len(problem.factors) else set[int]()
    arguments = [tensor for t in problem.graph.inputs if (tensor := problem.graph.tensors[t]).size > 1]
    found: list[Idle] = []
    for f, factor in enumerate(problem.factors):
        if f not in busy and f in possible:
            found.append(Idle(factor.name, factor.size, "faster"))
        elif f not in busy or (arguments and not any(_divides(factor.size, tensor) for tensor in arguments)):
            found.append(Idle(factor.name, factor.size, "padded" if f in busy else "indivisible", _advice(problem, f)))
    return tuple(found)


def _possible(problem: Problem) -> set[int]:
    """The factors over which some op can be cut with its operands and results in layouts that arrays of their shapes may have."""
    found: set[int] = set()
    for n in problem.coarse.joins:
        call, rows = problem.graph.nodes[n].signature.call, problem.options(problem.graph.nodes[n])
        fine = np.ones(len(rows.loops), bool)
        for shapes, states in ((call.operands, rows.needs), (call.results, rows.gives)):
            for i, shape in enumerate(shapes):
                fine &= problem.resharder.legal(shape, pad=True)[states[:, i]]
        found.update(f for cuts, may in zip(rows.loops, fine, strict=True) if may for f, loop in enumerate(cuts) if loop >= 0)
    return found


def _advice(problem: Problem, f: int) -> str:
    """Other sizes of the factor's level that divide a dim of the largest argument, or other dims."""
    factor, level = problem.factors[f], problem.cluster.levels[problem.factors[f].level]
    graph = problem.graph
    named = [(graph.tensors[t], path) for t, path in zip(graph.inputs, graph.input_paths, strict=True)]
    pad = f"change the dims to multiples of {factor.size}"
    if not named:
        return pad
    largest, path = max(named, key=lambda row: row[0].nbytes)
    counts = _near(level.size, largest)
    other = f"; {' or '.join(map(str, counts))} in place of {level.name}={level.size} divide it" if counts else ""
    return f"{pad}; the largest argument is {path} {list(largest.shape)}{other}"


def _near(count: int, tensor: Tensor) -> tuple[int, ...]:
    """The next count below and the next above (up to twice as many) that divide a dim."""
    below = next((k for k in range(count - 1, 1, -1) if _divides(k, tensor)), None)
    above = next((k for k in range(count + 1, 2 * count + 1) if _divides(k, tensor)), None)
    return tuple(k for k in (below, above) if k is not None)


def _divides(count: int, tensor: Tensor) -> bool:
    return any(n % count == 0 for n in tensor.shape)
