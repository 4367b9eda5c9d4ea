"""Variable elimination: the exact minimum of a sum of tables.

The order is found once, from the scopes and sizes; the numbers are computed anew for each price, restriction or level. The
elimination of a variable from equal tables in the same arrangement is memoised, so repeated layers cost one lookup.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardplan.search.problem.cost_tables import BIG, Costs, TableStore, Term


@dataclass(frozen=True, slots=True)
class Order:
    """An elimination order, each variable's neighbours when it is eliminated, and the entries of the largest table and of all."""

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
        open_ = [v for v in scope if sizes[v] > 1]  # a variable with one state needs no elimination
        for v in open_:
            near[v].update(open_)
    for v, s in enumerate(near):
        s.discard(v)
    log_of = {s: float(np.log(max(1, s))) for s in set(sizes)}
    logs = [log_of[s] for s in sizes]

    def score(v: int) -> float:
        size = logs[v] + sum(logs[u] for u in near[v])
        if not fill:
            return size
        around = list(near[v])
        missing = sum(len(near[v]) - 1 - len(near[v] & near[u]) for u in around)
        return missing * 100.0 + size

    now = [score(v) for v in range(len(sizes))]
    heap = [(now[v], v) for v in range(len(sizes)) if sizes[v] > 1]
    heapq.heapify(heap)
    done = [False] * len(sizes)
    variables: list[int] = []
    neighbours: list[tuple[int, ...]] = []
    largest = total = 0
    while heap:
        value, v = heapq.heappop(heap)
        if done[v] or (not fill and value != now[v]):
            continue
        if fill:  # fill-in changes further away, too
            now[v] = score(v)
            if now[v] > value + 1e-9:
                heapq.heappush(heap, (now[v], v))
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
                now[u] = score(u)
                heapq.heappush(heap, (now[u], u))
    return Order(tuple(variables), tuple(neighbours), largest, total)


_PIECE = 1 << 17  # entries that are summed at a time, so that they stay in a core's cache


def _least(tables: Sequence[Costs], sizes: Sequence[int]) -> Costs:
    """[*sizes[1:]]: the minimum over the first axis of the sum of tables, which broadcast against each other."""
    ordered = sorted(tables, key=np.size)  # small tables first: then few sums are large
    entries = math.prod(sizes)
    if entries > _PIECE // 8:  # the largest table's axes last: long runs of it are added to the same entry of the others
        axes = [0, *sorted(range(1, len(sizes)), key=lambda axis: ordered[-1].shape[axis] > 1)]
        if axes != sorted(axes):
            turned = _least([t.transpose(axes) for t in ordered], [sizes[axis] for axis in axes])
            return turned.transpose(np.argsort(axes)[1:] - 1)
    if entries <= _PIECE:
        return np.broadcast_to(functools.reduce(np.add, ordered), sizes).min(axis=0)
    # state by state, each in its memory order: striding through memory is slower
    least = np.array(np.broadcast_to(functools.reduce(np.add, [t[0] for t in ordered]), sizes[1:]), order="K")
    step = max(1, _PIECE * sizes[0] * sizes[1] // entries)
    for start in range(0, sizes[1], step):
        part = slice(start, start + step)
        here = [t[:, part] if t.shape[1] > 1 else t for t in ordered]
        for state in range(1, sizes[0]):
            np.minimum(least[part], functools.reduce(np.add, [t[state] for t in here]), out=least[part])
    return least


Scoped = tuple[tuple[int, ...], int]
"""The variables of a table, in the order of its axes, and its number in the store."""

_Key = tuple[tuple[int, tuple[int, ...]], ...]
"""The tables of one elimination, each with the positions of its axes; the eliminated variable is axis 0."""


def met(v: int, tables: Sequence[Scoped], rank: Mapping[int, int]) -> tuple[tuple[int, ...], _Key]:
    """(the other variables of a variable's tables, in elimination order; the tables with their axes in that order)."""
    scope = tuple(sorted({u for s, _ in tables for u in s if u != v}, key=rank.__getitem__))
    axis = {u: i for i, u in enumerate((v, *scope))}
    return scope, tuple(sorted((table, tuple(axis[u] for u in s)) for s, table in tables))


def arranged_as(costs: Costs, axes: Sequence[int], sizes: Sequence[int]) -> Costs:
    """A table with its axes moved to these positions among all axes, so that it broadcasts against others."""
    order = sorted(range(len(axes)), key=axes.__getitem__)
    shape = [1] * len(sizes)
    for i in order:
        shape[axes[i]] = sizes[axes[i]]
    return costs.transpose(order).reshape(shape)


@dataclass(slots=True)
class Eliminator:
    """Runs eliminations over one store of tables and memoises each distinct one, until the store forgets its results; ``check``
    is called before each.
    """

    store: TableStore
    check: Callable[[], None] = lambda: None
    _forgotten: int = 0
    _memo: dict[_Key, tuple[int, int, int]] = field(default_factory=dict[_Key, tuple[int, int, int]])
    _keys: list[_Key] = field(default_factory=list[_Key])
    _choices: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict[tuple[int, tuple[int, ...]], int])
    _squeezed: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = field(
        default_factory=dict[tuple[int, tuple[int, ...]], tuple[int, int]]
    )

    def tidy(self) -> None:
        """Forgets what the store has forgotten."""
        if self._forgotten != self.store.forgotten:
            self._forgotten = self.store.forgotten
            for known in (self._memo, self._keys, self._choices, self._squeezed):
                known.clear()

    def solve(self, terms: Sequence[Term], sizes: Sequence[int], order: Order) -> tuple[int, list[int]]:
        """(minimum, an optimal assignment): ties go to the lowest index. The minimum is at least `BIG` where nothing is
        feasible.
        """
        rank = {v: i for i, v in enumerate(order.variables)}
        total, waiting = self.waiting(terms, sizes, rank)
        done: list[tuple[int, tuple[int, ...], int]] = []
        for v in order.variables:
            self.check()
            mine = waiting[v]
            if not mine:
                continue
            scope, key = met(v, mine, rank)
            table, low, elimination = self._eliminate(key, [sizes[v], *(sizes[u] for u in scope)])
            total = min(total + low, BIG)
            done.append((v, scope, elimination))
            if scope:
                waiting[scope[0]].append((scope, table))
        assignment = [0] * len(sizes)
        for v, scope, elimination in reversed(done):
            assignment[v] = self._choice(elimination, tuple(assignment[u] for u in scope))
        return total, assignment

    def waiting(self, terms: Sequence[Term], sizes: Sequence[int], rank: Mapping[int, int]) -> tuple[int, list[list[Scoped]]]:
        """(the sum of constants; for each variable, the tables in which it is the first to be eliminated, by ``rank``)."""
        waiting: list[list[Scoped]] = [[] for _ in sizes]
        total = 0
        for term in terms:
            total += term.constant
            scope, table = term.scope, term.table
            if any(sizes[v] == 1 for v in scope):
                scope, table, low = self._squeeze(scope, table, sizes)
                total += low
            if scope:
                waiting[min(scope, key=rank.__getitem__)].append((scope, table))
        return total, waiting

    def left(self, v: int, tables: Sequence[Scoped], sizes: Sequence[int], rank: Mapping[int, int]) -> tuple[Scoped, int]:
        """(the interned table that is left once a variable is eliminated from these, its minimum)."""
        scope, key = met(v, tables, rank)
        table, low, _ = self._eliminate(key, [sizes[v], *(sizes[u] for u in scope)])
        return (scope, table), low

    def _squeeze(self, scope: tuple[int, ...], table: int, sizes: Sequence[int]) -> tuple[tuple[int, ...], int, int]:
        keep = tuple(v for v in scope if sizes[v] > 1)
        axes = tuple(i for i, v in enumerate(scope) if sizes[v] == 1)
        cached = self._squeezed.get((table, axes))
        if cached is None:
            cached = self._squeezed[table, axes] = self.store.intern(self.store.tables[table].squeeze(axes), passing=True)
        return keep, *cached

    def _eliminate(self, key: _Key, sizes: list[int]) -> tuple[int, int, int]:
        """(the table that is left, its minimum, the number of the elimination)."""
        cached = self._memo.get(key)
        if cached is None:
            arranged = [arranged_as(self.store.tables[table], axes, sizes) for table, axes in key]
            table, low = self.store.intern(np.minimum(_least(arranged, sizes), BIG), passing=True)
            self._keys.append(key)  # first: an interrupt in between leaves nothing wrong
            cached = self._memo[key] = (table, low, len(self._keys) - 1)
        return cached

    def _choice(self, elimination: int, others: tuple[int, ...]) -> int:
        """The eliminated variable's best state, given the states of its neighbours.

        Recomputed for one column, which is cheaper than keeping the choices of a whole table.
        """
        cached = self._choices.get((elimination, others))
        if cached is None:
            at = (slice(None), *others)
            column = sum(self.store.tables[table][tuple(at[i] for i in axes)] for table, axes in self._keys[elimination])
            cached = self._choices[elimination, others] = int(np.argmin(np.minimum(column, BIG)))
        return cached
