"""Ops as terms: what every choice of an op's layouts costs with its cheapest strategy.

Most ops are one table over their layouts. Where that would be too large, the strategy becomes a variable beside them: once it is
known, an op costs a sum over its operands and results, so a table for it and each of them is enough. Both say the same to the
picosecond.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from shardplan.graph.flattening import Graph, Node
from shardplan.ir import Constant
from shardplan.search.coarsening.coarsen import FREE, Coarse
from shardplan.search.problem.pricing import (
    Allowed,
    Domain,
    Limits,
    Pricer,
    Slot,
    table_of,
)
from shardplan.search.problem.strategies import Late, Options
from shardplan.search.problem.tables import BIG, Costs, Store, Term

OPEN_ENTRIES = 1 << 17
"""An op's table of more entries than this is not written down."""

MOST_AXES = 30
"""A table of an op with more variables leaves out those of one state: NumPy's arrays have 64 axes at most, for some uses 32."""

Slots = tuple[tuple[int, ...], tuple[Slot, ...], tuple[int, ...]]
"""An op's variables, where each operand and result stands among them, the results that have none."""

_Columns = list[tuple[int, int]]


class Ops:
    """The ops of a problem that join variables."""

    def __init__(self, graph: Graph, coarse: Coarse, pricer: Pricer, store: Store) -> None:
        self._graph, self._coarse, self._pricer, self._store = graph, coarse, pricer, store
        self._slots = {n: self._slots_of(graph.nodes[n]) for n in coarse.joins}
        self._tables: dict[tuple[object, ...], _Columns] = {}
        self._opened: dict[tuple[int, tuple[int, ...]], Mapping[int, int]] = {}
        self._least: dict[tuple[object, ...], Costs] = {}

    def slots(self, node: Node) -> Slots:
        """Where its operands and results stand."""
        return self._slots[node.id]

    def options(self, node: Node, allowed: Allowed | None = None) -> Options:
        """The composite strategies of an op, or those that are ``allowed``."""
        return self._pricer.options(node.signature, allowed, late=self.deferring.get(node.id))

    @cached_property
    def deferring(self) -> Mapping[int, Late]:
        """The joins that read or make something that may stay partial, with their operands that have no layout."""
        late = {t for v in self._coarse.variables if v.deferred for t in v.tensors}
        nodes = (self._graph.nodes[n] for n in self._coarse.joins)
        return {n.id: self._late(n) for n in nodes if n.signature.defers and not late.isdisjoint((*n.inputs, *n.outputs))}

    @cached_property
    def around(self) -> Mapping[int, Sequence[int]]:
        """The ops that each variable is in."""
        found: dict[int, list[int]] = {}
        for n, (scope, _, _) in self._slots.items():
            for v in scope:
                found.setdefault(v, []).append(n)
        return found

    # -- strategies as variables -----------------------------------------------------------------------------------

    def opened(self, domains: Sequence[Domain]) -> Mapping[int, int]:
        """The ops whose tables would be too large on these domains, each with the variable that stands for its strategy.

        These variables come after those of the layouts, one for each op. Where all layouts are known no op is opened.
        """
        first, most, sizes = len(self._coarse.variables), max(1, OPEN_ENTRIES), tuple(map(len, domains))
        found = self._opened.get((most, sizes))
        if found is None:
            found = self._opened[most, sizes] = {
                n: first + i
                for i, (n, (scope, _, _)) in enumerate(self._slots.items())
                if math.prod([sizes[v] for v in scope]) > most
            }
        return found

    def sizes(self, domains: Sequence[Domain], limits: Limits | None = None) -> list[int]:
        """How many states each variable has, those of strategies included (one where an op is not `opened`)."""
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
        """An op's table; with a variable for its ``strategy`` one of that and each layout."""
        scope = self._slots[n][0]
        if not scope:
            return []
        key = (*self._key(n, domains, limits), strategy is None)
        found = self._tables.get(key)
        shown = scope if len(scope) <= MOST_AXES else tuple(v for v in scope if len(domains[v]) > 1)
        if found is None:
            columns = self._columns(n, domains, limits)
            if strategy is None:
                known = [c for v, c in zip(scope, columns, strict=True) if v not in shown]
                columns = [table_of([c for v, c in zip(scope, columns, strict=True) if v in shown], known)]
            found = self._tables[key] = [self._store.intern(t) for t in columns]
        if strategy is None:
            return [Term(shown, *found[0])]
        return [Term((strategy, v), *column) for v, column in zip(scope, found, strict=True)]

    def least(self, v: int, domains: Sequence[Domain], limits: Limits | None = None) -> Costs:
        """[states of v]: the least that each op around it costs, all else at its best for that op, in all."""
        total = np.zeros(len(domains[v]), np.int64)
        for n in self.around.get(v, ()):
            at = self._slots[n][0].index(v)
            key = (*self._key(n, domains, limits), at)
            if key not in self._least:
                columns = self._columns(n, domains, limits)
                rest = sum((c.min(axis=1) for i, c in enumerate(columns) if i != at), np.zeros(len(columns[0]), np.int64))
                self._least[key] = np.minimum((rest[:, None] + columns[at]).min(axis=0), BIG)
            total = np.minimum(total + self._least[key], BIG)
        return total

    def _key(self, n: int, domains: Sequence[Domain], limits: Limits | None) -> tuple[object, ...]:
        node, (scope, slots, _) = self._graph.nodes[n], self._slots[n]
        own, late = tuple(domains[v] for v in scope), self.deferring.get(n)
        return node.signature.id, node.weight, slots, limits.of(n) if limits else None, late, own

    def _columns(self, n: int, domains: Sequence[Domain], limits: Limits | None) -> list[Costs]:
        node, (scope, slots, free) = self._graph.nodes[n], self._slots[n]
        own, late = tuple(domains[v] for v in scope), self.deferring.get(n)
        allowed = limits.of(n) if limits else None
        return self._pricer.strategy_tables(node.signature, slots, free, own, node.weight, allowed, late=late)

    def _slots_of(self, node: Node) -> Slots:
        rows: list[tuple[int, int, bool]] = []
        for i, t in enumerate(node.inputs):
            if t >= 0 and self._coarse.of[t] != FREE:
                rows.append((self._coarse.read.get((node.id, i), self._coarse.of[t]), i, False))
        for r, t in enumerate(node.outputs):
            if self._coarse.of[t] != FREE:
                rows.append((self._coarse.of[t], r, True))
        scope = tuple(dict.fromkeys(v for v, _, _ in rows))
        free = tuple(r for r, t in enumerate(node.outputs) if self._coarse.of[t] == FREE)
        return scope, tuple(Slot(scope.index(v), i, r) for v, i, r in rows), free

    def _late(self, node: Node) -> Late:
        free = {i for i, t in enumerate(node.inputs) if t < 0 or self._coarse.of[t] == FREE}
        zero = {i for i in free if node.inputs[i] in self._coarse.zero}
        zero |= {i for i in free if isinstance(c := node.op.inputs[i], Constant) and not c.value}
        return Late(frozenset(free), frozenset(free - zero))
