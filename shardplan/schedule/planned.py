"""A program with the choices of a plan: all that a backend needs to know of the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardplan.collectives.reshard import Programs, Resharder
from shardplan.cost import Network
from shardplan.graph import Graph, Node
from shardplan.graph.attention import product_names
from shardplan.ir import Choices, Copy, Factor, Layout, Program, Use, Where
from shardplan.mesh import Cluster
from shardplan.search.problem.interiors import Inside, moved_bytes


@dataclass(frozen=True, slots=True)
class PlannedProgram:
    """The choices of a plan, by the node and tensor numbers of the program's flat graph.

    ``layouts[t]`` is the stored layout of tensor t (None: computed anew where it is read). ``nodes`` maps (path of a body, op id)
    to a node, ``uses`` a node to its use if it has one, ``reads`` (node, operand) to the number of the copy that it reads.
    ``programs`` has the collectives of each resharding. ``held`` are the tensors that nodes with a use read. ``overlaps`` says
    whether communication hides behind compute. ``op_seconds`` [nodes] are the seconds of one execution of each op on a device's
    share; times their weights they are the plan's ``compute_s``.
    """

    program: Program
    graph: Graph
    factors: tuple[Factor, ...]
    programs: Programs
    layouts: tuple[Layout | None, ...]
    nodes: Mapping[tuple[Where, int], Node]
    uses: Mapping[int, Use]
    reads: Mapping[tuple[int, int], int]
    copies: tuple[Copy, ...]
    held: frozenset[int]
    overlaps: bool
    op_seconds: tuple[float, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the mesh axes, slowest first."""
        return tuple(f.name for f in self.factors)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the mesh axes."""
        return tuple(f.size for f in self.factors)

    @property
    def free(self) -> frozenset[int]:
        """The tensors that are computed anew where they are read."""
        return frozenset(t for t, layout in enumerate(self.layouts) if layout is None)

    @property
    def product_names(self) -> dict[int, str]:
        """The names of attention's products, by node (`attention_products`)."""
        return product_names(self.graph, self.layouts)


def planned_program(
    program: Program,
    graph: Graph,
    choices: Choices,
    cluster: Cluster,
    factors: Sequence[Factor],
    overlaps: bool,
    programs: Programs | None = None,
) -> PlannedProgram:
    """Joins a program and its graph with the choices of a plan. ``programs`` are shared by plans over the same factors."""
    factors = tuple(factors)
    layouts: list[Layout | None] = [None] * len(graph.tensors)
    for where, body in choices.bodies.items():
        for t, layout in zip(graph.bodies[where], body.layouts, strict=True):
            layouts[t] = layout
    nodes = {(n.where, n.op.id): n for n in graph.nodes}
    uses = {nodes[where, op].id: use for where, body in choices.bodies.items() for op, use in body.uses.items()}
    programs = programs or Programs(Resharder(Network(cluster, factors), [f.size for f in factors]))
    return PlannedProgram(
        program=program,
        graph=graph,
        factors=factors,
        programs=programs,
        layouts=tuple(layouts),
        nodes=nodes,
        uses=uses,
        reads={(nodes[where, op].id, i): copy for where, b in choices.bodies.items() for (op, i), copy in b.reads.items()},
        copies=choices.copies,
        # operands are held in their stored layout: otherwise the layout that the op needs would spread back into the chain
        # before it
        held=frozenset(t for n in uses for t in graph.nodes[n].inputs if t >= 0),
        overlaps=overlaps,
        op_seconds=tuple(_seconds(graph, node, uses.get(node.id), layouts, programs.resharder) for node in graph.nodes),
    )


def _seconds(graph: Graph, node: Node, use: Use | None, layouts: Sequence[Layout | None], resharder: Resharder) -> float:
    """The seconds of one op: the seconds of its use, or, inside a group with one layout, the time to move its share of the
    bytes.
    """
    if use is not None:
        return use.compute_s
    traffic = node.costed.traffic
    layout = layouts[node.outputs[0]] if node.outputs else None
    if traffic is None or traffic.empty or layout is None:
        return 0.0
    assert isinstance(resharder.network, Network)
    device, shape = resharder.network.cluster.device, graph.tensors[node.outputs[0]].shape
    local = float(resharder.space(shape).local[resharder.state(shape, layout)])
    return Inside.of(device, moved_bytes(graph, node), traffic.launches, shape).seconds_at(local)
