"""From a traced step to its graph of operators.

Walking the forward pass, an op starts an operator if it multiplies, or if it breaks the cut of a loop of the operator whose
result it reads; any other op joins that operator (the last one, if there are several). Ops on arguments alone (a broadcast bias,
a cast) join their reader. A scan or a while loop is one operator, which is cut over samples. `twins` adds the backward pass and
the update.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardplan.errors import PlacementError
from shardplan.graph.nodes import Graph
from shardplan.ir import Program
from shardplan.placement.forward import Grouping, GrowingOperator
from shardplan.placement.operators import BACKWARD, Anchor, Edge, Kind, Labels, Operator, OperatorGraph, OperatorLoop, Weight
from shardplan.placement.roles import Roles
from shardplan.placement.twins import assign_backward, assign_update
from shardplan.search.coarsening.gradient_pairing import same_values


def operator_graph(graph: Graph, program: Program) -> OperatorGraph:
    """The graph of operators of a traced step; ``graph`` is the program, flat."""
    grouping = Grouping(graph, program)
    phases = grouping.roles.phases
    for node in graph.nodes:
        if phases[node.id] == 0:
            grouping.forward(node)
    if not grouping.groups:
        raise PlacementError("the step has no operator to place: nothing that depends on its arguments is multiplied or reduced")
    grouping.follow_links()
    assign_backward(grouping)
    assign_update(grouping)
    return _finished(grouping)


def _finished(grouping: Grouping) -> OperatorGraph:
    """The operators, edges and weights of a grouping in which every node has an operator."""
    groups, roles, tensors = grouping.groups, grouping.roles, grouping.graph.tensors
    edges: list[Edge] = []
    users: dict[int, list[tuple[int, Labels]]] = {}
    for j, group in enumerate(groups):
        for t, labels in sorted(group.read.items()):
            i = grouping.maker(t)
            if i is not None and i != j:
                assert i < j, "operators come after what they read"
                edges.append(
                    Edge(i, j, tensors[t].shape, tensors[t].itemsize, groups[i].labels[t], labels, roles.differentiable(t))
                )
            elif t in roles.arguments:
                users.setdefault(t, []).append((j, labels))
    state = _state_bytes(grouping)
    read = {
        t: Weight(roles.paths[t], tensors[t].shape, tensors[t].itemsize, tuple(j for j, _ in own), tuple(x for _, x in own))
        for t, own in sorted(users.items())
    }
    weights = tuple(replace(w, state_bytes=state.get(w.shape, 0)) for t, w in read.items() if t in roles.trained)
    saved = _saved(grouping)
    operators = tuple(replace(o, saved=saved.get(j, ())) for j, o in enumerate(_operators(groups, roles, weights)))
    learning = tuple(w for w in weights if any(operators[u].works[BACKWARD] for u in w.users))
    trained = {w.path for w in learning}
    arguments = tuple(w for w in read.values() if w.path not in trained)
    return OperatorGraph(operators, _differentiated(operators, edges), learning, arguments, _owners(grouping))


def _owners(grouping: Grouping) -> tuple[tuple[int, int], ...]:
    """The operator of each op of the step that has one."""
    found: dict[int, int] = {}
    for node in grouping.graph.nodes:
        if node.id in grouping.owner:
            found.setdefault(node.where[0][0] if node.where else node.op.id, grouping.owner[node.id])
    return tuple(sorted(found.items()))


def _state_bytes(grouping: Grouping) -> dict[tuple[int, ...], int]:
    """The bytes of the optimizer's state for a weight of each shape: the other state of that shape, shared out evenly."""
    graph, trained = grouping.graph, grouping.roles.trained
    own = [graph.tensors[graph.inputs[i]] for i in graph.feedback if i is not None and graph.inputs[i] not in trained]
    shapes = [graph.tensors[t].shape for t in trained]
    return {s: sum(x.nbytes for x in own if x.shape == s) // shapes.count(s) for s in set(shapes)}


def _saved(grouping: Grouping) -> dict[int, tuple[tuple[Labels, int], ...]]:
    """For each operator, the values that it makes in the forward pass and that the backward pass reads, each once."""
    values = same_values(grouping.graph)
    read: dict[int, int] = {}
    for node in grouping.graph.nodes:
        if grouping.roles.phases[node.id] == BACKWARD:
            for t in node.inputs:
                if t >= 0:
                    read.setdefault(values[grouping.outside(t)], grouping.outside(t))
    saved: dict[int, list[tuple[Labels, int]]] = {}
    for t in sorted(read.values()):
        at = grouping.maker(t)
        if at is not None:
            saved.setdefault(at, []).append((grouping.groups[at].labels[t], grouping.graph.tensors[t].nbytes))
    return {at: tuple(own) for at, own in saved.items()}


def _differentiated(operators: Sequence[Operator], edges: Sequence[Edge]) -> tuple[Edge, ...]:
    """The edges with their gradients. Gradients go back only between operators that lie between differentiated ones, these
    included.
    """
    behind = [bool(o.works[BACKWARD]) for o in operators]
    before = list(behind)
    for e in edges:
        behind[e.consumer] |= behind[e.producer] and e.gradient
    for e in sorted(edges, key=lambda e: -e.producer):
        before[e.producer] |= before[e.consumer] and e.gradient
    both = [a and b for a, b in zip(behind, before, strict=True)]
    return tuple(replace(e, gradient=e.gradient and both[e.producer] and both[e.consumer]) for e in edges)


def _operators(groups: Sequence[GrowingOperator], roles: Roles, weights: Sequence[Weight]) -> tuple[Operator, ...]:
    """The operators with names and loops; a loop is P if it splits a weight, S if it runs over samples, else A."""
    result: list[Operator] = []
    names = _names(groups, weights)
    for j, group in enumerate(groups):
        kinds = _kinds(group, roles, [labels for w in weights for u, labels in zip(w.users, w.labels, strict=True) if u == j])
        extents = [max(1, n) for n in group.extents]
        loops = tuple(OperatorLoop(n, e, kinds[i]) for i, (n, e) in enumerate(zip(group.names, extents, strict=True)))
        works = tuple(map(tuple, group.works))
        node = group.anchor
        anchor = Anchor(node.where, node.op.id, group.cut, bool(node.signature.images))
        result.append(Operator(names[j], str(node.op.source), loops, works, group.contracts, anchor))  # type: ignore[arg-type]
    return tuple(result)


def _kinds(group: GrowingOperator, roles: Roles, weights: Sequence[Labels]) -> Mapping[int, Kind]:
    kinds: dict[int, Kind] = dict.fromkeys(range(len(group.extents)), "A")
    for t, labels in group.labels.items():
        dim = roles.batch(t)
        if dim is not None and labels[dim] >= 0:
            kinds[labels[dim]] = "S"
    kinds.update({n: "P" for labels in weights for n in labels if n >= 0})
    return kinds


def _names(groups: Sequence[GrowingOperator], weights: Sequence[Weight]) -> list[str]:
    """A name for each operator: that of its largest weight, or else of its first op; repeated names are numbered."""
    largest: dict[int, Weight] = {}
    for w in sorted(weights, key=lambda w: -math.prod(w.shape)):
        for j in w.users:
            largest.setdefault(j, w)
    common = _common_folders([w.path for w in weights])
    bare = [
        largest[j].path[common:] if j in largest else group.anchor.op.control or group.anchor.op.primitive.split(":")[0]
        for j, group in enumerate(groups)
    ]
    seen: dict[str, int] = {}
    result: list[str] = []
    for name in bare:
        seen[name] = seen.get(name, -1) + 1
        result.append(f"{name}#{seen[name]}" if bare.count(name) > 1 else name)
    return result


def _common_folders(paths: Sequence[str]) -> int:
    """The length of the folders that all paths begin with."""
    return posixpath.commonprefix([path.rpartition("/")[0] + "/" for path in paths]).rfind("/") + 1 if len(paths) > 1 else 0
