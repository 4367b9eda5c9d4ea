"""Tofu's premise (sections 4 and 5): every worker group cuts every op, and every tensor is stored once over all workers.

Under it communication alone is worth minimising, and the recursion over the factors is optimal (appendix, theorem 5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardplan.collectives.moves import State
from shardplan.search.graph import Signature
from shardplan.search.options import Cuts
from shardplan.search.pricing import Domain, Limits
from shardplan.search.problem import Problem
from shardplan.tdl import cut


def everything_split(problem: Problem, domains: Sequence[Domain], *, upto: int | None = None) -> tuple[Domain, ...]:
    """Of each domain the states that split a tensor into the most parts, over the first ``upto`` factors alone."""
    count = len(problem.sizes) if upto is None else upto
    memo: dict[tuple[int, Domain], Domain] = {}
    found: list[Domain] = []
    for variable, domain in zip(problem.coarse.variables, domains, strict=True):
        space = problem.space(variable.id)
        key = space.rank, domain
        if key not in memo:
            memo[key] = _most_split(space.states, problem.sizes, domain, count)
        found.append(memo[key])
    return tuple(found)


def _most_split(states: Sequence[State], sizes: Sequence[int], domain: Domain, count: int) -> Domain:
    parts: dict[int, int] = {}
    for s in domain:
        dims, partial = states[s]
        used = [f for d in dims for f in d]
        if not partial and all(f < count for f in used):
            parts[s] = math.prod(sizes[f] for f in used)
    most = max(parts.values(), default=0)
    return tuple(s for s, n in parts.items() if n == most) or domain


def everything_cut(problem: Problem, *, upto: int | None = None, reduce: bool = True) -> Limits:
    """Every op is cut over each of the first ``upto`` factors that can cut it; without ``reduce``, along no reduction."""
    count = len(problem.sizes) if upto is None else upto
    memo: dict[int, Cuts] = {}
    found: dict[int, Cuts] = {}
    for n in problem.coarse.joins:
        signature = problem.graph.nodes[n].signature
        if signature.id not in memo:
            memo[signature.id] = _cuts(signature, problem.sizes, count, reduce)
        found[n] = memo[signature.id]
    return Limits(found)


def _cuts(signature: Signature, sizes: Sequence[int], count: int, reduce: bool) -> Cuts:
    description = signature.description
    loops = () if description is None else tuple(v for v, info in enumerate(description.loops) if reduce or info.reducer is None)

    def may(f: int) -> frozenset[int]:
        if f >= count or description is None:
            return frozenset({-1})
        return frozenset(v for v in loops if cut(description, v, sizes[f], pad=True) is not None) or frozenset({-1})

    return tuple(may(f) for f in range(len(sizes)))
