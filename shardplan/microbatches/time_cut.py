"""How each op of a step is cut over microbatches: the plan of a machine whose only level is time.

The batch is split, state and weights are whole, and a byte that one microbatch needs from another costs so much that the cut
needs as few as possible. The moves that remain are sums over all microbatches; `phases` refuses any others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardplan.cost import TIME
from shardplan.errors import MicrobatchError
from shardplan.graph import flatten
from shardplan.ir import Factor, Program
from shardplan.mesh import Cluster, Device
from shardplan.mesh.machine import Level
from shardplan.schedule import Block, PlannedProgram, planned_program
from shardplan.schedule.changes import in_single_steps
from shardplan.schedule.passes.dedupe import shared
from shardplan.schedule.passes.extents import with_extents
from shardplan.schedule.passes.prune import pruned
from shardplan.schedule.spelling import spelled_out
from shardplan.search.baselines.recipes import batch_limits
from shardplan.search.coarsening import coarsen
from shardplan.search.coarsening.coarsen import FREE
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem.extract import Extractor
from shardplan.search.problem.problem import Problem

AXIS = "microbatch"
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
            raise MicrobatchError(f"{where}, whose first dim does not divide into {count} microbatches: choose a divisor of it")
    graph = flatten(program, replicate=replicate)
    level = Level(AXIS, count, 1 / _BYTE_S, 0.0)
    device = Device("time", {"float32": 1 / _FLOP_S}, 1 / _FLOP_S, 1 << 62, launch_s=0.0)
    cluster, factors = Cluster(f"{count} microbatches", (level,), device), (Factor(AXIS, count, 0),)
    problem = Problem(graph, coarsen(graph, "timesteps"), cluster, factors, objective=TIME)
    domains = list(problem.domains)
    for i, t in enumerate(graph.inputs):
        v = problem.coarse.of[t]
        if v == FREE:
            continue
        roles = problem.space(v).roles
        wanted = 0 if i in batch else -1
        domains[v] = tuple(s for s in domains[v] if roles[s][0] == wanted)
        if not domains[v]:
            raise MicrobatchError(
                f"{program.input_paths[i]} shares its layout with an argument that is {'whole' if i in batch else 'the batch'}"
            )
    solver = Solver(problem, memory.liveness(problem, frozenset()))
    solution, seconds = solver.minimum(AXIS, domains, limits=batch_limits(problem, [graph.inputs[i] for i in batch]))
    if not math.isfinite(seconds):
        raise MicrobatchError(f"no cut of this step into {count} microbatches exists")
    extractor = Extractor.of(problem)
    choices = extractor.choices(extractor.decide(solution))
    return planned_program(program, graph, choices, cluster, factors, overlaps=False, programs=problem.programs)


def instructions(planned: PlannedProgram) -> Block:
    """The instructions of one microbatch, with moves for the values that it needs from others."""
    spelled, _ = spelled_out(planned)
    body = shared(pruned(in_single_steps(spelled.body)))
    return with_extents(body, planned.sizes, [planned.graph.tensors[t].shape for t in planned.graph.inputs])
