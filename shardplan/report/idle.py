"""Axes over which a plan cuts nothing: the devices along them all do the same work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from shardplan.plans import Plan
    from shardplan.search.problem import Problem


def idle_axes(plan: Plan) -> dict[str, str]:
    """Why each idle axis is idle, by its name: no dim of the step divides by its size, or every cut costs more than it saves.

    A device count that fits no dim (a prime one, mostly) is planned all the same; this says what came of it.
    """
    problem = plan.extractor.problem
    layouts = [*plan.decisions.layouts, *plan.decisions.views.values()]
    busy = {f for layout in layouts if layout is not None for f in layout.used}
    busy |= {f for use in plan.decisions.uses.values() for f, loop in enumerate(use.loops) if loop >= 0}
    idle = [f for f in range(len(problem.factors)) if f not in busy]
    if not idle:
        return {}
    possible = _possible(problem)
    found: dict[str, str] = {}
    for f in idle:
        name, size = problem.factors[f].name, problem.factors[f].size
        if f in possible:
            found[name] = f"nothing is cut over {name}={size}: its devices all do the same, which is faster than any exchange"
        else:
            found[name] = (
                f"no dim of the step divides by {size}, nor is it worth padding one: the devices of {name} all do the same; "
                f"change the dims to multiples of {size}, or the number of devices"
            )
    return found


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
