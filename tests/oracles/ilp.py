"""The same problem as an integer program for HiGHS: the second oracle, for problems too large to try every assignment.

One binary for each state of each variable, one number for each entry of each table, linked so that a table's entries add up to
the state that they belong to (the program of the local polytope, with binaries).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from shardplan.search.problem.cost_tables import BIG, Costs
from shardplan.search.problem.pricing import Domain
from shardplan.search.problem.problem import Problem

_UNIT = 1e6  # picoseconds in the solver's unit: it works to about six digits after the point


@dataclass(frozen=True, slots=True)
class Answer:
    """What the solver says: ``status`` as in `scipy.optimize.milp` (0: optimal, 1: stopped by the time limit, 2: infeasible).

    ``picoseconds`` is the cost of ``states``, added up anew in integers; ``bound_picoseconds`` what the solver proves.
    """

    status: int
    message: str
    picoseconds: int | None
    bound_picoseconds: float | None
    states: tuple[int, ...]


def solve(
    problem: Problem, domains: Sequence[Domain] | None = None, *, time_limit_s: float = 600.0, relax: bool = False
) -> Answer:
    """The optimum over these domains (by default all layouts). ``relax`` drops integrality: only the bound counts then."""
    own = problem.domains if domains is None else domains
    sizes = problem.ops.sizes(own)
    tables, constant = _merged(problem, own)
    first = [0, *itertools.accumulate(sizes)]
    cost, upper = [np.zeros(first[-1])], [np.ones(first[-1])]
    rows: list[NDArray[np.int64]] = []
    columns: list[NDArray[np.int64]] = []
    values: list[NDArray[np.float64]] = []
    right: list[float] = []

    def row(at: NDArray[np.int64], value: NDArray[np.float64], total: float) -> None:
        rows.append(np.full(len(at), len(right), np.int64))
        columns.append(at)
        values.append(value)
        right.append(total)

    for v, n in enumerate(sizes):
        row(np.arange(first[v], first[v] + n, dtype=np.int64), np.ones(n), 1.0)
    entries = int(first[-1])
    for scope, table in tables.items():
        if len(scope) == 1:
            at = slice(first[scope[0]], first[scope[0] + 1])
            cost[0][at] += table / _UNIT
            upper[0][at] = np.where(table >= BIG, 0.0, upper[0][at])
            continue
        index = np.arange(entries, entries + table.size).reshape(table.shape)
        entries += table.size
        cost.append((np.where(table >= BIG, 0, table) / _UNIT).ravel())
        upper.append(np.where(table >= BIG, 0.0, 1.0).ravel())
        for axis, v in enumerate(scope):
            for s in range(sizes[v]):
                mine = np.take(index, s, axis=axis).ravel()
                row(np.append(mine, first[v] + s), np.append(np.ones(len(mine)), -1.0), 0.0)
    cost[0][upper[0] == 0.0] = 0.0
    matrix = csr_array((np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape=(len(right), entries))
    integral = np.zeros(entries, np.int64)
    integral[: first[-1]] = 0 if relax else 1
    result = milp(
        np.concatenate(cost),
        integrality=integral,
        bounds=Bounds(np.zeros(entries), np.concatenate(upper)),
        constraints=LinearConstraint(matrix, right, right),
        options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
    )
    bound = result.fun if relax else result.mip_dual_bound
    bound_ps = None if bound is None else float(bound) * _UNIT + constant
    if result.x is None:
        return Answer(int(result.status), str(result.message), None, bound_ps, ())
    chosen = [int(np.argmax(result.x[first[v] : first[v + 1]])) for v in range(len(sizes))]
    total = constant + sum(int(table[tuple(chosen[v] for v in scope)]) for scope, table in tables.items())
    states = tuple(d[i] for d, i in zip(own, chosen, strict=False))  # those of strategies come after
    return Answer(int(result.status), str(result.message), total, bound_ps, states)


def _merged(problem: Problem, domains: Sequence[Domain]) -> tuple[dict[tuple[int, ...], Costs], int]:
    """(one table for each scope, the constant beside them)."""
    tables: dict[tuple[int, ...], Costs] = {}
    constant = 0
    for term in problem.terms(domains):
        constant += term.constant
        table = problem.store.tables[term.table]
        order = sorted(range(len(term.scope)), key=term.scope.__getitem__)
        scope = tuple(term.scope[i] for i in order)
        table = table.transpose(order)
        tables[scope] = np.minimum(tables[scope] + table, BIG) if scope in tables else table
    return tables, constant
