"""Buffers that live while one op runs: operands in the layout that it needs, results before they are reduced or resharded.

`liveness` accounts for stored values; the buffers of an op are added to them while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardplan.graph.nodes import Node, Signature
from shardplan.search.problem.composite_strategies import Late
from shardplan.search.problem.pricing import Allowed, Domain, Limits, Slot
from shardplan.search.problem.problem import Problem

_CHUNK = 1_000_000
"""The number of entries of a table that are worked out at once: 8 MB for each array."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Properties of ops that have equal buffers in equal layouts. ``replaced`` are the results that take an argument's memory."""

    signature: Signature
    slots: tuple[Slot, ...]
    free: tuple[Slot, ...]
    allowed: Allowed | None
    late: Late | None
    replaced: tuple[int, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is equal for equal kinds. It compares signature ids, not descriptions."""
        return self.signature.id, self.slots, self.free, self.allowed, self.late, self.replaced


class Buffers:
    """The buffers of a problem's ops, memoised by kind and layouts.

    ``replaced`` are the tensors that take a donated argument's memory: one that is resharded into it is made beside it first.
    """

    def __init__(self, problem: Problem, replaced: frozenset[int]) -> None:
        self._problem, self._replaced = problem, replaced
        self._known: dict[tuple[object, ...], float] = {}
        self._grouped: tuple[Limits | None, list[_Group]] | None = None

    def held(self, states: Sequence[int], limits: Limits | None) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """(ops, buffer bytes on one device while each of them runs) for one assignment."""
        cuts = limits if limits is not None and limits.cuts else None  # limits that all ops share need no new groups
        if self._grouped is None or self._grouped[0] is not cuts:
            self._grouped = cuts, self._groups(cuts)
        shared = limits.of(-1) if limits is not None and cuts is None else None
        chosen = np.array(states, np.int64)
        at: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
        nbytes: list[NDArray[np.float64]] = [np.zeros(0)]
        for group in self._grouped[1]:
            states_of = chosen[group.scopes]
            key = shared, states_of.tobytes()
            if key not in group.known:
                kind = group.kind if shared is None else replace(group.kind, allowed=shared)
                rows, which = np.unique(states_of, axis=0, return_inverse=True)
                each = np.array([self._bytes(kind, tuple(map(int, row))) for row in rows])
                group.known[key] = each[which.reshape(-1)]
            at.append(group.nodes)
            nbytes.append(group.known[key])
        return np.concatenate(at), np.concatenate(nbytes)

    @cached_property
    def most(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """([ops], [ops]): the ops, and an upper bound on the buffer bytes of each in any layouts."""
        joins = self._problem.coarse.joins
        nbytes = np.zeros(len(joins))
        for i, n in enumerate(joins):
            node = self._problem.graph.nodes[n]
            for slot in self._problem.ops.slots(node)[1]:
                twice = slot.result and node.outputs[slot.index] in self._replaced
                nbytes[i] += slot.tensor(node.signature.call)[1] * (2 if twice else 1)
        return np.array(joins, np.int64), nbytes

    def table(self, node: Node, limits: Limits | None, domains: Sequence[Domain]) -> tuple[tuple[int, ...], NDArray[np.float64]]:
        """(an op's variables with a choice, bytes [*their domains]) under the fastest strategy for each choice of layouts."""
        kind, scope = self._kind(node, limits)
        return tuple(v for v in scope if len(domains[v]) > 1), self._table(kind, tuple(domains[v] for v in scope))

    def by_strategy(self, node: Node, domains: Sequence[Domain], limits: Limits | None = None) -> list[NDArray[np.float64]]:
        """For each of an op's variables, bytes [strategies, its domain] under every strategy."""
        kind, scope = self._kind(node, limits)
        return self._held(kind, tuple(domains[v] for v in scope))

    def _groups(self, limits: Limits | None) -> list[_Group]:
        members: dict[tuple[object, ...], tuple[_Kind, list[int], list[tuple[int, ...]]]] = {}
        for n in self._problem.coarse.joins:
            kind, scope = self._kind(self._problem.graph.nodes[n], limits)
            if scope:
                _, nodes, scopes = members.setdefault(kind.key, (kind, [], []))
                nodes.append(n)
                scopes.append(scope)
        return [_Group(k, np.array(nodes, np.int64), np.array(scopes, np.int64)) for k, nodes, scopes in members.values()]

    def _kind(self, node: Node, limits: Limits | None) -> tuple[_Kind, tuple[int, ...]]:
        scope, slots, free = self._problem.ops.slots(node)
        replaced = tuple(r for r, t in enumerate(node.outputs) if t in self._replaced)
        late = self._problem.ops.deferring.get(node.id)
        return _Kind(node.costed, slots, free, limits.of(node.id) if limits else None, late, replaced), scope

    def _bytes(self, kind: _Kind, states: tuple[int, ...]) -> float:
        key = (*kind.key, states)
        if key not in self._known:
            self._known[key] = float(self._table(kind, tuple((s,) for s in states)))
        return self._known[key]

    def _table(self, kind: _Kind, domains: tuple[Domain, ...]) -> NDArray[np.float64]:
        pricer = self._problem.pricer
        base, costs = pricer.strategy_costs(kind.signature, kind.slots, kind.free, domains, kind.allowed, late=kind.late)
        held = self._held(kind, domains)
        base = sum((c[:, 0] for c, d in zip(costs, domains, strict=True) if len(d) == 1), base)
        known = sum((h[:, 0] for h, d in zip(held, domains, strict=True) if len(d) == 1), np.zeros(len(base)))
        open_ = [i for i, d in enumerate(domains) if len(d) > 1]
        if not open_:
            return known[base.argmin()]
        sizes = [len(domains[i]) for i in open_]
        least, nbytes = np.full(sizes, np.inf), np.zeros(sizes)
        step = max(1, _CHUNK // int(np.prod(sizes)))
        for start in range(0, len(base), step):
            part = slice(start, start + step)
            price, size = (x[part].reshape(-1, *[1] * len(sizes)) for x in (base, known))
            for axis, i in enumerate(open_):
                shape = [-1, *[1] * len(sizes)]
                shape[axis + 1] = sizes[axis]
                price, size = price + costs[i][part].reshape(shape), size + held[i][part].reshape(shape)
            best = price.argmin(axis=0)[None]
            price, size = (np.take_along_axis(np.broadcast_to(x, price.shape), best, axis=0)[0] for x in (price, size))
            nbytes, least = np.where(price < least, size, nbytes), np.minimum(price, least)
        return nbytes

    def _held(self, kind: _Kind, domains: tuple[Domain, ...]) -> list[NDArray[np.float64]]:
        """For each variable, bytes [strategies, domain] beside the stored values."""
        rows = self._problem.pricer.options(kind.signature, kind.allowed, late=kind.late)
        call, resharder = kind.signature.call, self._problem.resharder
        held = [np.zeros((len(rows.compute_s), len(d))) for d in domains]
        for slot in kind.slots:
            shape, whole = slot.tensor(call)
            local, states = resharder.space(shape).local, np.array(domains[slot.variable])
            at = (rows.gives if slot.result else rows.needs)[:, slot.index]
            moved = at[:, None] != states[None, :]
            size = whole * np.broadcast_to(local[at][:, None], moved.shape)
            if slot.result and slot.index in kind.replaced:
                size = size + whole * local[states][None, :]
            elif slot.result:  # a reduction that keeps the size is done in place
                moved &= local[at][:, None] != local[states][None, :]
            else:  # an operand that is resharded at no cost takes no memory of its own
                moved &= self._problem.pricer.prices(shape, whole, domains[slot.variable])[:, at].T > 0
            held[slot.variable] += np.where(moved, size, 0.0)
        return held


@dataclass(frozen=True, slots=True)
class _Group:
    """Ops of one kind [ops], their variables [ops, variables], and known bytes [ops] by allowed strategies and states."""

    kind: _Kind
    nodes: NDArray[np.int64]
    scopes: NDArray[np.int64]
    known: dict[tuple[Allowed | None, bytes], NDArray[np.float64]] = field(default_factory=dict[Any, Any])
