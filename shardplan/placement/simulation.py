"""Full and delta simulation of strategies (FlexFlow, sections 5.2 and 5.3, Algorithms 1 and 2).

A device or connection runs one task at a time, in the order in which tasks are ready. So nothing that is ready before the first
change is affected by it: the delta simulation replaces the tasks of the changed operators, keeps the timeline up to that instant
and runs the rest again. Its timeline equals that of a full simulation, to the tick.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardplan.errors import PlacementError
from shardplan.placement import task_loop
from shardplan.placement.configurations import Configuration
from shardplan.placement.device_topology import TICK_S, DeviceTopology
from shardplan.placement.operators import BACKWARD, UPDATE, OperatorGraph
from shardplan.placement.structure import structure_of
from shardplan.placement.tails import Tails
from shardplan.placement.task_graph import Table, TaskGraphBuilder
from shardplan.placement.task_loop import NEVER, NONE, Bounds, PoolTasks, Readers, RerunStreams, Scratch
from shardplan.placement.task_loop import TaskTimes as TimesOfTasks
from shardplan.placement.task_pool import Mark
from shardplan.simulate.compile_loops import compiled

Ints = NDArray[np.int64]
Engine = Literal["auto", "numba", "python"]


@dataclass(frozen=True, slots=True)
class StrategyTimes:
    """When each task of a strategy runs, in ticks: arrays [tasks], sorted by ``key``, which names tasks across strategies."""

    key: Ints
    group: Ints
    stream: Ints
    ready: Ints
    start: Ints
    end: Ints


@dataclass(frozen=True, slots=True)
class _Change:
    """The data that undo a change: the state of the pool, and the configurations. The times of the tasks that ran ``again`` are
    new.
    """

    mark: Mark
    before: Mapping[int, Configuration]
    ticks: int
    reduced: Ints
    again: Ints


class Simulation:
    """A strategy with its timeline, and changes to it. ``ticks`` is the time of a step, ``ran`` counts tasks that ran."""

    def __init__(self, graph: OperatorGraph, machine: DeviceTopology, tables: Sequence[Table], engine: Engine = "auto") -> None:
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
        pool.ready[: pool.top] = NEVER
        for i, chosen in enumerate(self.strategy):
            self._tails.change(i, chosen)
        self.ticks, again = self._run(0, NEVER)
        self._keep(again)
        return self.ticks

    # -- delta -------------------------------------------------------------------------------------------------------

    def change(self, changed: Mapping[int, Configuration], limit: int = NEVER) -> int | None:
        """Gives some operators other configurations and repairs the timeline (Algorithm 2); the ticks of a step.

        None once a step is certain to take more than ``limit`` ticks; then only `undo` may follow.
        """
        pool, s = self.builder.pool, self.structure
        self._settle()
        if pool.top > self._capacity:
            self.full(self.strategy)
        edges = list(dict.fromkeys(e for i in changed for e in s.edges_of[i]))
        weights = list(dict.fromkeys(w for i in changed for w in s.weights_of[i]))
        groups, bundles = self._touched(changed, edges, weights)
        mark, top = pool.mark(groups, bundles), pool.top
        now = min(
            (int(pool.ready[pool.base[g] : pool.base[g] + pool.count[g]].min(initial=NEVER)) for g in groups), default=NEVER
        )
        before, reduced = {i: self.strategy[i] for i in changed}, self.builder.reduced.copy()
        for i, chosen in changed.items():
            self.strategy[i] = chosen
            self._tails.change(i, chosen)
            self.builder.put_operator(i, chosen)
        for e in edges:
            self.builder.put_edge(e, self.strategy)
        for w in weights:
            self.builder.put_users(w, self.strategy, changed)
            self.builder.put_weight(w, self.strategy)
        now = min(now, self._first_release(changed, bundles, top))
        pool.ready[top : pool.top] = NEVER
        ticks, again = self._run(now, limit)
        self._change = _Change(mark, before, self.ticks, reduced, again)
        if ticks == NONE:
            return None
        self.ticks = ticks
        return ticks

    def undo(self) -> None:
        """Takes the last change back."""
        change, pool = self._change, self.builder.pool
        assert change is not None, "there is a change to undo"
        pool.go_back(change.mark)
        self.ticks, self._change = change.ticks, None
        self.builder.reduced = change.reduced
        for i, chosen in change.before.items():
            self.strategy[i] = chosen
            self._tails.change(i, chosen)

    def _touched(self, changed: Collection[int], edges: Sequence[int], weights: Sequence[int]) -> tuple[list[int], list[int]]:
        """The groups and bundles that a change of some operators replaces, with their ``edges`` and ``weights``."""
        s, groups, bundles = self.structure, list[int](), list[int]()
        for i in changed:
            groups += [3 * i, 3 * i + BACKWARD, 3 * i + UPDATE]
            bundles += [2 * i, 2 * i + 1]
        for e in edges:
            groups += [s.edge_group(e), s.edge_group(e) + 1]
            bundles += range(s.edge_bundle(e), s.edge_bundle(e) + 4)
        for w in weights:
            groups.append(s.weight_group(w) + 1)
            own = (b for b, u in zip(s.user_bundles[w], self.graph.weights[w].users, strict=True) if u in changed)
            bundles += [*own, s.weight_bundles[w], s.weight_bundles[w] + 1]
        return groups, bundles

    def _first_release(self, changed: Collection[int], bundles: Sequence[int], top: int) -> int:
        """The first instant at which a kept task releases one of the new arcs; 0 if a new task waits for nothing."""
        pool = self.builder.pool
        edges = self.graph.edges
        if any(all(edges[k].consumer != i for k in self.structure.edges_of[i]) for i in changed):
            return 0
        fixed = [b for b in bundles if pool.base[self.structure.sources[b]] < top]
        kept = [s for b in fixed for s in [pool.sources_of(b)] if len(s)]
        return min((int(pool.end[s].min()) for s in kept), default=NEVER)

    # -- both --------------------------------------------------------------------------------------------------------

    def _run(self, now: int, limit: int) -> tuple[int, Ints]:
        """Runs what is ready at ``now`` or later again; the ticks of a step (`NONE`: more than ``limit``), and these tasks."""
        pool, s, operators = self.builder.pool, self.structure, len(self.graph.operators)
        loops = self._loops(pool.top)
        again, border, queue, events = np.empty((4, pool.top), np.int64)
        tasks = PoolTasks(pool.work, pool.stream, pool.key, pool.group, pool.alive)
        times = TimesOfTasks(pool.ready, pool.end, pool.new_ready, pool.new_end, pool.waits)
        *columns, coming, free = np.zeros((8, self.machine.count + len(self.machine.links)), np.int64)
        streams = RerunStreams(*columns)
        streams.running[:] = NONE
        runs, ends, kept = loops["split"](now, pool.top, tasks, times, streams, 3 * operators, again, border)
        self.ran += runs
        again, border = again[:runs], border[:ends]
        border = border[np.argsort(pool.end[border], kind="stable")]
        tails = self.bounds() if limit < NEVER else np.zeros(s.groups, np.int64)
        bounds = Bounds(limit, tails, int(tails[s.last_phases].min()), 3 * operators)
        readers = Readers(pool.base, s.first, s.bundles, pool.pointer, pool.arcs)
        space = Scratch(queue, events, coming, free)
        latest = loops["rerun"](again, border, tasks, readers, times, streams, space, bounds)
        return (NONE if latest == NONE else max(latest, kept)), again

    def _settle(self) -> None:
        """Keeps the times of the last change, which can then no longer be undone."""
        if self._change is not None:
            self._keep(self._change.again)
            self._change = None

    def _keep(self, again: Ints) -> None:
        pool = self.builder.pool
        pool.ready[again], pool.end[again] = pool.new_ready[again], pool.new_end[again]

    def _loops(self, tasks: int = 0) -> Mapping[str, Callable[..., Any]]:
        """The functions of `task_loop`: compiled, or where tasks are few, as plain Python."""
        if self.engine == "auto" and tasks >= _FEW:
            self.engine = "numba" if compiled(task_loop.FUNCTIONS) is not None else "python"
        if self.engine != "numba":
            return _PLAIN
        functions = compiled(task_loop.FUNCTIONS)
        if functions is None:
            raise PlacementError("the compiled simulator needs Numba, which is not installed: pip install 'shardplan[fast]'")
        return functions

    def bounds(self) -> Ints:
        """[groups]: ticks that pass at least after any task of each group (`shardplan.placement.tails`)."""
        return self._tails.bounds(self.builder.reduced, self._loops()["tails"])

    def times(self) -> StrategyTimes:
        """The timeline of the present strategy."""
        pool = self.builder.pool
        ready, end = pool.ready.copy(), pool.end.copy()
        if self._change is not None:
            again = self._change.again
            ready[again], end[again] = pool.new_ready[again], pool.new_end[again]
        live = np.flatnonzero(pool.alive[: pool.top])
        live = live[np.argsort(pool.key[live], kind="stable")]
        columns = (pool.key, pool.group, pool.stream, ready, end - pool.work, end)
        return StrategyTimes(*(x[live].astype(np.int64) for x in columns))


_FEW = 3_000
"""Strategies of fewer tasks run as plain Python: the loop takes seconds to compile, once."""
_PLAIN = {function.__name__: function for function in task_loop.FUNCTIONS}
