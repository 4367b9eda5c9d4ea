"""Ops as terms: the cost of every choice of an op's layouts under its cheapest strategy.

Most ops are one table over their layouts. Where that table would be too large, the strategy becomes a variable too. For a given
strategy an op's cost is a sum over its variables, so one table of strategy and layout for each variable is enough. Both forms
give the same cost to the picosecond.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from shardplan.constants import CONSTANTS
from shardplan.cost.overlap import NO_WINDOW, Window
from shardplan.graph.nodes import Graph, Node
from shardplan.ir import Constant
from shardplan.search.coarsening.coarsen import FREE, Coarse
from shardplan.search.problem.composite_strategies import Late, Options
from shardplan.search.problem.cost_tables import BIG, Costs, TableStore, Term
from shardplan.search.problem.pricing import (
    Allowed,
    Domain,
    Limits,
    Pricer,
    Slot,
    table_of,
)
from shardplan.search.problem.windows import NO_WINDOWS, Read, Windows

MOST_AXES = 30
"""In an op with more variables than this, those with one state get no axis: NumPy allows 64 axes, some functions only 32."""

Slots = tuple[tuple[int, ...], tuple[Slot, ...], tuple[Slot, ...]]
"""(an op's variables, a `Slot` for each operand and result with a variable, and for each result without one)."""

_Columns = list[tuple[int, int]]


class Ops:
    """The ops of a problem that join variables."""

    def __init__(self, graph: Graph, coarse: Coarse, pricer: Pricer, store: TableStore, windows: Windows = NO_WINDOWS) -> None:
        self._graph, self._coarse, self._pricer, self._store, self._windows = graph, coarse, pricer, store, windows
        self._slots = {n: self._slots_of(graph.nodes[n]) for n in coarse.joins}
        self._tables: dict[tuple[object, ...], _Columns] = {}
        self._opened: dict[tuple[int, tuple[int, ...]], Mapping[int, int]] = {}
        self._least: dict[tuple[object, ...], Costs] = {}
        self._numbers: dict[tuple[object, ...], int] = {}
        self._keys: dict[int, int] = {}

    def slots(self, node: Node) -> Slots:
        """The variables of an op's operands and results."""
        return self._slots[node.id]

    def options(self, node: Node, allowed: Allowed | None = None) -> Options:
        """The composite strategies of an op; if ``allowed`` is given, only those."""
        return self._pricer.options(node.costed, allowed, late=self.deferring.get(node.id))

    @cached_property
    def deferring(self) -> Mapping[int, Late]:
        """The joins with an operand or result that may stay partial, each with its operands that have no layout."""
        late = {t for v in self._coarse.variables if v.deferred for t in v.tensors}
        nodes = (self._graph.nodes[n] for n in self._coarse.joins)
        return {n.id: self._late(n) for n in nodes if n.signature.defers and not late.isdisjoint((*n.inputs, *n.outputs))}

    @cached_property
    def around(self) -> Mapping[int, Sequence[int]]:
        """The ops that each variable appears in."""
        result: dict[int, list[int]] = {}
        for n, (scope, _, _) in self._slots.items():
            for v in scope:
                result.setdefault(v, []).append(n)
        return result

    # -- strategies as variables -----------------------------------------------------------------------------------

    def opened(self, domains: Sequence[Domain]) -> Mapping[int, int]:
        """The ops whose tables would be too large on these domains, each with the variable of its strategy.

        The strategy variables follow the layout variables, one for each op. If every layout is fixed, no op is opened.
        """
        first, max_entries, sizes = len(self._coarse.variables), max(1, CONSTANTS.open_entries), tuple(map(len, domains))
        result = self._opened.get((max_entries, sizes))
        if result is None:
            result = self._opened[max_entries, sizes] = {
                n: first + i
                for i, (n, (scope, _, _)) in enumerate(self._slots.items())
                if math.prod([sizes[v] for v in scope]) > max_entries
            }
        return result

    def sizes(self, domains: Sequence[Domain], limits: Limits | None = None) -> list[int]:
        """The number of states of each variable, strategy variables included (1 where the op is not `opened`)."""
        sizes = [len(d) for d in domains]
        opened = self.opened(domains)
        if opened:
            sizes += [1] * len(self._slots)
        for n, variable in opened.items():
            sizes[variable] = len(self.options(self._graph.nodes[n], limits.of(n) if limits else None).loops)
        return sizes

    # -- terms -----------------------------------------------------------------------------------------------------

    def terms_of(
        self, n: int, domains: Sequence[Domain], limits: Limits | None = None, strategy: int | None = None
    ) -> list[Term]:
        """An op's table; with a variable for its ``strategy``, one table of that and each layout."""
        scope = self._slots[n][0]
        if not scope:
            return []
        key = (*self._key(n, domains, limits), strategy is None)
        result = self._tables.get(key)
        axes = scope if len(scope) <= MOST_AXES else tuple(v for v in scope if len(domains[v]) > 1)
        if result is None:
            columns = self._columns(n, domains, limits)
            if strategy is None:
                known = [c for v, c in zip(scope, columns, strict=True) if v not in axes]
                columns = [table_of([c for v, c in zip(scope, columns, strict=True) if v in axes], known)]
            result = self._tables[key] = [self._store.intern(t) for t in columns]
        if strategy is None:
            return [Term(axes, *result[0])]
        return [Term((strategy, v), *column) for v, column in zip(scope, result, strict=True)]

    def least(self, v: int, domains: Sequence[Domain], limits: Limits | None = None) -> Costs:
        """[states of v]: the sum over the ops around v of each one's minimum over its other variables (a lower bound)."""
        total = np.zeros(len(domains[v]), np.int64)
        for n in self.around.get(v, ()):
            at = self._slots[n][0].index(v)
            key = (*self._key(n, domains, limits), at)
            if key not in self._least:
                columns = self._columns(n, domains, limits)
                others = sum((c.min(axis=1) for i, c in enumerate(columns) if i != at), np.zeros(len(columns[0]), np.int64))
                self._least[key] = np.minimum((others[:, None] + columns[at]).min(axis=0), BIG)
            total = np.minimum(total + self._least[key], BIG)
        return total

    def key(self, n: int) -> int:
        """Equal for ops that cost the same in the same layouts of their variables, if no limit tells them apart."""
        if n not in self._keys:
            node = self._graph.nodes[n]
            own = node.costed.id, node.weight, self._slots[n][1:], self.deferring.get(n)
            self._keys[n] = self._numbers.setdefault(own, len(self._numbers))
        return self._keys[n]

    def _key(self, n: int, domains: Sequence[Domain], limits: Limits | None) -> tuple[object, ...]:
        return self.key(n), limits.of(n) if limits else None, tuple([domains[v] for v in self._slots[n][0]])

    def _columns(self, n: int, domains: Sequence[Domain], limits: Limits | None) -> list[Costs]:
        node, (scope, slots, free) = self._graph.nodes[n], self._slots[n]
        scope_domains, late = tuple(domains[v] for v in scope), self.deferring.get(n)
        allowed = limits.of(n) if limits else None
        return self._pricer.strategy_tables(node.costed, slots, free, scope_domains, node.weight, allowed, late=late)

    def _slots_of(self, node: Node) -> Slots:
        rows: list[tuple[int, int, bool, Window, Read]] = []
        free: list[Slot] = []
        windows = self._windows
        for i, t in enumerate(node.inputs):
            if t >= 0 and self._coarse.of[t] != FREE:
                window = windows.operands.get((node.id, i), NO_WINDOW)
                rows.append((self._coarse.read.get((node.id, i), self._coarse.of[t]), i, False, window, windows.read(t)))
        for r, t in enumerate(node.outputs):
            window, read = windows.results.get((node.id, r), NO_WINDOW), windows.read(t)
            if self._coarse.of[t] == FREE:
                free.append(Slot(-1, r, True, window, read))
            else:
                rows.append((self._coarse.of[t], r, True, window, read))
        scope = tuple(dict.fromkeys(v for v, *_ in rows))
        return scope, tuple(Slot(scope.index(v), i, r, w, read) for v, i, r, w, read in rows), tuple(free)

    def _late(self, node: Node) -> Late:
        free = {i for i, t in enumerate(node.inputs) if t < 0 or self._coarse.of[t] == FREE}
        zero = {i for i in free if node.inputs[i] in self._coarse.zero}
        zero |= {i for i in free if isinstance(c := node.op.inputs[i], Constant) and not c.value}
        return Late(frozenset(free), frozenset(free - zero))
