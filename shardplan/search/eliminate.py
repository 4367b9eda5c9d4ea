"""Variable elimination: the exact minimum of a sum of tables.

The order is found once from the scopes alone; the numbers are run again for each price, restriction or level. The elimination
of a variable from equal
tables in the same arrangement is memoised, so repeated layers cost one lookup.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shardplan.errors import SearchWidthError
from shardplan.search.tables import BIG, Costs, Store, Term

LARGEST_TABLE = 200_000_000
"""Entries of the largest table that is ever made (1.6 GB)."""


@dataclass(frozen=True, slots=True)
class Order:
    """An elimination order with, for each variable, the neighbours that it meets, and the entries of the largest and of all
    tables.
    """

    variables: tuple[int, ...]
    neighbours: tuple[tuple[int, ...], ...]
    largest: int
    total: int


def find_order(scopes: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> Order:
    """The better of min-size and min-fill, by the total number of table entries that they predict."""
    a = _order(scopes, sizes, fill=False)
    if a.largest < 100_000:
        return a
    b = _order(scopes, sizes, fill=True)
    return min(a, b, key=lambda o: o.total)


def _order(scopes: Sequence[tuple[int, ...]], sizes: Sequence[int], *, fill: bool) -> Order:
    near: list[set[int]] = [set() for _ in sizes]
    for scope in scopes:
        open_ = [v for v in scope if sizes[v] > 1]  # a variable with one state is no variable
        for v in open_:
            near[v].update(open_)
    for v, s in enumerate(near):
        s.discard(v)
    logs = [float(np.log(max(1, s))) for s in sizes]

    def score(v: int) -> float:
        size = logs[v] + sum(logs[u] for u in near[v])
        if not fill:
            return size
        around = list(near[v])
        missing = sum(len(near[v]) - 1 - len(near[v] & near[u]) for u in around)
        return missing * 100.0 + size

    heap = [(score(v), v) for v in range(len(sizes)) if sizes[v] > 1]
    heapq.heapify(heap)
    done = [False] * len(sizes)
    variables: list[int] = []
    neighbours: list[tuple[int, ...]] = []
    largest = total = 0
    while heap:
        value, v = heapq.heappop(heap)
        if done[v]:
            continue
        now = score(v)
        if now > value + 1e-9:
            heapq.heappush(heap, (now, v))
            continue
        done[v] = True
        around = near[v]
        variables.append(v)
        neighbours.append(tuple(sorted(around)))
        entries = int(min(1e18, np.exp(logs[v] + sum(logs[u] for u in around))) + 0.5)
        largest, total = max(largest, entries), total + entries
        for u in around:
            near[u] |= around
            near[u].discard(u)
            near[u].discard(v)
        if not fill or len(around) < 12:
            for u in around:
                heapq.heappush(heap, (score(u), u))
    return Order(tuple(variables), tuple(neighbours), largest, total)


@dataclass(slots=True)
class Eliminator:
    """Runs eliminations over one store of tables, remembering each distinct one."""

    store: Store
    _memo: dict[tuple[tuple[int, tuple[int, ...]], ...], tuple[int, int, Costs]] = field(
        default_factory=dict[tuple[tuple[int, tuple[int, ...]], ...], tuple[int, int, Costs]]
    )
    _squeezed: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = field(
        default_factory=dict[tuple[int, tuple[int, ...]], tuple[int, int]]
    )

    def solve(self, terms: Sequence[Term], sizes: Sequence[int], order: Order) -> tuple[int, list[int]]:
        """(minimum, an optimal assignment): ties go to the lowest index. The minimum is at least `BIG` where nothing is
        feasible.
        """
        waiting: list[list[tuple[tuple[int, ...], int]]] = [[] for _ in sizes]
        rank = {v: i for i, v in enumerate(order.variables)}
        total = 0
        for term in terms:
            total += term.constant
            scope, table = term.scope, term.table
            if any(sizes[v] == 1 for v in scope):
                scope, table, low = self._squeeze(scope, table, sizes)
                total += low
            if scope:
                waiting[min(scope, key=rank.__getitem__)].append((scope, table))
        choices: list[tuple[int, tuple[int, ...], Costs]] = []
        for v in order.variables:
            mine = waiting[v]
            if not mine:
                choices.append((v, (), np.zeros((), np.int64)))
                continue
            scope = sorted({u for s, _ in mine for u in s if u != v}, key=rank.__getitem__)
            axis = {u: i for i, u in enumerate((v, *scope))}
            key = tuple(sorted((table, tuple(axis[u] for u in s)) for s, table in mine))
            table, low, choice = self._eliminate(key, [sizes[v], *(sizes[u] for u in scope)])
            total = min(total + low, BIG)
            choices.append((v, tuple(scope), choice))
            if scope:
                waiting[scope[0]].append((tuple(scope), table))
        assignment = [0] * len(sizes)
        for v, scope, choice in reversed(choices):
            assignment[v] = int(choice[tuple(assignment[u] for u in scope)])
        return total, assignment

    def _squeeze(self, scope: tuple[int, ...], table: int, sizes: Sequence[int]) -> tuple[tuple[int, ...], int, int]:
        keep = tuple(v for v in scope if sizes[v] > 1)
        axes = tuple(i for i, v in enumerate(scope) if sizes[v] == 1)
        found = self._squeezed.get((table, axes))
        if found is None:
            found = self._squeezed[table, axes] = self.store.intern(self.store.tables[table].squeeze(axes))
        return keep, *found

    def _eliminate(self, key: tuple[tuple[int, tuple[int, ...]], ...], sizes: list[int]) -> tuple[int, int, Costs]:
        found = self._memo.get(key)
        if found is None:
            if math.prod(sizes) > LARGEST_TABLE:
                raise SearchWidthError(len(sizes), math.prod(sizes))
            total = np.zeros(sizes, np.int64)
            for table, axes in key:
                costs = self.store.tables[table]
                order = sorted(range(len(axes)), key=axes.__getitem__)
                shape = [1] * len(sizes)
                for i in order:
                    shape[axes[i]] = sizes[axes[i]]
                total += costs.transpose(order).reshape(shape)
            np.minimum(total, BIG, out=total)
            choice = np.argmin(total, axis=0)
            best = np.take_along_axis(total, choice[None], axis=0)[0]
            table, low = self.store.intern(best)
            small = choice.astype(np.int16) if sizes[0] < 2**15 else choice
            found = self._memo[key] = (table, low, small)
        return found
