"""How each op of a step is cut over microbatches: the plan of a machine whose only level is time.

A value that is made of the batch has one legal layout: it is split along its batch dim, or whole if it has none, as a sum over
all microbatches has. Any other value (a weight, noise from a key) may be whole or split, and shares no layout with values of the
batch, whatever its shape: an op that meets a split value takes a slice. A byte that one microbatch needs from another costs so
much that the cut needs as few as possible. The moves that remain are sums over all microbatches; `phases` refuses any others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set

from shardplan.collectives.reshard import split_dims
from shardplan.cost import TIME
from shardplan.errors import MicrobatchError
from shardplan.graph import flatten
from shardplan.ir import Factor, Program, Tensor
from shardplan.mesh import Cluster, Device
from shardplan.mesh.machine import Level
from shardplan.microbatches.counts import batch_rows, nearest_divisors
from shardplan.schedule import Block, PlannedProgram, planned_program
from shardplan.schedule.changes import in_single_steps
from shardplan.schedule.passes.dedupe import shared
from shardplan.schedule.passes.extents import with_extents
from shardplan.schedule.passes.prune import pruned
from shardplan.schedule.spelling import spelled_out
from shardplan.search.baselines.batch_dims import Examples, depending, follow
from shardplan.search.coarsening import coarsen
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem.composite_strategies import Cuts
from shardplan.search.problem.extract import Extractor
from shardplan.search.problem.pricing import Domain, Limits
from shardplan.search.problem.problem import Problem

AXIS = "microbatch"
_WHOLE = -1
"""The kind of a value that is made of the batch and has no batch dim."""
_BYTE_S = 1e-12
_FLOP_S = 1e-30
"""A byte between microbatches costs more than all the compute of a step, so the cut with the fewest bytes wins."""


def time_cut(program: Program, count: int, batch: Sequence[int], replicate: Sequence[str] = ()) -> PlannedProgram:
    """The step with the dim 0 of the inputs ``batch``, by number, cut into ``count`` microbatches, and every op cut accordingly.

    Raises:
        MicrobatchError: for a batch dim that does not divide, or if no such cut exists.
    """
    for i in batch:
        shape = program.tensors[program.inputs[i]].shape
        if not shape or shape[0] % count:
            where = f"{program.input_paths[i]} has the shape {list(shape)}"
            fitting = nearest_divisors(batch_rows(program, batch), count)
            raise MicrobatchError(f"{where}, whose first dim does not divide into {count} microbatches: choose {fitting}")
    graph = flatten(program, replicate=replicate)
    level = Level(AXIS, count, 1 / _BYTE_S, 0.0)
    device = Device("time", {"float32": 1 / _FLOP_S}, 1 / _FLOP_S, 1 << 62, launch_s=0.0)
    cluster, factors = Cluster(f"{count} microbatches", (level,), device), (Factor(AXIS, count, 0),)
    inputs = [graph.inputs[i] for i in batch]
    examples, made = follow(graph, inputs, forward=True), depending(graph, inputs)
    kinds = [_kind(t, examples) if t.id in made else None for t in graph.tensors]
    for t in inputs:  # whatever dim readers would have
        kinds[t] = split_dims(graph.tensors[t].shape).index(0)
    problem = Problem(graph, coarsen(graph, kinds=kinds), cluster, factors, objective=TIME)
    domains = _domains(problem, kinds)
    solver = Solver(problem, memory.liveness(problem, frozenset()))
    solution, seconds = solver.minimum(AXIS, domains, limits=_limits(problem, examples, made, count))
    if not math.isfinite(seconds):
        raise MicrobatchError(f"no cut of this step into {count} microbatches exists")
    extractor = Extractor.of(problem)
    choices = extractor.choices(extractor.decide(solution))
    return planned_program(program, graph, choices, cluster, factors, overlaps=False, programs=problem.programs)


def _kind(tensor: Tensor, examples: Examples) -> int:
    """The dim of a tensor's layout space along which the batch splits it, or `_WHOLE`."""
    own, batch = split_dims(tensor.shape), examples.batch[tensor.id]
    return own.index(batch) if batch in own else _WHOLE


def _domains(problem: Problem, kinds: Sequence[int | None]) -> list[Domain]:
    """The layouts that each variable may have: those of its kind, and the arguments of no kind are whole."""
    arguments = {problem.coarse.of[t] for t in problem.graph.inputs}
    result: list[Domain] = []
    for variable, domain in zip(problem.coarse.variables, problem.domains, strict=True):
        kind, roles = kinds[variable.tensors[0]], problem.space(variable.id).roles[:, 0]
        if kind is None and variable.id in arguments:
            kind = _WHOLE
        match kind:
            case None:
                own = domain
            case -1:
                own = tuple(s for s in domain if roles[s] < 0)
            case dim:
                own = tuple(s for s in domain if roles[s] == dim)
        result.append(own or domain)
    return result


def _limits(problem: Problem, examples: Examples, made: Set[int], count: int) -> Limits:
    """An op on values that are ``made`` of the batch is cut along the batch, or not at all."""
    result: dict[int, Cuts] = {}
    for n in problem.coarse.joins:
        node = problem.graph.nodes[n]
        if node.signature.description is not None and not made.isdisjoint(node.inputs):
            loops = frozenset(v for v in examples.loops(node)[0] if node.signature.cut(v, count) is not None)
            result[n] = (loops or frozenset({-1}),)
    return Limits(result)


def instructions(planned: PlannedProgram) -> Block:
    """The instructions of one microbatch, with moves for the values that it needs from others."""
    spelled, _ = spelled_out(planned)
    body = shared(pruned(in_single_steps(spelled.body)))
    return with_extents(body, planned.sizes, [planned.graph.tensors[t].shape for t in planned.graph.inputs])
