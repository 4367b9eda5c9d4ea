"""A bounded beam: where too many layouts meet for one table, a good assignment and a bound on all.

Forwards, a variable whose tables would make too large a one is eliminated from parts of them (mini-buckets: Dechter & Rish, JACM
2003), after costs were moved between the parts until its states cost the same in each (Ihler et al., UAI 2012). What is left says
for every partial assignment what its completion costs at least. Backwards, variables are given states by that: of the partial
assignments that differ in anything that still matters the `BEAM` most promising go on (Kask & Dechter, Artificial Intelligence
2001). No assignment that was dropped costs less than it promised, which is the bound.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.search.inference.eliminate import Eliminator, Order, Scoped, arranged_as, met
from shardplan.search.problem.tables import BIG, Costs, Store, Term

BEAM = 1024
"""So many partial assignments go on."""

PART_ENTRIES = 1 << 20
"""In a beam a variable is eliminated from all of its tables at once up to so many entries in one."""

EXACT_ENTRIES = 100_000_000
"""Up to this many entries in one table (0.8 GB) no beam is needed: what repeats is eliminated once, a beam sees it all."""

Places = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Found:
    """An assignment, its cost, and what every assignment costs at least: the same where the optimum is proved.

    The cost is `BIG` where none was found, the bound too where there is none. The assignment says nothing then.
    """

    cost: int
    assignment: list[int]
    bound: int


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A variable with the tables that it was eliminated from, and what was left of their parts, with its minimum."""

    variable: int
    tables: tuple[Scoped, ...]
    left: tuple[tuple[Scoped, int], ...]


def best(eliminator: Eliminator, terms: Sequence[Term], sizes: Sequence[int], order: Order) -> Found:
    """The minimum of a sum of terms: exact where the tables allow, else the best that the beam finds."""
    if order.largest > EXACT_ENTRIES:
        return beam(eliminator, terms, sizes, order, entries=PART_ENTRIES, width=BEAM)
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
    """The best assignment that is found, and a bound: the same and exact where nothing that matters was dropped.

    Tables are of at most ``entries`` entries, or as large as the largest term; ``width`` partial assignments go on.
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
            left = _left(eliminator.store, v, parts, sizes, rank)
        for (scope, table), low in left:
            total = min(total + low, BIG)
            if scope:
                waiting[scope[0]].append((scope, table))
        buckets.append(_Bucket(v, tuple(waiting[v]), tuple(left)))
    if total >= BIG:
        return Found(BIG, [0] * len(sizes), BIG)
    return _back(eliminator, sizes, buckets, total, width)


def _parts(v: int, tables: Sequence[Scoped], sizes: Sequence[int], entries: int) -> list[list[Scoped]]:
    """The tables in few groups, each of which makes a table of at most so many entries: largest first, where they add least."""

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


def _left(
    store: Store, v: int, parts: Sequence[Sequence[Scoped]], sizes: Sequence[int], rank: Mapping[int, int]
) -> list[tuple[Scoped, int]]:
    """What is left of each part once a variable is eliminated from it, its states costing the same in each part."""
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
    found: list[tuple[Scoped, int]] = []
    for scope, costs, mine, share in zip(scopes, sums, least, shares(least), strict=True):
        shifted = np.where(costs >= BIG, BIG, costs + (share - mine).reshape(-1, *[1] * len(scope)))
        shifted[impossible] = BIG
        table, low = store.intern(np.minimum(shifted.min(axis=0), BIG))
        found.append(((scope, table), low))
    return found


def shares(least: Sequence[Costs]) -> list[Costs]:
    """What each part's states are to cost at least, of what they do [states] each: the same in all, in all as much."""
    together, parts = functools.reduce(np.add, least), len(least)
    return [together // parts + (k < together % parts) for k in range(parts)]


def _back(eliminator: Eliminator, sizes: Sequence[int], buckets: Sequence[_Bucket], total: int, width: int) -> Found:
    """The way back through the buckets, from ``total``, what the best assignment costs at least."""
    tables = eliminator.store.tables
    needed: dict[int, int] = {}  # the first bucket that a variable is in, the last one on the way back
    for i, bucket in enumerate(buckets):
        for scope, _ in bucket.tables:
            for u in scope:
                needed.setdefault(u, i)
    widest = next((i for i, bucket in enumerate(buckets) if len(bucket.left) > 1), len(buckets))
    costs: Costs = np.array([total], np.int64)  # [B]: what each partial assignment costs at least
    states: dict[int, Places] = {}  # [B]: their states of each variable that still matters
    made: list[tuple[int, Places, Places]] = []  # each step: its variable, which ones went on, with which state of it
    bound = BIG
    for i in range(len(buckets) - 1, -1, -1):
        eliminator.check()
        bucket = buckets[i]
        v = bucket.variable
        for (scope, table), low in bucket.left:
            costs = costs - tables[table][tuple(states[u] for u in scope)] - low
        each: Costs = np.repeat(costs[:, None], sizes[v], axis=1)
        own = np.arange(sizes[v])[None, :]
        for scope, table in bucket.tables:
            each = each + tables[table][tuple(own if u == v else states[u][:, None] for u in scope)]
        matter = [u for u in (*states, v) if needed[u] < i]
        rows, chosen, dropped = most_promising(each, states, v, matter, sizes, width if i > widest else 1)
        bound = min(bound, dropped)
        if not len(rows):
            return Found(BIG, [0] * len(sizes), bound)
        costs = each[rows, chosen]
        states = {u: chosen if u == v else states[u][rows] for u in matter}
        made.append((v, rows, chosen))
    assignment, at = [0] * len(sizes), 0
    for v, rows, chosen in reversed(made):
        assignment[v], at = int(chosen[at]), int(rows[at])
    return Found(int(costs[0]), assignment, min(bound, int(costs[0])))


def most_promising(
    each: Costs, states: Mapping[int, Places], v: int, matter: Sequence[int], sizes: Sequence[int], width: int
) -> tuple[Places, Places, int]:
    """(which partial assignments go on, with which state of ``v``, the least that one of the others costs); ``each`` is [B, D].

    Of those that agree in all that matters from here on only the best goes on, and no other can be better.
    """
    costs = each.ravel()
    few = 4 * width
    order, rest = np.arange(len(costs)), BIG
    if few < len(costs):  # of equals the first: which ones a partition keeps depends on the processor
        rest = int(np.partition(costs, few)[few])
        order = np.concatenate([np.flatnonzero(costs < rest), np.flatnonzero(costs == rest)])[:few]
    order = order[np.argsort(costs[order], kind="stable")]
    order = order[costs[order] < BIG]
    rows, own = np.divmod(order, each.shape[1])
    first = _first_of_each([(own if u == v else states[u][rows], sizes[u]) for u in matter], len(order))
    dropped = int(costs[order[first[width]]]) if len(first) > width else rest
    kept = first[:width]
    return rows[kept], own[kept], dropped


def _first_of_each(columns: Sequence[tuple[Places, int]], count: int) -> Places:
    """The first of ``count`` rows of each kind, in their order; each column with the number of its states."""
    kinds, many = np.zeros(count, np.int64), 1
    for column, size in columns:
        if many * size >= 1 << 62:
            kinds, many = np.unique(kinds, return_inverse=True)[1], count
        kinds, many = kinds * size + column, many * size
    return np.sort(np.unique(kinds, return_index=True)[1])
