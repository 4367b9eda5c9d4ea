"""The shortest schedule of a small DAG, proven: a mixed-integer program solved by HiGHS.

A task has a binary variable for each device; two tasks without a path between them have one for each order, and one of the two
orders holds where both run on one device. Paths before and after a task bound its start from below and above, so that the
constants of the disjunctions are small. Equal devices are used in the order of their ids.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from shardplan.errors import ScheduleError

from .graph import Dag, Transfer, best_tails
from .schedules import Orders, TaskSchedule

# Twelve tasks on eight devices took 5 s at most on DAGs drawn as in benchmarks/fd_dps.py.
MAX_TASKS = 12
# The relative gap at which HiGHS ends its proof, of the order of its feasibility tolerance: a smaller one cannot be told from it.
GAP = 1e-6


def exact(dag: Dag, known: TaskSchedule, *, time_limit_s: float | None = None) -> TaskSchedule:
    """The shortest schedule; ``known`` is any valid schedule, whose makespan bounds the search.

    Raises `ScheduleError` for more than `MAX_TASKS` tasks, and where ``time_limit_s`` ends before the proof.
    """
    if dag.tasks > MAX_TASKS:
        raise ScheduleError(
            f"method 'exact' takes up to {MAX_TASKS} tasks, and there are {dag.tasks}: use method 'fd-dps' or 'heft'"
        )
    if known.makespan_s == 0:
        return known
    model = _model(dag, known.makespan_s)
    answer = model.solve(time_limit_s)
    if answer.status == 1:
        raise ScheduleError(f"no shortest schedule of {dag.tasks} tasks is proven within {time_limit_s:g} s: allow more time")
    if answer.x is None:  # nothing is shorter than the known one, within the solver's tolerance
        return known
    best = _schedule(dag, answer.x)
    return best if best.makespan_s < known.makespan_s else known


@dataclass(frozen=True, slots=True)
class _Model:
    """Rows and columns while a program is written. The makespan is the last of the first columns."""

    lower: list[float] = field(default_factory=list[float])
    upper: list[float] = field(default_factory=list[float])
    whole: list[int] = field(default_factory=list[int])
    rows: list[tuple[Mapping[int, float], float, float]] = field(default_factory=list[tuple[Mapping[int, float], float, float]])
    cost: dict[int, float] = field(default_factory=dict[int, float])

    def column(self, low: float = 0.0, high: float = 1.0, *, whole: bool = False) -> int:
        """A new variable's index."""
        self.lower.append(low)
        self.upper.append(max(low, high))
        self.whole.append(int(whole))
        return len(self.lower) - 1

    def at_least(self, terms: Mapping[int, float], low: float, high: float = np.inf) -> None:
        """A row: ``low`` <= the sum of the terms <= ``high``."""
        self.rows.append((terms, low, high))

    def solve(self, time_limit_s: float | None) -> Any:
        """SciPy's answer."""
        entries = [(r, c, v) for r, (terms, _, _) in enumerate(self.rows) for c, v in terms.items()]
        r, c, v = zip(*entries, strict=True)
        table = csr_array((v, (r, c)), shape=(len(self.rows), len(self.lower)))
        cost = np.zeros(len(self.lower))
        cost[list(self.cost)] = list(self.cost.values())
        low, high = np.array([row[1] for row in self.rows]), np.array([row[2] for row in self.rows])
        options: Any = {"mip_rel_gap": GAP, **({} if time_limit_s is None else {"time_limit": time_limit_s})}
        return milp(
            cost,
            integrality=np.array(self.whole),
            bounds=Bounds(np.array(self.lower), np.array(self.upper)),
            constraints=LinearConstraint(table, low, high),
            options=options,
        )


@dataclass(frozen=True, slots=True)
class _Task:
    """A task's columns, and bounds that hold wherever it runs; seconds in units of the known makespan."""

    on: list[int]  # [devices]
    start: int
    seconds: NDArray[np.float64]  # [devices]
    head: NDArray[np.float64]  # [devices], the earliest start
    tail: NDArray[np.float64]  # [devices], the least time from its end to the last end

    def terms(self, row: NDArray[np.float64], factor: float = 1.0) -> dict[int, float]:
        """The sum over devices of ``row`` where the task runs."""
        return {c: factor * float(v) for c, v in zip(self.on, row, strict=True)}


def _model(dag: Dag, unit_s: float) -> _Model:
    model, devices = _Model(), range(dag.devices)
    seconds = np.array(dag.times_s) / unit_s
    heads = np.maximum(np.array(best_tails(dag.reversed())), np.array(dag.ready_s)) / unit_s
    tails = np.array(best_tails(dag)) / unit_s
    on = [[model.column(whole=True) for _ in devices] for _ in range(dag.tasks)]
    starts = [model.column(float(heads[i].min()), 1 - float((seconds[i] + tails[i]).min())) for i in range(dag.tasks)]
    tasks = [_Task(on[i], starts[i], seconds[i], heads[i], tails[i]) for i in range(dag.tasks)]
    makespan = model.column()
    model.cost[makespan] = 1.0
    for task in tasks:
        model.at_least(dict.fromkeys(task.on, 1.0), 1.0, 1.0)
        model.at_least({task.start: 1.0, **task.terms(task.head, -1.0)}, 0.0)
        model.at_least({makespan: 1.0, task.start: -1.0, **task.terms(task.seconds + task.tail, -1.0)}, 0.0)
    for d in devices:
        model.at_least({makespan: 1.0, **{task.on[d]: -float(task.seconds[d]) for task in tasks}}, 0.0)
        if np.isfinite(dag.memory[d]):
            scale = max(dag.memory[d], 1e-300)
            model.at_least({task.on[d]: size / scale for task, size in zip(tasks, dag.sizes, strict=True)}, -np.inf, 1.0)
    for i, row in enumerate(dag.children):
        for j, transfer in row:
            _edge(model, tasks[i], tasks[j], transfer, unit_s)
    for i, j in _unordered(dag):
        _disjunction(model, tasks[i], tasks[j])
    _break_symmetry(model, dag, tasks)
    return model


def _edge(model: _Model, a: _Task, b: _Task, transfer: Transfer, unit_s: float) -> None:
    """b starts when a has ended and its result has travelled."""
    devices = range(len(a.on))
    if not isinstance(transfer, tuple):  # all of it, less what is saved on a shared device
        rest = transfer / unit_s
        saved = {model.column(): -rest for _ in devices}
        for d, column in zip(devices, saved, strict=True):
            model.at_least({a.on[d]: 1.0, column: -1.0}, 0.0)
            model.at_least({b.on[d]: 1.0, column: -1.0}, 0.0)
        travel = saved
    else:
        rest = 0.0
        pair = {(d, e): model.column() for d in devices for e in devices}
        for d in devices:
            model.at_least({a.on[d]: 1.0, **{pair[d, e]: -1.0 for e in devices}}, 0.0, 0.0)
            model.at_least({b.on[d]: 1.0, **{pair[e, d]: -1.0 for e in devices}}, 0.0, 0.0)
        travel = {column: transfer[d][e] / unit_s for (d, e), column in pair.items()}
    sent = {column: -s for column, s in travel.items()}
    model.at_least({b.start: 1.0, a.start: -1.0, **a.terms(a.seconds, -1.0), **sent}, rest)


def _unordered(dag: Dag) -> list[tuple[int, int]]:
    """Pairs of tasks without a path between them."""
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(dag.tasks))
    graph.add_edges_from((i, j) for i, row in enumerate(dag.children) for j, _ in row)
    closure = nx.transitive_closure_dag(graph)
    pairs = itertools.combinations(range(dag.tasks), 2)
    return [(i, j) for i, j in pairs if not closure.has_edge(i, j) and not closure.has_edge(j, i)]


def _disjunction(model: _Model, a: _Task, b: _Task) -> None:
    """On one device, one ends before the other starts."""
    orders = {(0, 1): model.column(whole=True), (1, 0): model.column(whole=True)}
    for d in range(len(a.on)):
        model.at_least({**dict.fromkeys(orders.values(), 1.0), a.on[d]: -1.0, b.on[d]: -1.0}, -1.0)
    for (first, second), column in orders.items():
        i, j = (a, b)[first], (a, b)[second]
        slack = max(0.0, 1 - float(i.tail.min()) - float(j.head.min()))
        model.at_least({j.start: 1.0, i.start: -1.0, **i.terms(i.seconds, -1.0), column: -slack}, -slack)


def _break_symmetry(model: _Model, dag: Dag, tasks: list[_Task]) -> None:
    """Among equal devices, a task uses the next one only if an earlier task uses the one before."""
    if any(isinstance(pair[1], tuple) for row in dag.children for pair in row):
        return
    times, ready = np.array(dag.times_s), np.array(dag.ready_s)
    for d, e in itertools.combinations(range(dag.devices), 2):
        between = range(d + 1, e)
        if _alike(times, ready, dag.memory, d, e) and not any(_alike(times, ready, dag.memory, d, k) for k in between):
            for k, i in enumerate(dag.order):
                earlier = {tasks[j].on[d]: 1.0 for j in dag.order[:k]}
                model.at_least({**earlier, tasks[i].on[e]: -1.0}, 0.0)


def _alike(times: NDArray[np.float64], ready: NDArray[np.float64], memory: tuple[float, ...], d: int, e: int) -> bool:
    return memory[d] == memory[e] and bool((times[:, d] == times[:, e]).all() and (ready[:, d] == ready[:, e]).all())


def _schedule(dag: Dag, x: NDArray[np.float64]) -> TaskSchedule:
    """The solver's devices, and its orders freed of rounding: each task as early as they allow."""
    n, devices = dag.tasks, dag.devices
    device: list[int] = np.reshape(x[: n * devices], (n, devices)).argmax(1).tolist()
    start = x[n * devices : n * devices + n]
    orders = Orders(dag)
    left = [len(row) for row in dag.parents]
    ready = [(float(start[i]), i) for i in range(n) if not left[i]]
    heapq.heapify(ready)
    while ready:  # by start, but parents first in any case
        _, i = heapq.heappop(ready)
        orders.insert(i, device[i], len(orders.sequences[device[i]]))
        for j, _ in dag.children[i]:
            left[j] -= 1
            if not left[j]:
                heapq.heappush(ready, (float(start[j]), j))
    return orders.schedule()
