"""The summands of a step's cost: one list from which tables, bounds, assignment prices and collectives follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shardplan.graph.nodes import Graph, Node
from shardplan.search.coarsening.coarsen import FREE, Coarse

Kind = Literal["interior", "host", "op", "link", "view"]


@dataclass(frozen=True, slots=True)
class Summand:
    """One summand of a step's cost: a function of the layouts of the variables in ``scope`` (distinct), paid ``weight`` times.

    ``at`` says what it prices:

    - ``interior``: the elementwise ops inside variable ``at``.
    - ``host``: the copies of the arrays of variable ``at`` from host memory and back.
    - ``op``: op ``at`` of the graph, which joins variables: its compute, and the resharding of its operands and results.
    - ``link``: link ``at`` of the graph: the resharding of a tensor that enters or leaves a loop.
    - ``view``: view ``at``: the copy of a variable for readers that want another layout.
    """

    kind: Kind
    at: int
    scope: tuple[int, ...]
    weight: float


def summands_of(
    graph: Graph,
    coarse: Coarse,
    interior: Iterable[int],
    hosted: Iterable[int],
    scope_of: Callable[[Node], tuple[int, ...]],
    weight: Mapping[int, float],
) -> tuple[Summand, ...]:
    """All summands: ``interior`` are variables with ops inside, ``hosted`` those with arrays in host memory.

    ``scope_of`` gives an op's variables, ``weight`` a view's.
    """
    result = [Summand("interior", v, (v,), 1.0) for v in interior]
    result += [Summand("host", v, (v,), 1.0) for v in hosted]
    for n in coarse.joins:
        if scope := scope_of(graph.nodes[n]):
            result.append(Summand("op", n, scope, graph.nodes[n].weight))
    for k, link in enumerate(graph.links):
        ends = coarse.of[link.source], coarse.of[link.target]
        if ends[0] != FREE and (ends[0] != ends[1] or link.lift):
            result.append(Summand("link", k, tuple(dict.fromkeys(v for v in ends if v != FREE)), link.weight))
    for v in coarse.variables:
        if v.kind != "stored":
            scope = (v.of, v.id) if v.kind == "view" else (v.of, v.sibling, v.id)
            result.append(Summand("view", v.id, scope, weight[v.id]))
    return tuple(result)


def by_variable(summands: Sequence[Summand]) -> dict[int, list[Summand]]:
    """The summands that each variable appears in."""
    groups: dict[int, list[Summand]] = {}
    for s in summands:
        for v in s.scope:
            groups.setdefault(v, []).append(s)
    return groups
