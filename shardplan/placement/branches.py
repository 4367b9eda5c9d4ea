"""Independent branches of the graph of operators: which there are, and their groups of devices by FD-DPS.

A *unit* is an operator, or all operators on a shared weight: the steps of an unrolled layer. A *joint* is a unit that comes
before or after every other; branches lie beside each other between joints. For the scheduler, branches are tasks and groups are
devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx

from shardplan.dag import schedule_dag
from shardplan.placement.configurations import Group, partitions_of
from shardplan.placement.device_groups import Floats, GroupTimes, proportional_groups
from shardplan.placement.operators import OperatorGraph

Unit = tuple[int, ...]
"""Operators that stay together, ascending."""


def units_of(graph: OperatorGraph, *, tied: bool) -> tuple[Unit, ...]:
    """The units in an order in which each comes after those that it reads; ``tied``: operators on one weight are a unit.

    Units that would read each other are one.
    """
    links: Any = nx.DiGraph()
    links.add_nodes_from(range(len(graph.operators)))
    links.add_edges_from((e.producer, e.consumer) for e in graph.edges)
    for w in graph.weights if tied else ():
        for u in w.users[1:]:
            links.add_edges_from([(w.users[0], u), (u, w.users[0])])
    return _in_order([tuple(sorted(part)) for part in nx.strongly_connected_components(links)], graph)


@dataclass(frozen=True, slots=True)
class Branches:
    """Units merged into branches, in order. ``joint`` [branches]: it is a joint. ``section`` [branches]: joints before it."""

    units: tuple[Unit, ...]
    joint: tuple[bool, ...]
    section: tuple[int, ...]


def branches_of(graph: OperatorGraph, units: Sequence[Unit]) -> Branches:
    """Joints, and what is connected between two of them; ``units`` in order."""
    links = _links(graph, units)
    joint, section = _joints(links)
    within = [(a, b) for a, b in links.edges if section[a] == section[b] and not joint[a] and not joint[b]]
    return _merged(graph, units, within, joint, section)


def chains_of(graph: OperatorGraph, units: Sequence[Unit]) -> Branches:
    """Joints, and the longest chains of units between them: finer branches, some inside of others."""
    links = _links(graph, units)
    joint, section = _joints(links)
    within = [
        (a, b)
        for a, b in links.edges
        if links.out_degree(a) == 1 and links.in_degree(b) == 1 and section[a] == section[b] and not joint[a] and not joint[b]
    ]
    return _merged(graph, units, within, joint, section)


def _joints(links: Any) -> tuple[list[bool], list[int]]:
    """For each unit, whether it is a joint, and the number of joints before it. Units are in order."""
    count = links.number_of_nodes()
    before, after = [0] * count, [0] * count  # bit masks of units
    for n in range(count):
        for a in links.predecessors(n):
            before[n] |= before[a] | 1 << a
    for n in reversed(range(count)):
        for b in links.successors(n):
            after[n] |= after[b] | 1 << b
    joint = [a.bit_count() + b.bit_count() == count - 1 for a, b in zip(before, after, strict=True)]
    mask = sum(1 << n for n, own in enumerate(joint) if own)
    return joint, [(own & mask).bit_count() for own in before]


def _merged(
    graph: OperatorGraph,
    units: Sequence[Unit],
    within: Sequence[tuple[int, int]],
    joint: Sequence[bool],
    section: Sequence[int],
) -> Branches:
    """The branches that these edges between units connect."""
    inner: Any = nx.Graph()
    inner.add_nodes_from(range(len(units)))
    inner.add_edges_from(within)
    parts = [sorted(part) for part in nx.connected_components(inner)]
    first = {tuple(sorted(i for n in part for i in units[n])): part[0] for part in parts}
    merged = _in_order(list(first), graph)
    return Branches(merged, tuple(joint[first[u]] for u in merged), tuple(section[first[u]] for u in merged))


def _links(graph: OperatorGraph, units: Sequence[Unit]) -> Any:
    """The graph of units, by number."""
    at = {i: n for n, unit in enumerate(units) for i in unit}
    links: Any = nx.DiGraph()
    links.add_nodes_from(range(len(units)))
    links.add_edges_from((a, b) for e in graph.edges if (a := at[e.producer]) != (b := at[e.consumer]))
    return links


def _in_order(units: Sequence[Unit], graph: OperatorGraph) -> tuple[Unit, ...]:
    ranked = sorted(units)
    return tuple(ranked[n] for n in nx.lexicographical_topological_sort(_links(graph, ranked)))


def partitions(times: GroupTimes, branches: Branches) -> list[tuple[str, tuple[Group, ...]]]:
    """Disjoint groups for branches, each with its name: by the work of branches between two joints, and of equal sizes.

    The shares are the shares of the section with the most work among those with several branches.
    """
    shape = times.problem.machine.cluster.shape
    work: dict[int, list[float]] = {}
    for unit, joint, section in zip(branches.units, branches.joint, branches.section, strict=True):
        if not joint:
            work.setdefault(section, []).append(times.operators_s(unit, (0,)))
    beside = [own for own in work.values() if len(own) > 1]
    if not beside:
        return []
    found: list[tuple[str, tuple[Group, ...]]] = []
    shares = proportional_groups(shape, max(beside, key=sum))
    if shares:
        found.append(("groups by work", shares))
    count = math.prod(shape)
    for size in range(1, count):
        for groups in partitions_of(shape, size) if count % size == 0 else ():
            if groups != shares:
                found.append((groups_text(groups), groups))
    return found


def groups_text(groups: Sequence[Group]) -> str:
    """The name that equal groups share."""
    size = len(groups[0])
    return f"groups of {size}" + (" across levels" if groups[0][-1] - groups[0][0] >= size else "")


def scheduled_on(times: GroupTimes, branches: Sequence[Unit], groups: Sequence[Group]) -> tuple[Group, ...]:
    """The group of each operator: each branch whole on the group that FD-DPS gives it."""
    graph = times.problem.graph
    at = {i: n for n, unit in enumerate(branches) for i in unit}
    seconds = [[times.operators_s(unit, group) for group in groups] for unit in branches]
    edges: dict[tuple[int, int], Floats] = {}
    for edge, between in zip(graph.edges, times.edges_s(groups), strict=True):
        pair = at[edge.producer], at[edge.consumer]
        if pair[0] != pair[1]:
            edges[pair] = edges[pair] + between if pair in edges else between
    found = schedule_dag(seconds, edges)
    return tuple(groups[found.device[at[i]]] for i in range(len(graph.operators)))
