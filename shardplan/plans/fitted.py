"""A plan's choices applied to a traced step: the one that was planned, or one of the same ops whose shapes the choices fit."""

from __future__ import annotations

from collections.abc import Sequence

from shardplan.errors import MicrobatchError, PlacementError, PlanFileError
from shardplan.frontend.argnums import leaves_of
from shardplan.frontend.trace import Traced
from shardplan.graph import Graph, flatten
from shardplan.ir import Program
from shardplan.microbatches.accumulating import microbatched
from shardplan.microbatches.layers import staged_program
from shardplan.offload import in_host_memory, offloaded
from shardplan.plans.data import PlanData
from shardplan.plans.fit import check_choices
from shardplan.plans.placed_data import PlacedData, group_choices
from shardplan.regions.cuts import cut_of, donated_tensors, graph_of, group_parts, in_order, step_of
from shardplan.regions.issues import Issue
from shardplan.regions.placed import PlacedStep
from shardplan.regions.tasks import PlacedTaskGraph
from shardplan.remat import rematerialised


def program_of(name: str, data: PlanData, traced: Traced) -> Program:
    """The program that a plan is for: the step in its microbatches, with what is fetched from host memory and computed again.

    Raises:
        PlanFileError: if what is computed again is not in the step; ``name`` is the name of the file.
    """
    try:
        program = microbatched(traced.program, data.microbatches, data.replicate)
        program = offloaded(program, data.offloaded)
        return in_host_memory(rematerialised(program, data.remat.parts), data.hosted)
    except (KeyError, IndexError, ValueError, StopIteration) as error:
        raise PlanFileError(f"{name}: the parts that it recomputes are not in this step; plan this step again") from error


def fitted(name: str, data: PlanData, traced: Traced) -> tuple[Program, Graph]:
    """The program that a plan is for, and its graph, which the choices fit.

    Raises:
        PlanFileError: if they do not.
    """
    program = program_of(name, data, traced)
    graph = flatten(program, replicate=data.replicate, backend=data.backend)
    check_choices(name, data, program, graph)
    return program, graph


def fitted_groups(name: str, data: PlacedData, traced: Traced) -> PlacedStep:
    """The programs of a plan with groups of devices, in the order of the plan.

    Raises:
        PlanFileError: if the groups, their plans or the order do not fit the step.
    """
    replicate = data.groups[0].replicate
    try:
        parts, stages = data.groups[0].microbatches, len(data.devices) if data.array_of else 1
        staged = staged_program(traced.program, parts, stages, replicate)
        cut = cut_of(staged.program, data.devices, data.outer, data.inner, data.chunks, data.in_flight, staged.layers, replicate)
        for n, (part, plan) in enumerate(zip(group_parts(cut), data.groups, strict=True)):
            check_choices(f"{name}: group {n}", plan, part.program, flatten(part.program, replicate=plan.replicate))
        donated = leaves_of(traced.in_tree, data.groups[0].donate_argnums)
        owned = donated_tensors(staged.program, donated, staged.layers)
        graph = graph_of(cut, group_choices(data.groups), replicate, owned)
        return step_of(cut, graph, in_order(graph, _issues(data, graph)), staged.layers)
    except (PlacementError, MicrobatchError) as error:
        raise PlanFileError(f"{name}: {error}; plan this step again") from error


def _issues(data: PlacedData, graph: PlacedTaskGraph) -> Sequence[Issue]:
    """The issues that the plan names.

    Raises:
        PlacementError: for a number that does not exist.
    """
    found: list[Issue] = []
    for row in data.issues:
        own = graph.tasks if row.kind == "task" else graph.transfers
        if row.number >= len(own):
            raise PlacementError(f"the order names {row.kind} {row.number}, and the step has {len(own)}")
        found.append(Issue(own[row.number], row.start_s, row.end_s))
    return found
