"""Cuts a step whose ops have groups, with or without a loop over microbatches: the program of each group, and the tasks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import assert_never

from shardplan.errors import PlacementError
from shardplan.ir import Program
from shardplan.regions.assignment import Group, assigned, free_ops
from shardplan.regions.group_programs import GroupProgram, StepSplit, split
from shardplan.regions.issues import Dispatch, Issue, with_last
from shardplan.regions.layer_parts import LayerParts
from shardplan.regions.looped import looped_graph
from shardplan.regions.loops import LoopSplit, loop_of
from shardplan.regions.placed import PlacedStep, placed_graph
from shardplan.regions.segment_plans import GroupChoices
from shardplan.regions.tasks import Key, PlacedTaskGraph, Task, Transfer
from shardplan.regions.tied_sums import SplitSums, split_sums

Cut = StepSplit | LoopSplit
"""A step cut into segments, as a whole or as a loop over microbatches."""


def cut_of(
    program: Program,
    groups: Sequence[Group],
    outer: Mapping[int, int],
    inner: Mapping[int, int] | None,
    chunks: tuple[int, ...] = (),
    in_flight: tuple[int, ...] | None = None,
    layers: LayerParts | None = None,
    replicate: Sequence[str] = (),
) -> Cut:
    """The step cut for these groups. ``inner`` has the chunk of each op in the body of its loop over microbatches (None: no
    loop), ``chunks`` the group of each chunk. ``in_flight`` and ``replicate`` as in `LoopSplit`, ``layers`` as in `PlacedStep`.

    Raises:
        PlacementError: for an op without a group.
    """
    if inner is None:
        return split(assigned(program, tuple(groups), outer))
    sums = split_sums(SplitSums(program, loop_of(program), outer, inner), chunks)
    program, loop, outer, inner = sums.program, sums.loop, sums.outer, sums.inner
    for part, of in ((program, outer), (loop.bodies[0], inner)):
        free = free_ops(part)
        for op in part.ops:
            if op.id not in of and op.id not in free and op is not loop:
                raise PlacementError(f"there is no group for {op.primitive} at {op.source}")
    homes = {} if layers is None else {program.inputs[part]: stage for part, stage in layers.homes.items()}
    return LoopSplit(program, loop, tuple(groups), outer, inner, chunks, in_flight, homes, tuple(replicate))


def group_parts(cut: Cut) -> tuple[GroupProgram, ...]:
    """The program of each group, which is planned in one piece."""
    match cut:
        case StepSplit():
            return cut.group_parts
        case LoopSplit():
            return tuple(cut.group_program(g)[0] for g in range(len(cut.groups)))
        case _:
            assert_never(cut)


def donated_tensors(program: Program, leaves: Collection[int], layers: LayerParts | None = None) -> frozenset[int]:
    """The tensors of these donated leaves of the arguments; ``layers`` as in `PlacedStep`."""
    inputs = leaves if layers is None else layers.parts_of(sorted(leaves))
    return frozenset(program.inputs[i] for i in inputs)


def graph_of(cut: Cut, choices: Sequence[GroupChoices], replicate: Sequence[str], donated: frozenset[int]) -> PlacedTaskGraph:
    """The tasks that run, with the choices of the groups' plans; ``donated`` as in `PlacedTaskGraph`."""
    match cut:
        case StepSplit():
            return placed_graph(cut, choices, replicate, donated)
        case LoopSplit():
            return looped_graph(cut, choices, donated)
        case _:
            assert_never(cut)


def step_of(cut: Cut, graph: PlacedTaskGraph, dispatch: Dispatch, layers: LayerParts | None = None) -> PlacedStep:
    """The step in the order of ``dispatch``; ``layers`` as in `PlacedStep`."""
    return PlacedStep(cut.program if isinstance(cut, LoopSplit) else cut.assignment.program, graph, dispatch, layers)


def in_order(graph: PlacedTaskGraph, issues: Sequence[Issue]) -> Dispatch:
    """The dispatch of these issues.

    Raises:
        PlacementError: if a task or a transfer is missing or comes twice, or runs before its operands are there.
    """
    if sorted(id(i.what) for i in issues) != sorted(map(id, (*graph.tasks, *graph.transfers))):
        raise PlacementError(f"the order does not have each of {len(graph.tasks)} runs and {len(graph.transfers)} transfers once")
    there: set[tuple[int, Key]] = set(graph.inputs)
    for issue in issues:
        match issue.what:
            case Task() as task:
                name, group = graph.pieces[task.piece].name, graph.pieces[task.piece].group
                reads, makes = [(group, key) for key in task.reads], [(group, key) for key in task.makes]
            case Transfer(key, source, target, _):
                name, reads, makes = f"a transfer to group {target}", [(source, key)], [(target, key)]
        if not there.issuperset(reads):
            raise PlacementError(f"{name} comes before what it reads")
        there.update(makes)
    return Dispatch(with_last(graph, issues))
