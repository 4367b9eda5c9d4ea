"""A planned step on groups of devices, as the ``regions`` backend runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardplan.ir import Program
from shardplan.regions.group_programs import StepSplit
from shardplan.regions.issues import Dispatch
from shardplan.regions.layer_parts import LayerParts
from shardplan.regions.segment_plans import GroupChoices, segment_piece
from shardplan.regions.tasks import WHOLE, GroupMesh, PlacedTaskGraph, Result, Task, Transfer


@dataclass(frozen=True, slots=True)
class PlacedStep:
    """The program of a step, its tasks on groups of devices, and the order in which they are issued.

    ``layers`` says which of its arguments and results are parts of one array (None: none are).
    """

    program: Program
    graph: PlacedTaskGraph
    dispatch: Dispatch
    layers: LayerParts | None = None


def placed_graph(
    split: StepSplit, groups: Sequence[GroupChoices], replicate: Sequence[str], donated: frozenset[int]
) -> PlacedTaskGraph:
    """The segments of a step with the choices of their groups, scheduled on each device and priced."""
    program, assignment = split.assignment.program, split.assignment
    pieces = tuple(
        segment_piece(
            f"segment {n} of group {s.group}", s.group, part.program, (part.inputs, part.outputs), groups[s.group],
            replicate=replicate,
        )
        for n, (s, part) in enumerate(zip(split.segments, split.segment_parts, strict=True))
    )  # fmt: skip
    meshes = tuple(
        GroupMesh(devices, own.cluster, own.factors, dict(zip(part.tensors, own.layouts(), strict=True)))
        for devices, own, part in zip(assignment.groups, groups, split.group_parts, strict=True)
    )
    tasks = tuple(
        Task(n, WHOLE, tuple((t, WHOLE) for t in piece.reads), tuple((t, WHOLE) for t in piece.makes))
        for n, piece in enumerate(pieces)
    )
    transfers = tuple(Transfer((m.tensor, WHOLE), m.source, m.target, m.like) for m in split.transfers)
    inputs = tuple((assignment.home[t], (t, WHOLE)) for t in program.inputs)
    results = tuple(None if at is None else Result(at[0], (at[1], WHOLE), at[2]) for at in split.results)
    return PlacedTaskGraph(program.tensors, meshes, pieces, tasks, transfers, inputs, results, donated)
