"""A bounded beam: where one joint table would be too large, a good assignment and a bound on all assignments.

Forwards: a variable whose tables would combine into too large a table is eliminated from groups of them separately (mini-buckets:
Dechter & Rish, JACM 2003). First, costs move between the groups until each state costs the same in every group (Ihler et al., UAI
2012). The tables that remain give a lower bound on completing any partial assignment. Backwards: these bounds rank the states of
each variable. Among the partial assignments that differ in a variable that still matters, the ``beam_width`` most promising are
kept (Kask & Dechter, Artificial Intelligence 2001). No dropped assignment costs less than its estimate; this gives the bound.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.constants import CONSTANTS
from shardplan.search.inference.eliminate import Eliminator, Order, Scoped, arranged_as, met
from shardplan.search.problem.cost_tables import BIG, Costs, TableStore, Term

Places = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Found:
    """An assignment, its cost, and a lower bound on every assignment; the two are equal where the optimum is proved.

    The cost is `BIG` where no assignment was found; the bound too where none exists. The assignment is meaningless then.
    """

    cost: int
    assignment: list[int]
    bound: int


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A variable, the tables that it was eliminated from, and the table that each group of these left, with its minimum."""

    variable: int
    tables: tuple[Scoped, ...]
    left: tuple[tuple[Scoped, int], ...]


def best(eliminator: Eliminator, terms: Sequence[Term], sizes: Sequence[int], order: Order) -> Found:
    """The minimum of a sum of terms: exact where the tables allow, else the best assignment of a beam."""
    if order.largest > CONSTANTS.exact_entries:
        return beam(eliminator, terms, sizes, order, entries=CONSTANTS.beam_part_entries, width=CONSTANTS.beam_width)
    total, assignment = eliminator.solve(terms, sizes, order)
    return Found(total, assignment, total)


def beam(
    eliminator: Eliminator,
    terms: Sequence[Term],
    sizes: Sequence[int],
    order: Order,
    *,
    entries: int,
    width: int,
) -> Found:
    """The best assignment of a beam, and a bound: equal, and so exact, where nothing that matters was dropped.

    Tables have at most ``entries`` entries, or as many as the largest term; the beam keeps ``width`` partial assignments.
    """
    rank = {v: i for i, v in enumerate(order.variables)}
    total, waiting = eliminator.waiting(terms, sizes, rank)
    buckets: list[_Bucket] = []
    for v in order.variables:
        eliminator.check()
        if not waiting[v]:
            continue
        parts = _parts(v, waiting[v], sizes, entries)
        if len(parts) == 1:
            left = [eliminator.left(v, parts[0], sizes, rank)]
        else:
            left = _messages(eliminator.store, v, parts, sizes, rank)
        for (scope, table), low in left:
            total = min(total + low, BIG)
            if scope:
                waiting[scope[0]].append((scope, table))
        buckets.append(_Bucket(v, tuple(waiting[v]), tuple(left)))
    if total >= BIG:
        return Found(BIG, [0] * len(sizes), BIG)
    return _backward(eliminator, sizes, buckets, total, width)


def _parts(v: int, tables: Sequence[Scoped], sizes: Sequence[int], entries: int) -> list[list[Scoped]]:
    """The tables in few groups, each with a joint table of at most ``entries`` entries.

    Largest table first, each goes to the group that it enlarges least.
    """

    def size(scope: set[int]) -> int:
        return math.prod(sizes[u] for u in scope)

    parts: list[tuple[set[int], list[Scoped]]] = []
    for scope, table in sorted(tables, key=lambda t: (-size({*t[0]}), t)):
        fitting = [p for p in parts if size(p[0].union(scope)) <= entries]
        if fitting:
            part = min(fitting, key=lambda p: size(p[0].union(scope)) / size(p[0]))
            part[0].update(scope)
            part[1].append((scope, table))
        else:
            parts.append(({v, *scope}, [(scope, table)]))
    return [tables for _, tables in parts]


def _messages(
    store: TableStore, v: int, parts: Sequence[Sequence[Scoped]], sizes: Sequence[int], rank: Mapping[int, int]
) -> list[tuple[Scoped, int]]:
    """The table that each group leaves once a variable is eliminated from it, with its minimum.

    First, costs move between the groups until each state's least cost is the same in all.
    """
    scopes: list[tuple[int, ...]] = []
    sums: list[Costs] = []
    for part in parts:
        scope, key = met(v, part, rank)
        shape = [sizes[v], *(sizes[u] for u in scope)]
        added = functools.reduce(np.add, [arranged_as(store.tables[table], axes, shape) for table, axes in key])
        scopes.append(scope)
        sums.append(np.minimum(np.broadcast_to(added, shape), BIG))
    least = [s.min(axis=tuple(range(1, s.ndim))) for s in sums]
    impossible = functools.reduce(np.add, least) >= BIG
    messages: list[tuple[Scoped, int]] = []
    for scope, costs, lowest, share in zip(scopes, sums, least, shares(least), strict=True):
        shifted = np.where(costs >= BIG, BIG, costs + (share - lowest).reshape(-1, *[1] * len(scope)))
        shifted[impossible] = BIG
        table, low = store.intern(np.minimum(shifted.min(axis=0), BIG), passing=True)
        messages.append(((scope, table), low))
    return messages


def shares(least: Sequence[Costs]) -> list[Costs]:
    """Spreads each state's least cost evenly over the groups and keeps the sum; one array [states] a group."""
    together, parts = functools.reduce(np.add, least), len(least)
    return [together // parts + (k < together % parts) for k in range(parts)]


def _backward(eliminator: Eliminator, sizes: Sequence[int], buckets: Sequence[_Bucket], total: int, width: int) -> Found:
    """The backward pass over the buckets; ``total`` is a lower bound on the cost of every assignment."""
    tables = eliminator.store.tables
    needed: dict[int, int] = {}  # the first bucket that holds a variable: the last to read it on the way back
    for i, bucket in enumerate(buckets):
        for scope, _ in bucket.tables:
            for u in scope:
                needed.setdefault(u, i)
    first_split = next((i for i, bucket in enumerate(buckets) if len(bucket.left) > 1), len(buckets))
    costs: Costs = np.array([total], np.int64)  # [B]: a lower bound on completing each partial assignment
    states: dict[int, Places] = {}  # [B]: its state in each partial assignment, for each variable that still matters
    steps: list[tuple[int, Places, Places]] = []  # each step: its variable, the rows kept, its state in each
    bound = BIG
    for i in range(len(buckets) - 1, -1, -1):
        eliminator.check()
        bucket = buckets[i]
        v = bucket.variable
        for (scope, table), low in bucket.left:
            costs = costs - tables[table][tuple(states[u] for u in scope)] - low
        each: Costs = np.repeat(costs[:, None], sizes[v], axis=1)
        values = np.arange(sizes[v])[None, :]
        for scope, table in bucket.tables:
            each = each + tables[table][tuple(values if u == v else states[u][:, None] for u in scope)]
        matter = [u for u in (*states, v) if needed[u] < i]
        rows, chosen, dropped = most_promising(each, states, v, matter, sizes, width if i > first_split else 1)
        bound = min(bound, dropped)
        if not len(rows):
            return Found(BIG, [0] * len(sizes), bound)
        costs = each[rows, chosen]
        states = {u: chosen if u == v else states[u][rows] for u in matter}
        steps.append((v, rows, chosen))
    assignment, at = [0] * len(sizes), 0
    for v, rows, chosen in reversed(steps):
        assignment[v], at = int(chosen[at]), int(rows[at])
    return Found(int(costs[0]), assignment, min(bound, int(costs[0])))


def most_promising(
    each: Costs, states: Mapping[int, Places], v: int, matter: Sequence[int], sizes: Sequence[int], width: int
) -> tuple[Places, Places, int]:
    """(the partial assignments that are kept, the state of ``v`` in each, the least cost of a dropped one); ``each`` is [B, D].

    Among partial assignments that agree in every variable of ``matter``, only the best is kept: no other can end up better.
    """
    costs = each.ravel()
    few = 4 * width
    order, cutoff = np.arange(len(costs)), BIG
    if few < len(costs):  # of equals, the first: which ones np.partition keeps depends on the processor
        cutoff = int(np.partition(costs, few)[few])
        order = np.concatenate([np.flatnonzero(costs < cutoff), np.flatnonzero(costs == cutoff)])[:few]
    order = order[np.argsort(costs[order], kind="stable")]
    order = order[costs[order] < BIG]
    rows, values = np.divmod(order, each.shape[1])
    first = _first_of_each([(values if u == v else states[u][rows], sizes[u]) for u in matter], len(order))
    dropped = int(costs[order[first[width]]]) if len(first) > width else cutoff
    kept = first[:width]
    return rows[kept], values[kept], dropped


def _first_of_each(columns: Sequence[tuple[Places, int]], count: int) -> Places:
    """The first row of each kind among ``count`` rows, in order; each column comes with its number of states."""
    kinds, kind_count = np.zeros(count, np.int64), 1
    for column, size in columns:
        if kind_count * size >= 1 << 62:
            kinds, kind_count = np.unique(kinds, return_inverse=True)[1], count
        kinds, kind_count = kinds * size + column, kind_count * size
    return np.sort(np.unique(kinds, return_index=True)[1])
