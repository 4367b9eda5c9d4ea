"""The roles of a step's tensors and ops in its graph of operators: arguments, weights, samples, and the three phases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardplan.graph.nodes import Graph, Node
from shardplan.ir import Program
from shardplan.placement.operators import BACKWARD, FORWARD, UPDATE, Labels
from shardplan.search.baselines.batch_dims import Examples, follow
from shardplan.search.baselines.samples import data_inputs
from shardplan.search.coarsening.gradient_pairing import ends, moved
from shardplan.search.coarsening.tensor_roles import mark


@dataclass(frozen=True, slots=True)
class Roles:
    """Roles by tensor and by node.

    ``free`` depend on no argument. ``arguments`` are those of the step, with the tensors by which they enter loops. ``trained``
    are the weights with gradients, ``ends`` the arguments whose new values a tensor feeds (for a gradient, its weight).
    ``phases`` has the phase of each node.
    """

    graph: Graph
    free: frozenset[int]
    arguments: frozenset[int]
    trained: frozenset[int]
    ends: Mapping[int, frozenset[int]]
    examples: Examples
    phases: tuple[int, ...]
    paths: Mapping[int, str]
    program: Program

    def batch(self, t: int) -> int | None:
        """The dim of a tensor that runs over samples."""
        return self.examples.batch[t]

    def sample_labels(self, t: int) -> Labels:
        """The labels of a tensor of which only the dim of samples is split, by loop 0."""
        if t < 0:
            return ()
        return tuple(0 if d == self.examples.batch[t] else -1 for d in range(len(self.graph.tensors[t].shape)))

    def enclosing(self, node: Node) -> object:
        """The key of the loop or the branch around a node; None outside of them."""
        program = self.program
        for depth, (number, body) in enumerate(node.where):
            op = next(op for op in program.ops if op.id == number)
            if op.control != "remat":
                return (*node.where[:depth], number)
            program = op.bodies[body]
        return None

    def differentiable(self, t: int) -> bool:
        """Whether a tensor can have a gradient."""
        return self.graph.tensors[t].dtype.startswith(("float", "bfloat", "complex"))


def roles_of(graph: Graph, program: Program) -> Roles:
    """Finds the roles in a flat graph; ``program`` is the step itself."""
    marks = mark(graph)
    data = data_inputs(graph)
    paths = dict(zip(graph.inputs, graph.input_paths, strict=True))
    trained = frozenset(t for t in graph.inputs if t in marks.parameters and t not in data)
    return Roles(
        graph,
        marks.free,
        frozenset(graph.inputs),
        trained,
        ends(graph, moved(graph, marks.free), marks.free),
        follow(graph, data),
        _phases(graph),
        paths,
        program,
    )


def _phases(graph: Graph) -> tuple[int, ...]:
    """The phase of each node: a node that depends on the backward pass without belonging to it is part of the update."""
    after: set[int] = set()
    into: dict[int, list[int]] = {}
    for link in graph.links:
        into.setdefault(link.source, []).append(link.target)
    phases: list[int] = []
    for node in graph.nodes:
        late = not after.isdisjoint(node.inputs)
        phases.append(BACKWARD if node.backward else UPDATE if late else FORWARD)
        if node.backward or late:
            stack = list(node.outputs)
            while stack:
                t = stack.pop()
                if t not in after:
                    after.add(t)
                    stack.extend(into.get(t, ()))
    return tuple(phases)
