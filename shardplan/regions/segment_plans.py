"""The input of a backend for each segment: its program with the choices of its group's plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardplan.collectives.issued import StepCost
from shardplan.collectives.reshard import Programs
from shardplan.cost import Network
from shardplan.graph import Graph, flatten
from shardplan.ir import BodyChoices, Choices, Factor, Layout, Program, Where
from shardplan.mesh import Cluster
from shardplan.regions.tasks import Piece
from shardplan.schedule import Ends, PlannedProgram, Schedule, build, issued, planned_program, windows
from shardplan.simulate.simulated_step import peak_bytes


@dataclass(frozen=True)
class GroupChoices:
    """The choices for the program of a group: its devices as a cluster, the mesh axes, and how everything is cut.

    ``programs`` are the collectives of reshardings there. Equal groups share them.
    """

    cluster: Cluster
    factors: tuple[Factor, ...]
    choices: Choices
    overlaps: bool
    programs: Programs

    def below(self, where: Where) -> GroupChoices:
        """The choices for the body at this path, as a program."""
        bodies = {w[len(where) :]: body for w, body in self.choices.bodies.items() if w[: len(where)] == where}
        return replace(self, choices=replace(self.choices, bodies=bodies))

    def layouts(self) -> tuple[Layout | None, ...]:
        """The layout of each tensor of the program."""
        return self.choices.bodies[()].layouts


def segment_piece(
    name: str,
    group: int,
    program: Program,
    ends: tuple[Sequence[int], Sequence[int]],
    own: GroupChoices,
    layouts: Ends | None = None,
    replicate: Sequence[str] = (),
) -> Piece:
    """A segment as a piece. ``ends`` are the step's tensors for its program's inputs and outputs, ``layouts`` the layouts in
    which they enter and leave.
    """
    graph = flatten(program, replicate=replicate)
    planned = planned_program(
        program, graph, _choices_of(own.choices, graph), own.cluster, own.factors, own.overlaps, own.programs
    )
    schedule = build(planned, layouts)
    cost, inside = cost_of(planned, schedule), _inside_bytes(planned, schedule)
    return Piece(name, group, tuple(ends[0]), tuple(ends[1]), (planned, schedule), cost, inside_bytes=inside)


def _inside_bytes(planned: PlannedProgram, schedule: Schedule) -> int:
    """The most bytes that a device needs while it runs a piece, beside its arguments and results, as simulated."""
    graph = planned.graph
    ends = 0.0
    for t in (*graph.inputs, *graph.outputs):
        if t >= 0:
            layout = planned.layouts[t]
            ends += graph.tensors[t].nbytes / math.prod(planned.sizes[f] for f in (() if layout is None else layout.used))
    return max(0, math.ceil(peak_bytes(schedule, planned) - ends))


def cost_of(planned: PlannedProgram, schedule: Schedule) -> StepCost:
    """The cost of a piece on one device."""
    network = planned.programs.resharder.network
    assert isinstance(network, Network), "seconds are priced over links"
    return StepCost(
        issued=issued(schedule, planned, windows(schedule, planned) if planned.overlaps else None),
        compute_s=sum(s * node.weight for s, node in zip(planned.op_seconds, planned.graph.nodes, strict=True)),
        contention=network.cluster.device.contention,
        host_s=0.0,  # groups of devices keep nothing in host memory
    )


def _choices_of(choices: Choices, graph: Graph) -> Choices:
    """The choices of a group's program for the ops of one segment."""
    ops = {(n.where, n.op.id) for n in graph.nodes}

    def own(where: Where, body: BodyChoices) -> BodyChoices:
        return replace(
            body,
            uses={op: use for op, use in body.uses.items() if (where, op) in ops},
            reads={(op, slot): copy for (op, slot), copy in body.reads.items() if (where, op) in ops},
        )

    return replace(choices, bodies={w: own(w, body) for w, body in choices.bodies.items() if w in graph.bodies})
