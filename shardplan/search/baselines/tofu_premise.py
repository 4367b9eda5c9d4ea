"""Tofu's premise (sections 4 and 5): every worker group cuts every op, and every tensor is stored once over all workers.

Under it only communication is worth minimising, and the recursion over the factors is optimal (appendix, theorem 5).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardplan.collectives.layouts import LayoutSpace
from shardplan.graph.nodes import Node, Signature
from shardplan.search.problem.composite_strategies import Cuts
from shardplan.search.problem.cost_tables import Costs, picoseconds
from shardplan.search.problem.pricing import Allowed, Domain, Limits
from shardplan.search.problem.problem import Problem
from shardplan.search.problem.solution import Solution


def everything_split(problem: Problem, domains: Sequence[Domain], *, upto: int | None = None) -> tuple[Domain, ...]:
    """The states of each domain that split a tensor into the most parts, over the first ``upto`` factors alone."""
    count = len(problem.sizes) if upto is None else upto
    memo: dict[tuple[int, Domain], Domain] = {}
    result: list[Domain] = []
    for variable, domain in zip(problem.coarse.variables, domains, strict=True):
        space = problem.space(variable.id)
        key = space.rank, domain
        if key not in memo:
            memo[key] = _most_split(space, domain, count)
        result.append(memo[key])
    return tuple(result)


def _most_split(space: LayoutSpace, domain: Domain, count: int) -> Domain:
    rows = np.array(domain, np.int64)
    used = space.roles[rows] != -1
    parts = np.where(used, np.array(space.sizes, np.int64), 1).prod(axis=1)
    parts[space.partial[rows] | used[:, count:].any(axis=1)] = 0
    return tuple(rows[parts == parts.max(initial=0)].tolist()) if parts.any() else domain


def everything_cut(problem: Problem, *, upto: int | None = None, reduce: bool = True) -> Limits:
    """Every op is cut over each of the first ``upto`` factors that can cut it; without ``reduce``, along no reduction."""
    count = len(problem.sizes) if upto is None else upto
    memo: dict[int, Cuts] = {}
    result: dict[int, Cuts] = {}
    for n in problem.coarse.joins:
        signature = problem.graph.nodes[n].signature
        if signature.id not in memo:
            memo[signature.id] = _cuts(signature, problem.sizes, count, reduce)
        result[n] = memo[signature.id]
    return Limits(result)


def _cuts(signature: Signature, sizes: Sequence[int], count: int, reduce: bool) -> Cuts:
    description = signature.description
    loops = () if description is None else tuple(v for v, info in enumerate(description.loops) if reduce or info.reducer is None)

    def may(f: int) -> frozenset[int]:
        if f >= count or description is None:
            return frozenset({-1})
        return frozenset(v for v in loops if signature.cut(v, sizes[f]) is not None) or frozenset({-1})

    return tuple(may(f) for f in range(len(sizes)))


def fewest_bytes(problem: Problem, timed: Problem, solution: Solution) -> Limits:
    """The loops that each op cuts to send the fewest bytes between the layouts of a solution for bytes.

    Ties go to the fastest cut in ``timed``, the same problem priced in seconds.
    """
    memo: dict[object, Cuts] = {}
    result: dict[int, Cuts] = {}
    for n in problem.coarse.joins:
        node, allowed = problem.graph.nodes[n], solution.limits.of(n) if solution.limits else None
        states = tuple(solution.states[v] for v in problem.ops.slots(node)[0])
        key = node.costed.id, timed.ops.slots(node), states, allowed, problem.ops.deferring.get(n)
        if key not in memo:
            costs = [_costs(p, node, states, allowed) for p in (timed, problem)]
            best = np.lexsort(costs)[0]
            memo[key] = tuple(frozenset({loop}) for loop in problem.ops.options(node, allowed).loops[best].tolist())
        result[n] = memo[key]
    return Limits(result)


def _costs(problem: Problem, node: Node, states: tuple[int, ...], allowed: Allowed | None) -> Costs:
    """The cost of each strategy of an op between these layouts, in the problem's unit: whole numbers, so that ties are ties."""
    _, slots, free = problem.ops.slots(node)
    domains = tuple((state,) for state in states)
    late = problem.ops.deferring.get(node.id)
    base, columns = problem.pricer.strategy_costs(node.costed, slots, free, domains, allowed, late=late)
    return picoseconds(base + sum((column[:, 0] for column in columns), np.zeros(len(base))))
