"""What an op holds beside stored values while it runs: operands brought into the layouts that it needs, results not yet reduced.

A gradient that is a partial sum is whole on every device before it is scattered; a stored activation that a product gathers is
there twice. Such buffers live at the op alone. A reduction that leaves a result as large as it was is done in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from shardplan.search.graph import Node
from shardplan.search.options import nbytes
from shardplan.search.pricing import Domain, Limits
from shardplan.search.problem import Problem


def buffers(problem: Problem, assignment: Sequence[int], limits: Limits | None = None) -> NDArray[np.float64]:
    """[nodes + 1]: bytes of one device at each op, with every op cut in its fastest way."""
    found = np.zeros(len(problem.graph.nodes) + 1)
    known: dict[object, float] = problem.buffers
    for n in problem.coarse.joins:
        node = problem.graph.nodes[n]
        scope, slots, _ = problem.slots(node)
        key = (
            node.signature.id,
            slots,
            tuple(assignment[v] for v in scope),
            limits.of(n) if limits else None,
            problem.deferring.get(n),
        )
        held = known.get(key)
        if held is None:
            held = known[key] = float(buffer_table(problem, node, [(s,) for s in key[2]], limits).flat[0]) if scope else 0.0
        found[n] = held
    return found


def buffer_table(problem: Problem, node: Node, own: Sequence[Domain], limits: Limits | None = None) -> NDArray[np.float64]:
    """[*domain sizes]: the buffers of an op for every choice of layouts of its variables, in the strategy fastest there."""
    _, slots, free = problem.slots(node)
    allowed, late = limits.of(node.id) if limits else None, problem.deferring.get(node.id)
    base, columns = problem.pricer.strategy_costs(node.signature, slots, free, tuple(own), allowed, late=late)
    total = _added(base, columns)
    best = total.argmin(axis=0)
    rows = problem.options(node, allowed)
    held = np.zeros(best.shape)
    call = node.signature.call
    for slot in slots:
        shape = (call.results if slot.result else call.operands)[slot.index]
        size = nbytes(shape, (call.result_dtypes if slot.result else call.dtypes)[slot.index])
        local = problem.resharder.space(len(shape)).local
        inside = (rows.gives if slot.result else rows.needs)[:, slot.index][best]
        stored = np.array(own[slot.variable]).reshape([-1 if axis == slot.variable else 1 for axis in range(best.ndim)])
        moved = (inside != stored) & ((local[inside] != local[stored]) | (not slot.result))
        held += np.where(moved, local[inside] * size, 0.0)
    return held


def _added(base: NDArray[np.float64], columns: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """[strategies, *domain sizes]: the seconds of every strategy for every choice of layouts."""
    total = base.reshape(-1, *[1] * len(columns))
    for axis, column in enumerate(columns):
        shape = [1] * len(columns)
        shape[axis] = column.shape[1]
        total = total + column.reshape(-1, *shape)
    return total


def peak_tables(
    problem: Problem, points: Mapping[int, int], domains: Sequence[Domain], limits: Limits | None = None
) -> list[tuple[tuple[int, ...], NDArray[np.float64]]]:
    """(variables, bytes) of the ops at these points, each as often as the point is given."""
    found: list[tuple[tuple[int, ...], NDArray[np.float64]]] = []
    joins = set(problem.coarse.joins)
    for n, times in sorted(points.items()):
        if n in joins and (scope := problem.slots(problem.graph.nodes[n])[0]):
            own = [domains[v] for v in scope]
            found.append((scope, times * buffer_table(problem, problem.graph.nodes[n], own, limits)))
    return found
