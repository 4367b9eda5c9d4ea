"""Baselines: the shardings that people use today, as restrictions of the same problem.

A baseline says how arguments lie and what weights are computed in; what it does not say is completed optimally, in the same
tables, so that a
plan is compared with the best version of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardplan.search.coarsen import FREE
from shardplan.search.problem import Domain, Problem


@dataclass(frozen=True, slots=True)
class Restriction:
    """A named restriction: a domain for each variable; ``regather``: no forward copy of a weight is kept for the backward
    pass.
    """

    name: str
    domains: tuple[Domain, ...]
    regather: bool = False


def baselines(problem: Problem) -> tuple[Restriction, ...]:
    """All baselines that exist on these factors; one whose batch or weights do not divide is left out."""
    m = len(problem.sizes)
    everything = tuple(range(m))
    found: list[Restriction | None] = [
        _make(problem, "replicated"),
        _make(problem, "data parallel", data=everything),
        _make(problem, "ZeRO-1", data=everything, zero=everything),
        _make(problem, "FSDP", data=everything, shard=everything),
        _make(problem, "tensor parallel", tensor=everything),
    ]
    for i in range(1, m):
        slow, fast = everything[:i], everything[i:]
        suffix = (
            ""
            if m == 2
            else f" ({'x'.join(str(problem.sizes[f]) for f in slow)} | {'x'.join(str(problem.sizes[f]) for f in fast)})"
        )
        found.append(_make(problem, f"data x tensor parallel{suffix}", data=slow, tensor=fast))
        found.append(_make(problem, f"FSDP x tensor parallel{suffix}", data=slow, shard=slow, tensor=fast))
    return tuple(f for f in found if f is not None)


def _make(
    problem: Problem,
    name: str,
    *,
    data: Sequence[int] = (),
    zero: Sequence[int] = (),
    shard: Sequence[int] = (),
    tensor: Sequence[int] = (),
) -> Restriction | None:
    """Batch split over ``data``; optimizer state over ``zero``; all state over ``shard``; matrix weights over ``tensor``."""
    graph, coarse = problem.graph, problem.coarse
    domains = list(problem.domains)
    state = {i for i in graph.feedback if i is not None}
    split_batch = False
    weights: set[int] = set()
    for i, t in enumerate(graph.inputs):
        v = coarse.of[t]
        if v == FREE:
            continue
        if i not in state:
            if t in coarse.parameters or i not in state:
                domain = _keep(problem, v, domains[v], lambda dims: _batch(dims, tuple(data)))
                if not domain:
                    domain = _keep(problem, v, domains[v], lambda dims: not any(dims))
                else:
                    split_batch = split_batch or bool(data)
                domains[v] = domain
            continue
        if t in coarse.parameters and _is_matrix(problem, v):
            weights.add(v)
        over = tuple(sorted({*shard, *(zero if t not in coarse.parameters else ())}))
        along = tuple(tensor) if v in weights and t in coarse.parameters else ()
        domains[v] = _state(problem, v, domains[v], over, along, loose=tuple(tensor) if not along else ())
        if along and not domains[v]:
            return None
    if data and not split_batch:
        return None
    for variable in coarse.variables:
        if variable.kind == "stored" or variable.tensors[0] not in coarse.weights:
            continue
        root = variable.of
        matrix = bool(tensor) and _is_matrix(problem, root)
        allowed = _keep(
            problem, variable.id, domains[variable.id], lambda dims, matrix=matrix: _computed(dims, tuple(tensor), matrix)
        )
        if allowed:
            domains[variable.id] = allowed
    return Restriction(name, tuple(domains), regather=bool(shard))


def _keep(problem: Problem, v: int, domain: Domain, wanted: Callable[[tuple[tuple[int, ...], ...]], bool]) -> Domain:
    space = problem.resharder.space(len(problem.coarse.variables[v].shape))
    return tuple(s for s in domain if wanted(space.states[s][0][:-1]))


def _batch(dims: tuple[tuple[int, ...], ...], over: tuple[int, ...]) -> bool:
    return dims[0] == over and not any(dims[1:])


def _is_matrix(problem: Problem, v: int) -> bool:
    return len([d for d in problem.coarse.variables[v].shape if d > 1]) >= 2


def _state(
    problem: Problem, v: int, domain: Domain, over: tuple[int, ...], along: tuple[int, ...], *, loose: tuple[int, ...]
) -> Domain:
    """Layouts that split exactly ``over`` and ``along`` (``loose`` factors may or may not be used); the nearest that divides."""
    space = problem.resharder.space(len(problem.coarse.variables[v].shape))

    def used(s: int) -> set[int]:
        return {f for d in space.states[s][0] for f in d}

    def whole(s: int) -> bool:  # each of the two groups splits one dim, as one would write it by hand
        dims = [set(d) for d in space.states[s][0] if d]
        return all(any(set(group) <= d for d in dims) for group in (over, along) if group)

    exact = [s for s in domain if used(s) - set(loose) == {*over, *along} and whole(s)]
    if exact or along:
        if not exact:
            exact = [s for s in domain if used(s) - set(loose) == set(along)]
        return tuple(exact)
    best = max((len(used(s) & set(over)) for s in domain), default=0)
    parts = {s: math.prod(problem.sizes[f] for f in used(s) & set(over)) for s in domain if used(s) <= {*over, *loose}}
    most = max(parts.values(), default=1)
    assert best >= 0
    return tuple(s for s in domain if s in parts and parts[s] == most)


def _computed(dims: tuple[tuple[int, ...], ...], tensor: tuple[int, ...], matrix: bool) -> bool:
    used = {f for d in dims for f in d}
    return used == set(tensor) if matrix else used <= set(tensor)
