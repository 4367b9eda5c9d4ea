"""The price of one written sharding of a step: compute, collectives, memory. No search for a better one.

Where a batch is taken in microbatches, one of them is priced, and the step is put together as training frameworks run it: compute
and tensor parallelism in each microbatch; the gathers and reductions of ZeRO-3 too; gradients of other shardings are reduced
once, and parameters are updated once. (A plan would place them as is fastest.)

Rows of frameworks that run PyTorch without compilation have kernels for its functions (`truth_eager`), not those that XLA makes.
Fused attention counts two products forward and five backward, as rates of such kernels are published; JAX's Pallas kernel, by
which it is traced, has seven backward.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from benchmarks.truth_eager import call_of
from benchmarks.truth_rows import Row
from shardplan.collectives.issued import Issued
from shardplan.cost import TIME, compute
from shardplan.cost.overlap import step_s
from shardplan.frontend.argnums import leaves_of
from shardplan.frontend.nnx_state import trace_step
from shardplan.frontend.trace import Traced
from shardplan.graph import Graph, flatten
from shardplan.graph.kernel_traffic import with_traffic
from shardplan.mesh import Device
from shardplan.planning.scheduled import Scheduled, scheduled
from shardplan.schedule import issued, windows
from shardplan.search.baselines.recipes import LeftOut, Restriction, written
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

    ``attention_s`` is the part of ``compute_s`` in fused attention, at the rate of the device. ``tensor_s`` are the seconds of
    collectives over tensor parallel devices alone, ``data_s`` those of all others: gradients, and state that is sharded over the
    data; ``hideable_s`` of both can hide behind compute, which they slow by ``contention``. ``launches`` counts the kernels of
    compute and the collectives.
    """

    compute_s: float
    attention_s: float
    tensor_s: float
    data_s: float
    hideable_s: float
    contention: float
    peak_bytes: float
    launches: float

    def with_attention(self, ratio: float) -> Price:
        """The price with fused attention that takes ``ratio`` times as long."""
        added_s = self.attention_s * (ratio - 1)
        return replace(self, compute_s=self.compute_s + added_s, attention_s=self.attention_s * ratio)

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

    @property
    def overlap_s(self) -> float:
        """The step if communication hides as far as the time model of plans lets it."""
        return step_s(self.compute_s, self.communication_s - self.hideable_s, self.hideable_s, self.contention)


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
    run, session = scheduled_row(row)
    _, roles = row.sharding.on(row.cluster)
    inside = set(roles["tensor"])
    n, once_s = row.microbatches, _update_s(session)
    repeated = n if row.sharding.fsdp > 1 else 1
    sent = issued(run.schedule, run.planned, windows(run.schedule, run.planned))
    times = [n if set(i.step.factors) <= inside else repeated for i in sent]
    counted_s, attention_s = _attention_s(session, row.cluster.device, row.cluster.size)
    compute_s = session.decisions.compute_s + attention_s - counted_s
    kernels = sum(node.costed.traffic.launches * node.weight for node in session.graph.nodes if node.costed.traffic)
    return Price(
        compute_s=n * (compute_s - once_s) + once_s,
        attention_s=n * attention_s,
        tensor_s=n * sum(_seconds(i) for i in sent if set(i.step.factors) <= inside),
        data_s=repeated * sum(_seconds(i) for i in sent if not set(i.step.factors) <= inside),
        hideable_s=sum(k * i.hideable_s * i.times for k, i in zip(times, sent, strict=True)),
        contention=run.contention,
        peak_bytes=session.solution.peak_bytes,
        launches=n * (kernels + sum(i.times for i in run.issued)),
    )


def _seconds(sent: Issued) -> float:
    return sent.seconds * sent.times


def _attention_s(session: Session, device: Device, devices: int) -> tuple[float, float]:
    """Seconds of fused attention, which batch and heads spread evenly over all devices: as it is traced, and as rates count."""
    traced = published = 0.0
    for node in session.graph.nodes:
        signature = node.signature
        if signature.attends and signature.description is not None:
            flops = compute.flops(signature.description) * node.weight / devices
            peak = device.flops_per_s[compute.rated(device, signature.call.dtypes[0])]
            traced += flops / (peak * device.attention_efficiency)
            published += (
                flops / (peak * device.attention_efficiency) * _PUBLISHED[signature.call.primitive.removeprefix("pallas_call:")]
            )
    return traced, published


_PUBLISHED: Mapping[str, float] = {
    **dict.fromkeys(("mha_forward", "mha_preprocess_backward", "pallas_flash_attention", "pallas_flash_attention_fwd_res"), 1.0),
    **dict.fromkeys(("mha_backward", "pallas_flash_attention_vjp"), 5 / 7),
}
"""The products of a kernel as rates are published, over those that it has in the file of JAX or tokamax."""


def _update_s(session: Session) -> float:
    """Seconds of the arithmetic on parameters and optimizer state, which runs once for all microbatches."""
    problem, graph = session.problem, session.graph
    state = {graph.inputs[i] for i in graph.feedback if i is not None}
    updated = (v for v in problem.interior if state.intersection(problem.coarse.variables[v].tensors))
    states = session.solution.states
    return sum(problem.interior[v].seconds_at(float(problem.space(v).local[states[v]])) for v in updated)


def scheduled_row(row: Row) -> tuple[Scheduled, Session]:
    """The schedule and the session of a row's sharding, for one microbatch."""
    options = dict(row.options)
    fused = options.pop("fused", False)
    if fused and fusible(row.model):
        options["attention"] = "flash"
    traced, graph, coarse = _traced(row.model, tuple(sorted(options.items())), eager=row.eager)
    factors, roles = row.sharding.on(row.cluster)
    problem = Problem(graph, coarse, row.cluster, factors)
    donated = frozenset(leaves_of(traced.in_tree, (0,)))
    solver = Solver(problem, memory.liveness(problem, donated))
    restriction = written(problem, row.id, **roles)
    if isinstance(restriction, LeftOut):
        raise UnpricedError(restriction.reason)
    if row.sharding.whole_residual:
        restriction = _whole_residual(problem, restriction, row, roles["tensor"])
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


def _whole_residual(problem: Problem, restriction: Restriction, row: Row, tensor: Sequence[int]) -> Restriction:
    """The restriction under which tensor parallelism leaves the residual stream, [batch, sequence, width], whole.

    Megatron-LM's layers are split so (Shoeybi et al. 2019, section 3). The recipe alone would let a layer norm be split along
    the width, which no framework here does.
    """
    options = row.options
    sequence = (options["image"] // options["patch"]) ** 2 if "patch" in options else options.get("sequence")
    residual = options["batch"], sequence, options.get("width")
    domains = list(restriction.domains)
    for variable in problem.coarse.variables:
        if any(problem.graph.tensors[t].shape == residual for t in variable.tensors):
            whole = np.all(problem.space(variable.id).roles[:, list(tensor)] < 0, axis=1)
            domains[variable.id] = tuple(state for state in domains[variable.id] if whole[state])
    return replace(restriction, domains=tuple(domains))


@functools.lru_cache(maxsize=8)
def _traced(model: str, options: tuple[tuple[str, Any], ...], *, eager: bool) -> tuple[Traced, Graph, Coarse]:
    """A step, traced and coarsened: rows that share model and shapes share it. ``eager``: PyTorch's functions are its kernels."""
    made: Mapping[str, Any] = dict(options)
    step, args = importlib.import_module(f"models.{model}").train_step(**made)
    traced = trace_step(step, args, (0,))
    graph = flatten(traced.program, replicate=())
    graph = with_traffic(graph, call_of=call_of) if eager else graph
    return traced, graph, coarsen(graph, "timesteps")
