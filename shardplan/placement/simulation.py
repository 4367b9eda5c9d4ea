"""Full and delta simulation of strategies (FlexFlow, sections 5.2 and 5.3, Algorithms 1 and 2).

A device or connection runs one task at a time, in the order in which tasks are ready. So nothing that is ready before the first
change is affected by it: the delta simulation replaces the tasks of the changed operator, keeps the timeline up to that instant
and runs the rest again. Its timeline is that of a full simulation, to the tick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardplan.errors import PlacementError
from shardplan.placement import task_loop
from shardplan.placement.configurations import Configuration
from shardplan.placement.device_topology import TICK_S, Machine
from shardplan.placement.operators import BACKWARD, UPDATE, OperatorGraph
from shardplan.placement.structure import structure_of
from shardplan.placement.tails import Tails
from shardplan.placement.task_graph import Table, TaskGraphBuilder
from shardplan.placement.task_loop import NEVER, NONE
from shardplan.placement.task_pool import Mark

Ints = NDArray[np.int64]
Engine = Literal["auto", "numba", "python"]


@dataclass(frozen=True, slots=True)
class Times:
    """When each task of a strategy runs, in ticks: arrays [tasks], sorted by ``key``, which names tasks across strategies."""

    key: Ints
    group: Ints
    stream: Ints
    ready: Ints
    start: Ints
    end: Ints


@dataclass(frozen=True, slots=True)
class _Change:
    """What undoes a change: the state of the pool, the configuration, and the earlier times of the tasks that ran again."""

    mark: Mark
    operator: int
    before: Configuration
    tasks: Ints
    ready: Ints
    start: Ints
    end: Ints
    ticks: int
    reduced: Ints


class Simulation:
    """A strategy with its timeline, and changes to it. ``ticks`` is the time of a step, ``ran`` counts tasks that ran."""

    def __init__(self, graph: OperatorGraph, machine: Machine, tables: Sequence[Table], engine: Engine = "auto") -> None:
        self.graph, self.machine, self.engine = graph, machine, engine
        self.structure = structure_of(graph)
        self.builder = TaskGraphBuilder(self.structure, machine, tables)
        self.strategy: list[Configuration] = []
        self.ticks = 0
        self.ran = 0
        self._change: _Change | None = None
        self._capacity = 0
        self._tails = Tails(self.structure, tables, float(machine.speed.max()))

    @property
    def seconds(self) -> float:
        """The seconds of a step."""
        return self.ticks * TICK_S

    # -- full --------------------------------------------------------------------------------------------------------

    def full(self, strategy: Sequence[Configuration]) -> int:
        """Builds the task graph of a strategy and runs all of it (Algorithm 1); the ticks of a step."""
        self.strategy, self._change = list(strategy), None
        self.builder.build(self.strategy)
        pool = self.builder.pool
        self._capacity = 2 * pool.top + (1 << 12)
        pool.ready[: pool.top] = 0
        for i, chosen in enumerate(self.strategy):
            self._tails.change(i, chosen)
        ticks = self._run(np.arange(pool.top), np.zeros(0, np.int64), np.ones(pool.top, bool), NEVER)
        self.ticks = ticks
        return ticks

    # -- delta -------------------------------------------------------------------------------------------------------

    def change(self, i: int, chosen: Configuration, limit: int = NEVER) -> int | None:
        """Gives operator i another configuration and repairs the timeline (Algorithm 2); the ticks of a step.

        None once a step is certain to take more than ``limit`` ticks; then only `undo` may follow.
        """
        pool, s = self.builder.pool, self.structure
        if pool.top > self._capacity:
            self.full(self.strategy)
        groups, bundles = self._touched(i)
        mark, top = pool.mark(groups, bundles), pool.top
        now = min(
            (int(pool.ready[pool.base[g] : pool.base[g] + pool.count[g]].min(initial=NEVER)) for g in groups), default=NEVER
        )
        before, reduced = self.strategy[i], self.builder.reduced.copy()
        self.strategy[i] = chosen
        self._tails.change(i, chosen)
        self.builder.put_operator(i, chosen)
        for e in s.edges_of[i]:
            self.builder.put_edge(e, self.strategy)
        for w in s.weights_of[i]:
            self.builder.put_users(w, self.strategy, changed=i)
            self.builder.put_weight(w, self.strategy)
        now = min(now, self._first_release(i, bundles, top))
        live = pool.alive[: pool.top]
        pool.ready[top : pool.top] = NEVER
        runs = live & (pool.ready[: pool.top] >= now)
        border = np.flatnonzero(live & ~runs & (pool.end[: pool.top] >= now))
        again = np.flatnonzero(runs)
        old = again[again < top]
        self._change = _Change(mark, i, before, old, pool.ready[old], pool.start[old], pool.end[old], self.ticks, reduced)
        pool.ready[again] = 0
        ticks = self._run(again, border, runs, limit)
        if ticks == NONE:
            return None
        self.ticks = ticks
        return ticks

    def undo(self) -> None:
        """Takes the last change back."""
        change, pool = self._change, self.builder.pool
        assert change is not None, "there is a change to undo"
        pool.go_back(change.mark)
        pool.ready[change.tasks], pool.start[change.tasks], pool.end[change.tasks] = change.ready, change.start, change.end
        self.strategy[change.operator], self.ticks, self._change = change.before, change.ticks, None
        self.builder.reduced = change.reduced
        self._tails.change(change.operator, change.before)

    def _touched(self, i: int) -> tuple[list[int], list[int]]:
        """The groups and bundles that a change of operator i replaces."""
        s = self.structure
        groups, bundles = [3 * i, 3 * i + BACKWARD, 3 * i + UPDATE], [2 * i, 2 * i + 1]
        for e in s.edges_of[i]:
            groups += [s.edge_group(e), s.edge_group(e) + 1]
            bundles += range(s.edge_bundle(e), s.edge_bundle(e) + 4)
        for w in s.weights_of[i]:
            groups.append(s.weight_group(w) + 1)
            own = (b for b, u in zip(s.user_bundles[w], self.graph.weights[w].users, strict=True) if u == i)
            bundles += [*own, s.weight_bundles[w], s.weight_bundles[w] + 1]
        return groups, bundles

    def _first_release(self, i: int, bundles: Sequence[int], top: int) -> int:
        """The first instant at which a task that was kept releases one of the new arcs; 0 where a new task waits for nothing."""
        pool = self.builder.pool
        if not any(e.consumer == i for e in (self.graph.edges[k] for k in self.structure.edges_of[i])):
            return 0
        fixed = [b for b in bundles if pool.base[self.structure.sources[b]] < top]
        kept = [s for b in fixed for s in [pool.sources_of(b)] if len(s)]
        return min((int(pool.end[s].min()) for s in kept), default=NEVER)

    # -- both --------------------------------------------------------------------------------------------------------

    def _run(self, again: Ints, border: Ints, runs: NDArray[np.bool_], limit: int) -> int:
        pool, s = self.builder.pool, self.structure
        self.ran += len(again)
        kept = np.flatnonzero(pool.alive[: pool.top] & ~runs)
        busy = self._busy(again, kept)
        pool.waits[again] = 0
        where = (pool.group, pool.base, s.first, s.bundles, pool.pointer, pool.arcs)
        prepare, rerun, _ = self._loops(len(again))
        prepare(again, border, runs, where, pool.waits, pool.ready, pool.end)
        tails = self.bounds() if limit < NEVER else np.zeros(s.groups, np.int64)
        operators = len(self.graph.operators)
        after = min(int(tails[s.last_phase(i)]) for i in range(operators))
        tasks, times = (pool.work, pool.stream, pool.key), (pool.waits, pool.ready, pool.start, pool.end)
        latest = rerun(again, tasks, where, times, busy, tails, 3 * operators, after, limit)
        return NONE if latest == NONE else max(int(latest), int(pool.end[kept].max(initial=0)))

    def _busy(self, again: Ints, kept: Ints) -> tuple[Ints, Ints, Ints]:
        """[streams]: when each is free of the tasks ``kept``; ticks of those that run ``again``, and of their first phases."""
        pool, count = self.builder.pool, self.machine.count + len(self.machine.links)
        last = np.zeros(count, np.int64)
        on = kept[pool.stream[kept] >= 0]
        np.maximum.at(last, pool.stream[on], pool.end[on])
        on = again[pool.stream[again] >= 0]
        first = on[(pool.group[on] < 3 * len(self.graph.operators)) & (pool.group[on] % 3 != UPDATE)]
        load, early = (np.bincount(pool.stream[x], pool.work[x], count).astype(np.int64) for x in (on, first))
        return last, load, early

    def _loops(self, tasks: int = 0) -> tuple[Any, Any, Any]:
        """The functions of `task_loop`: compiled, or where tasks are few, as plain Python."""
        if self.engine == "auto" and tasks >= _FEW:
            self.engine = "numba" if compiled() is not None else "python"
        if self.engine != "numba":
            return task_loop.prepare, task_loop.rerun, task_loop.tails
        functions = compiled()
        if functions is None:
            raise PlacementError("the compiled simulator needs Numba, which is not installed: pip install 'shardplan[fast]'")
        return functions

    def bounds(self) -> Ints:
        """[groups]: ticks that pass at least after any task of each group (`shardplan.placement.tails`)."""
        return self._tails.bounds(self.builder.reduced, self._loops(0)[2])

    def times(self) -> Times:
        """The timeline of the present strategy."""
        pool = self.builder.pool
        live = np.flatnonzero(pool.alive[: pool.top])
        live = live[np.argsort(pool.key[live], kind="stable")]
        return Times(*(x[live] for x in (pool.key, pool.group, pool.stream, pool.ready, pool.start, pool.end)))


_FEW = 3_000
"""Strategies of fewer tasks run as plain Python: the loop takes seconds to compile, once."""


@cache
def compiled() -> tuple[Any, Any, Any] | None:
    """The functions of the loop compiled by Numba; None if it is not installed."""
    try:
        numba = import_module("numba")
    except ImportError:
        return None
    functions = (task_loop.prepare, task_loop.rerun, task_loop.tails)
    return tuple(numba.njit(cache=True)(f) for f in functions)  # type: ignore[return-value]
