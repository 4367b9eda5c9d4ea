"""From a strategy to its task graph (FlexFlow, section 5.1), group by group."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from shardplan.placement.configurations import Configuration
from shardplan.placement.device_topology import DeviceTopology
from shardplan.placement.group_reductions import GroupPrices
from shardplan.placement.operators import BACKWARD, UPDATE, OperatorGraph
from shardplan.placement.structure import Structure
from shardplan.placement.synchronisation import sync_groups
from shardplan.placement.task_pool import NO_TASKS, TaskPool
from shardplan.placement.tensor_transfers import SharedRegions, backward_transfers, forward_transfers

Table = Mapping[tuple[int, ...], tuple[int, int, int]]
"""The ticks of one part of an operator in each phase, by the degrees of its loops."""


class TaskGraphBuilder:
    """Puts the tasks and arcs of operators, tensors and weights into a pool."""

    def __init__(self, structure: Structure, machine: DeviceTopology, tables: Sequence[Table]) -> None:
        self.structure, self.machine, self.tables = structure, machine, tables
        self.pool = TaskPool(structure)
        self.prices = GroupPrices(machine)
        self.reduced = np.zeros(len(structure.graph.weights), np.int64)  # ticks that the reductions of a weight take at least

    @property
    def graph(self) -> OperatorGraph:
        """The graph of operators."""
        return self.structure.graph

    def build(self, strategy: Sequence[Configuration]) -> None:
        """The whole task graph of a strategy."""
        self.pool.clear()
        for i, c in enumerate(strategy):
            self.put_operator(i, c)
        for e in range(len(self.graph.edges)):
            self.put_edge(e, strategy)
        for w in range(len(self.graph.weights)):
            self.put_users(w, strategy)
            self.put_weight(w, strategy)

    def put_operator(self, i: int, chosen: Configuration) -> None:
        """The tasks of an operator's parts in its phases, and the arcs from phase to phase."""
        pool, s = self.pool, self.structure
        devices = np.array(chosen.devices, np.int64)
        for phase, each in enumerate(self.phase_ticks(i, chosen)):
            there = each[0] > 0
            pool.put_group(3 * i + phase, each if there else NO_TASKS, devices if there else NO_TASKS)
        parts = np.arange(len(devices))
        after = (3 * i + BACKWARD) if s.backward[i] else None
        pool.put_bundle(2 * i, *((parts, pool.base[after] + parts) if after is not None else (NO_TASKS, NO_TASKS)))
        last = pool.base[3 * i + UPDATE] + parts
        pool.put_bundle(2 * i + 1, *((parts, last) if s.update[i] else (NO_TASKS, NO_TASKS)))

    def phase_ticks(self, i: int, chosen: Configuration) -> NDArray[np.int64]:
        """[phases, parts]: the ticks of an operator's parts on their devices, at least one; 0 in phases that it does not have."""
        each = np.array(self.tables[i][chosen.degrees])[:, None] / self.machine.speed[list(chosen.devices)]
        there = np.array([[True], [self.structure.backward[i]], [self.structure.update[i]]])
        return np.where(there, np.maximum(np.rint(each), 1), 0).astype(np.int64)

    def put_edge(self, e: int, strategy: Sequence[Configuration]) -> None:
        """The transfers of a tensor and of its gradient."""
        edge = self.graph.edges[e]
        made, read = strategy[edge.producer], strategy[edge.consumer]
        group, bundle = self.structure.edge_group(e), self.structure.edge_bundle(e)
        self._transfers(forward_transfers(edge, made, read, self.machine), group, bundle, 3 * edge.consumer)
        back = backward_transfers(edge, made, read, self.machine) if edge.gradient else _NO_TRANSFERS
        self._transfers(back, group + 1, bundle + 2, 3 * edge.producer + BACKWARD)

    def _transfers(self, sent: SharedRegions, group: int, bundle: int, reader: int) -> None:
        pool = self.pool
        pool.put_group(group, sent.ticks, self.machine.count + sent.link)
        target = pool.base[reader] + sent.target
        remote = sent.message >= 0
        pool.put_bundle(bundle, sent.source, np.where(remote, pool.base[group] + sent.message, target))
        pool.put_bundle(bundle + 1, np.arange(len(sent.ticks)), target[remote])

    def put_users(self, w: int, strategy: Sequence[Configuration], changed: Container[int] | None = None) -> None:
        """The arcs from the parts that make terms of a weight's gradient; only of operators ``changed``, if they are given."""
        pool, s = self.pool, self.structure
        group = s.weight_group(w)
        if changed is None:
            pool.put_group(group, np.zeros(1, np.int64), np.full(1, -1))
        for b, u in zip(s.user_bundles[w], self.graph.weights[w].users, strict=True):
            if changed is None or u in changed:
                parts = np.arange(len(strategy[u].devices))
                pool.put_bundle(b, parts, np.full(len(parts), pool.base[group]))

    def put_weight(self, w: int, strategy: Sequence[Configuration]) -> None:
        """The reductions of a weight's gradient. They follow all its terms, and the update follows them."""
        pool, s, weight = self.pool, self.structure, self.graph.weights[w]
        work, stream = list[int](), list[int]()
        for mask, nbytes in sync_groups(weight, [strategy[u] for u in weight.users]):
            links = self.prices.links(mask)
            work += [self.prices.ticks(mask, nbytes)] * len(links)
            stream += [self.machine.count + link for link in links]
        count = len(work)
        self.reduced[w] = max(np.bincount(stream, work)) if count else 0
        group, bundle = s.weight_group(w) + 1, s.weight_bundles[w]
        pool.put_group(group, np.array([*work, 0], np.int64), np.array([*stream, -1], np.int64))
        begin = int(pool.base[group])
        updates = pool.slots(3 * weight.users[0] + UPDATE)
        firsts = begin + np.arange(max(1, count))
        pool.put_bundle(bundle, np.zeros(len(firsts), np.int64), firsts)
        source = np.concatenate([np.arange(count), np.full(len(updates), count)])
        pool.put_bundle(bundle + 1, source, np.concatenate([np.full(count, begin + count), updates]))


_NO_TRANSFERS = SharedRegions(NO_TASKS, NO_TASKS, NO_TASKS, NO_TASKS, NO_TASKS)
