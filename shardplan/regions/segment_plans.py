"""What a backend needs of each segment: its program with the choices of its group's plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardplan.collectives.reshard import Programs, Resharder
from shardplan.cost import Network
from shardplan.graph import Graph, flatten
from shardplan.ir import BodyChoices, Choices, Factor, Layout
from shardplan.mesh import Cluster
from shardplan.regions.group_programs import Part, Split
from shardplan.schedule import PlannedProgram, planned_program


@dataclass(frozen=True, slots=True)
class GroupChoices:
    """What was chosen for the program of a group: its devices as a cluster, the mesh axes, and how everything is cut."""

    cluster: Cluster
    factors: tuple[Factor, ...]
    choices: Choices
    overlaps: bool

    def layout(self, part: Part, tensor: int) -> Layout | None:
        """The layout of a tensor of the step in the group's program ``part``."""
        return self.choices.bodies[()].layouts[part.tensors.index(tensor)]


def planned_segments(split: Split, groups: Sequence[GroupChoices], replicate: Sequence[str] = ()) -> tuple[PlannedProgram, ...]:
    """Each segment with the choices of its group."""
    programs = [Programs(Resharder(Network(g.cluster, g.factors), [f.size for f in g.factors])) for g in groups]
    found: list[PlannedProgram] = []
    for segment, part in zip(split.segments, split.segment_parts, strict=True):
        own = groups[segment.group]
        graph = flatten(part.program, replicate=replicate)
        choices = _choices_of(own.choices, graph)
        shared = programs[segment.group]
        found.append(planned_program(part.program, graph, choices, own.cluster, own.factors, own.overlaps, shared))
    return tuple(found)


def _choices_of(choices: Choices, graph: Graph) -> Choices:
    """The choices of a group's program for the ops of one segment."""
    ops = {(n.where, n.op.id) for n in graph.nodes}

    def own(where: tuple[tuple[int, int], ...], body: BodyChoices) -> BodyChoices:
        return replace(
            body,
            uses={op: use for op, use in body.uses.items() if (where, op) in ops},
            reads={(op, slot): copy for (op, slot), copy in body.reads.items() if (where, op) in ops},
        )

    return replace(choices, bodies={w: own(w, body) for w, body in choices.bodies.items() if w in graph.bodies})
