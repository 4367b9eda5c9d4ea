"""The price of one written sharding of a step: compute, collectives, memory. No search for a better one.

Where a batch is taken in microbatches, one of them is priced, and the step is put together as training frameworks run it: compute
and tensor parallelism in each microbatch; the gathers and reductions of ZeRO-3 too; gradients of other shardings are reduced
once, and parameters are updated once. (A plan would place them as is fastest.)
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from truth_rows import Row

from shardplan.cost import TIME
from shardplan.frontend.argnums import leaves_of
from shardplan.frontend.nnx_state import trace_step
from shardplan.frontend.trace import Traced
from shardplan.graph import Graph, flatten
from shardplan.plans.summary import Scheduled, scheduled
from shardplan.search.baselines.recipes import LeftOut, written
from shardplan.search.baselines.rivals import Rivals, alone
from shardplan.search.coarsening import Coarse, coarsen
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem.extract import Extractor
from shardplan.search.problem.problem import Problem
from shardplan.search.session import Session


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds and bytes of one step on one device.

    ``tensor_s`` are those of collectives over tensor parallel devices alone, ``data_s`` those of all others: gradients, and
    state that is sharded over the data. ``launches`` counts the kernels of compute and the collectives.
    """

    compute_s: float
    tensor_s: float
    data_s: float
    peak_bytes: float
    launches: float

    @property
    def communication_s(self) -> float:
        """Seconds of all collectives."""
        return self.tensor_s + self.data_s

    @property
    def serial_s(self) -> float:
        """The step if nothing overlaps."""
        return self.compute_s + self.communication_s

    @property
    def hidden_s(self) -> float:
        """The step if all communication hides behind compute, or all compute behind communication."""
        return max(self.compute_s, self.communication_s)

    @property
    def partly_s(self) -> float:
        """The step if what the backward pass does not wait for hides: gradients and sharded state, not tensor parallelism."""
        return max(self.compute_s + self.tensor_s, self.data_s)


DEPTHS = 2, 4
"""The layers at which deep unrolled stacks are priced."""


class UnpricedError(Exception):
    """A row whose sharding does not exist for its step."""


def fusible(model: str) -> bool:
    """Whether a model offers fused attention."""
    return "attention" in inspect.signature(importlib.import_module(f"models.{model}").train_step).parameters


def price(row: Row) -> Price:
    """The price of a row.

    A stack of equal layers that is not scanned is priced at `DEPTHS`, and its own depth follows: every layer adds the same.

    Raises:
        UnpricedError: where its sharding does not divide the step.
    """
    layers = row.options.get("layers", 0)
    if row.options.get("scan", True) or layers <= max(DEPTHS):
        return _price(row)
    few, more = (_price(replace(row, options={**row.options, "layers": depth})) for depth in DEPTHS)
    part = (layers - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])
    values = [(getattr(few, f.name), getattr(more, f.name)) for f in fields(Price)]
    return Price(*(a + part * (b - a) for a, b in values))


def _price(row: Row) -> Price:
    run, session = _priced(row)
    _, roles = row.sharding.on(row.cluster)
    inside = set(roles["tensor"])
    tensor_s = sum(i.seconds * i.times for i in run.issued if set(i.over) <= inside)
    data_s = run.communication_s - tensor_s
    n, once_s = row.microbatches, _update_s(session)
    repeated = n if row.sharding.fsdp > 1 else 1
    compute_s = n * (session.decisions.compute_s - once_s) + once_s
    kernels = sum(node.costed.traffic.launches * node.weight for node in session.graph.nodes if node.costed.traffic)
    launches = n * (kernels + sum(i.times for i in run.issued))
    return Price(compute_s, n * tensor_s, repeated * data_s, session.solution.peak_bytes, launches)


def _update_s(session: Session) -> float:
    """Seconds of the arithmetic on parameters and optimizer state, which runs once for all microbatches."""
    problem, graph = session.problem, session.graph
    state = {graph.inputs[i] for i in graph.feedback if i is not None}
    total = 0.0
    for v, inside in problem.interior.items():
        if state.intersection(problem.coarse.variables[v].tensors):
            local = float(problem.resharder.space(inside.shape).local[session.solution.states[v]])
            total += inside.seconds * local + inside.launches_s
    return total


def _priced(row: Row) -> tuple[Scheduled, Session]:
    """The schedule and the session of a row's sharding, for one microbatch."""
    options = dict(row.options)
    fused = options.pop("fused", False)
    if fused and fusible(row.model):
        options["attention"] = "flash"
    traced, graph, coarse = _traced(row.model, tuple(sorted(options.items())))
    factors, roles = row.sharding.on(row.cluster)
    problem = Problem(graph, coarse, row.cluster, factors)
    donated = frozenset(leaves_of(traced.in_tree, (0,)))
    solver = Solver(problem, memory.liveness(problem, donated))
    restriction = written(problem, row.id, **roles)
    if isinstance(restriction, LeftOut):
        raise UnpricedError(restriction.reason)
    solution = alone(solver, restriction)
    if solution is None:
        raise UnpricedError("no assignment of layouts keeps to it")
    session = Session(
        program=traced.program,
        problem=problem,
        solution=solution,
        rivals=Rivals(solver),
        bound=None,
        extractor=Extractor(problem),
        donated=donated,
        pins={},
        memory_limit=row.cluster.device.memory_bytes,
        objective=TIME,
        replicate=(),
    )
    return scheduled(session), session


@functools.lru_cache(maxsize=8)
def _traced(model: str, options: tuple[tuple[str, Any], ...]) -> tuple[Traced, Graph, Coarse]:
    """A step, traced and coarsened: rows that share model and shapes share it."""
    made: Mapping[str, Any] = dict(options)
    step, args = importlib.import_module(f"models.{model}").train_step(**made)
    traced = trace_step(step, args, (0,))
    graph = flatten(traced.program, replicate=())
    return traced, graph, coarsen(graph, "timesteps")
