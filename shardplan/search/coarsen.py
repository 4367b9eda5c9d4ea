"""Coarsening: which tensors share one layout (Tofu, section 5.1), and which uses share one resharded copy.

A *variable* is the layout of a group of tensors. Elementwise ops merge their operands and results, so that forward chains
merge with their
backward ones through the products of a gradient. What stays apart: a sum of two values that live on elsewhere (the residual
stream stays a
chain), and a stored parameter from its moments, its update and its reduced gradient (which are one group), so that optimizer
state can be
split apart from its parameter (ZeRO-1).

A *view* is a variable too: the layout of a resharded copy that several contractions read. A weight has one view for the
forward pass and one
for the backward pass, which is the forward one kept or a second gather.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shardplan.ir import Constant
from shardplan.search.graph import Graph, Node
from shardplan.search.partials import deferrable
from shardplan.tdl import linear_sets

_PIECES = 6
"""A group of at most this many tensors (a query, key and value with their gradients) has a layout made for its readers, and
needs no view.
"""

FREE = -1
"""In place of a variable: a scalar, or a value that depends on no input and is made anew wherever it is read."""


@dataclass(frozen=True, slots=True)
class Variable:
    """One layout to choose, for all of ``tensors`` (of one shape); ``of`` is the variable that a view is a copy of.

    A view of several tensors (those of unrolled timesteps) is as many copies. A ``deferred`` one may stay a partial sum.
    """

    id: int
    shape: tuple[int, ...]
    tensors: tuple[int, ...]
    kind: Literal["stored", "view", "backward"] = "stored"
    of: int = FREE
    sibling: int = FREE
    deferred: bool = False


@dataclass(frozen=True, slots=True)
class Coarse:
    """The graph's variables: ``of[t]`` for the stored layout of tensor t, ``read[node, slot]`` where a use reads a view.

    ``joins`` are the nodes that need a table of their own; all others are elementwise inside one variable.
    ``free`` are the tensors that depend on no input; ``weights`` those made from inputs alone, op by op.
    """

    variables: tuple[Variable, ...]
    of: tuple[int, ...]
    read: dict[tuple[int, int], int]
    joins: tuple[int, ...]
    free: frozenset[int]
    weights: frozenset[int]
    parameters: frozenset[int]


class _Sets:
    """Union-find; the smallest member names the set."""

    def __init__(self, n: int) -> None:
        self.parent = list(range(n))

    def find(self, x: int) -> int:
        parent = self.parent
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    def union(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            self.parent[max(a, b)] = min(a, b)


def coarsen(graph: Graph) -> Coarse:
    """Groups the tensors of a graph into variables."""
    n = len(graph.tensors)
    free = _free(graph)
    uses = [0] * n
    for node in graph.nodes:
        for t in set(node.inputs):
            if t >= 0:
                uses[t] += 1
    for link in graph.links:
        uses[link.source] += 1
    for t in graph.outputs:
        if t >= 0:
            uses[t] += 1
    weights = _weights(graph, free)
    parameters = _parameters(graph, weights)
    sets = _Sets(n)
    for link in graph.links:
        if link.same:
            sets.union(link.source, link.target)
    apart = set(parameters)
    for o, i in zip(graph.outputs, graph.feedback, strict=True):
        if i is not None and o >= 0:
            sets.union(o, graph.inputs[i])
            if graph.inputs[i] in parameters:
                apart.add(o)
    apart.update(t for t in graph.boundary if t in weights)
    soft = _soft(graph, free)
    deferred = deferrable(graph, free) - apart - set(graph.outputs)
    for node in graph.nodes:
        if node.signature.elementwise:
            _merge(graph, node, sets, apart, soft, uses, free, deferred)
    _pair(graph, sets, apart, weights, free, deferred)
    return _variables(graph, sets, free, weights, parameters, deferred)


def _pair(
    graph: Graph, sets: _Sets, apart: set[int], weights: frozenset[int], free: frozenset[int], deferred: frozenset[int]
) -> None:
    """Merges each activation with its gradient and with what is computed again for it, and the pieces that one op takes a
    tensor apart into.

    A forward contraction reads (x, w) and makes y; a backward one reads w too: what else it reads is y's gradient, what it
    makes is x's.
    The gradient of a weight stays apart from it.
    """
    loose = [t.id not in apart and t.id not in weights and t.id not in free for t in graph.tensors]
    value = same_values(graph)
    for t, v in enumerate(value):
        if v != t and loose[t] and loose[v] and graph.tensors[t].shape == graph.tensors[v].shape:
            sets.union(t, v)
    _timesteps(graph, sets, loose, value, weights, free, deferred)
    loose = [mine and t not in deferred for t, mine in enumerate(loose)]
    forward: dict[int, list[Node]] = {}
    after = _moved(graph, free)
    root, ends = _roots(graph, weights, free), _ends(graph, after, free)
    for node in graph.nodes:
        alive = [t for t in dict.fromkeys(node.inputs) if t >= 0 and t not in free]
        if node.signature.elementwise:
            continue
        for side in (alive, list(node.outputs)):
            pieces = [t for t in side if loose[t]]
            if len(pieces) > 2 and len({graph.tensors[t].shape for t in pieces}) == 1:
                for t in pieces[1:]:
                    sets.union(pieces[0], t)
        if len(alive) != 2 or len(node.outputs) != 1:
            continue
        if not node.backward or _AGAIN in node.op.scope:
            for t in alive:
                forward.setdefault(value[t], []).append(node)
            continue
        for shared, gradient in (alive, alive[::-1]):
            candidates = forward.get(value[shared], ())
            # an activation that several weights multiply: the one whose gradient this is
            own = [f for f in candidates if any(root.get(t, FREE) in ends.get(node.outputs[0], ()) for t in f.inputs)]
            for first in own or candidates:
                other = next((t for t in first.inputs if value[t] != value[shared]), None)
                if other is None:
                    continue
                _same_layout(graph, sets, loose, after, first.outputs[0], gradient)
                _same_layout(graph, sets, loose, after, other, node.outputs[0])


_TIMESTEPS = 3
"""From so many equal uses of one weight on, they are unrolled timesteps (Tofu, section 5.1), which share one choice."""


def _timesteps(
    graph: Graph,
    sets: _Sets,
    loose: list[bool],
    value: list[int],
    weights: frozenset[int],
    free: frozenset[int],
    deferred: frozenset[int],
) -> None:
    """Merges what equal ops make of one weight, and what they read beside it: the steps of an unrolled recurrence.

    Each step could be cut in its own way; Tofu gives that up too, for a graph that is a chain.
    """
    uses: dict[tuple[int, int, int], list[Node]] = {}
    for node in graph.nodes:
        alive = [t for t in dict.fromkeys(node.inputs) if t >= 0 and t not in free]
        if node.signature.elementwise or len(alive) != 2 or len(node.outputs) != 1:
            continue
        for slot, t in enumerate(node.inputs):
            if t >= 0 and value[t] in weights:
                uses.setdefault((value[t], node.signature.id, slot), []).append(node)
    for nodes in uses.values():
        if len(nodes) >= _TIMESTEPS:
            first = nodes[0]
            for node in nodes[1:]:
                for a, b in zip((*first.inputs, *first.outputs), (*node.inputs, *node.outputs), strict=True):
                    if a >= 0 and b >= 0 and loose[a] and loose[b] and (a in deferred) == (b in deferred):
                        sets.union(a, b)


_AGAIN = "rematted_computation"


def same_values(graph: Graph) -> list[int]:
    """For each tensor the first one known to hold the same value: computed again by the same op, or saved by one loop and read
    by another.
    """
    value = list(range(len(graph.tensors)))
    stacked = {link.target: link.source for link in graph.links if link.lift < 0}
    entered: dict[int, list[tuple[int, int]]] = {}
    for link in graph.links:
        if link.target in graph.boundary:
            entered.setdefault(link.target, []).append((link.source, link.lift))
    slices: dict[int, int] = {}
    for t in sorted(graph.boundary):
        if len(entered.get(t, ())) != 1:
            continue  # a carry
        source, lift = entered[t][0]
        if not lift:
            value[t] = value[source]
        elif source in stacked:
            value[t] = stacked[source]
        else:
            value[t] = slices.setdefault(value[source], t)
    seen: dict[object, tuple[int, ...]] = {}
    for node in graph.nodes:
        literals = tuple(repr(i.value) for i in node.op.inputs if isinstance(i, Constant))
        key = (node.signature.id, literals, tuple(value[value[t]] if t >= 0 else -1 for t in node.inputs))
        first = seen.setdefault(key, node.outputs)
        for t, v in zip(node.outputs, first, strict=True):
            value[t] = value[v] if v != t else t
    return [value[v] for v in value]


def _roots(graph: Graph, weights: frozenset[int], free: frozenset[int]) -> dict[int, int]:
    """For each weight the program's input that it is, or is made from."""
    root = {t: t for t in graph.inputs if t in weights}
    for link in graph.links:
        if link.target in weights and link.source in root:
            root.setdefault(link.target, root[link.source])
    for node in graph.nodes:
        alive = [t for t in dict.fromkeys(node.inputs) if t in root]
        if len(alive) == 1:
            root.update({t: root[alive[0]] for t in node.outputs if t in weights and t not in free and t not in root})
    return root


def _ends(graph: Graph, after: Mapping[int, int], free: frozenset[int]) -> dict[int, frozenset[int]]:
    """For each tensor the inputs that it helps to replace, through ops that keep elements apart: of a gradient, its weight."""
    found = {
        o: frozenset({graph.inputs[i]}) for o, i in zip(graph.outputs, graph.feedback, strict=True) if o >= 0 and i is not None
    }
    into: dict[int, list[int]] = {}
    for link in graph.links:
        into.setdefault(link.source, []).append(link.target)

    def known(t: int) -> frozenset[int]:
        return found.get(t, frozenset[int]()).union(*(found.get(u, ()) for u in into.get(t, ())))

    for node in reversed(graph.nodes):
        if node.signature.elementwise or any(t in after for t in node.inputs):
            reached = frozenset[int]().union(*(known(t) for t in node.outputs))
            if reached:
                size = graph.tensors[node.outputs[0]].size
                for t in node.inputs:
                    if t >= 0 and t not in free and graph.tensors[t].size == size:
                        found[t] = known(t) | reached
        else:
            for t in node.outputs:
                found[t] = known(t)
    return found


def _moved(graph: Graph, free: frozenset[int]) -> dict[int, int]:
    """What each tensor becomes when it is only moved about: transposed, reshaped."""
    after: dict[int, int] = {}
    for node in graph.nodes:
        alive = [t for t in node.inputs if t >= 0 and t not in free]
        if node.signature.elementwise or not len(alive) == len(node.outputs) == 1:
            continue
        if graph.tensors[node.outputs[0]].size == graph.tensors[alive[0]].size:
            after[alive[0]] = node.outputs[0]
    return after


def _same_layout(graph: Graph, sets: _Sets, loose: list[bool], after: dict[int, int], value: int, gradient: int) -> None:
    """Merges the two if their shapes agree, the gradient's before or after it is transposed."""
    if not loose[value] or not loose[gradient]:
        return
    shape = graph.tensors[value].shape
    for t in (gradient, after.get(gradient, gradient)):
        if graph.tensors[t].shape == shape and loose[t]:
            sets.union(value, t)
            return


def _free(graph: Graph) -> frozenset[int]:
    """Scalars, constants, and what is made from them alone: every device has them, in any layout, at no cost.

    Random bits are not free: what a key grows into is drawn once.
    """
    inputs = {t for t in (*graph.inputs, *graph.boundary) if graph.tensors[t].size > 1}
    free = set(graph.constants) | {t.id for t in graph.tensors if t.size == 1}
    for node in graph.nodes:
        keyed = any(d.startswith("key") for d in node.signature.call.dtypes)
        if not keyed and all(t < 0 or t in free for t in node.inputs):
            free.update(node.outputs)
    return frozenset(free - inputs)


def _weights(graph: Graph, free: frozenset[int]) -> frozenset[int]:
    """Tensors that are an input of the program, op by op: its slices in a scan, its casts."""
    after: dict[int, list[int]] = {}
    for node in graph.nodes:
        alive = {t for t in node.inputs if t >= 0 and t not in free}
        if node.signature.elementwise and len(alive) == 1:
            after.setdefault(next(iter(alive)), []).extend(node.outputs)
    entries = Counter(link.target for link in graph.links if link.target in graph.boundary)
    for link in graph.links:
        if entries[link.target] == 1:  # a carry is entered twice, at the start and from the iteration before
            after.setdefault(link.source, []).append(link.target)
    made, stack = set(graph.inputs), list(graph.inputs)
    while stack:
        for t in after.get(stack.pop(), ()):
            if t not in made:
                made.add(t)
                stack.append(t)
    return frozenset(made - free)


def _parameters(graph: Graph, weights: frozenset[int]) -> frozenset[int]:
    """The weights that some op other than an elementwise one reads, at once or through the weights made from them."""
    heavy = {t for node in graph.nodes if not node.signature.elementwise for t in node.inputs if t in weights}
    heavy.update(link.source for link in graph.links if link.source in weights and not link.same)
    for node in reversed(graph.nodes):
        if node.signature.elementwise and any(o in heavy and o in weights for o in node.outputs):
            heavy.update(t for t in node.inputs if t in weights)
    return frozenset(heavy)


def _soft(graph: Graph, free: frozenset[int]) -> frozenset[int]:
    """Tensors that follow whatever layout their reader has: broadcast from something smaller, or random bits."""
    soft = set(free)
    for node in graph.nodes:
        tensors = [t for t in node.inputs if t >= 0]
        if node.signature.elementwise:
            grown = all(t in soft or graph.tensors[t].size < graph.tensors[node.outputs[0]].size for t in tensors)
        else:
            grown = sum(graph.tensors[t].size for t in tensors) < graph.tensors[node.outputs[0]].size and len(tensors) == 1
        if grown:
            soft.update(node.outputs)
    return frozenset(soft)


def _merge(
    graph: Graph,
    node: Node,
    sets: _Sets,
    apart: set[int],
    soft: frozenset[int],
    uses: list[int],
    free: frozenset[int],
    deferred: frozenset[int],
) -> None:
    out = node.outputs[0]
    if out in free:
        return
    shape = graph.tensors[out].shape
    whole = [t for t in dict.fromkeys(node.inputs) if t >= 0 and t not in free and graph.tensors[t].shape == shape]
    for other in node.outputs[1:]:
        if out not in apart and other not in apart:
            sets.union(out, other)
    if out in apart:
        return
    mine = [t for t in whole if t not in apart and (t in deferred) == (out in deferred)]
    hard = [t for t in mine if t not in soft and uses[t] > 1]
    several = len([t for t in whole if t not in soft]) > 1
    additive = several and node.signature.description is not None and _additive(node)
    for t in mine:
        if t not in hard or not additive:
            sets.union(t, out)


def _additive(node: Node) -> bool:
    description = node.signature.description
    assert description is not None
    used = tuple(sorted({o for m in description.monomials[0] for o in m}))
    return len(used) > 1 and used in linear_sets(description) and node.signature.call.primitive != "select_n"


def _variables(
    graph: Graph,
    sets: _Sets,
    free: frozenset[int],
    weights: frozenset[int],
    parameters: frozenset[int],
    deferred: frozenset[int],
) -> Coarse:
    members: dict[int, list[int]] = {}
    live = _live(graph)
    for t in sorted(live):
        if t not in free:
            members.setdefault(sets.find(t), []).append(t)
    variables: list[Variable] = []
    of = [FREE] * len(graph.tensors)
    for tensors in members.values():
        late = deferred.issuperset(tensors)
        variable = Variable(len(variables), graph.tensors[tensors[0]].shape, tuple(tensors), deferred=late)
        variables.append(variable)
        for t in tensors:
            of[t] = variable.id
    joins = tuple(
        node.id
        for node in graph.nodes
        if not node.signature.elementwise or len({of[t] for t in (*node.inputs, *node.outputs) if t >= 0 and of[t] != FREE}) > 1
    )
    read = _views(graph, variables, of, weights)
    return Coarse(tuple(variables), tuple(of), read, joins, free, weights, parameters)


def _live(graph: Graph) -> set[int]:
    live = set(graph.inputs) | {t for t in graph.outputs if t >= 0} | set(graph.boundary)
    for node in graph.nodes:
        live.update(t for t in node.inputs if t >= 0)
        live.update(node.outputs)
    for link in graph.links:
        live.update((link.source, link.target))
    return live


def _views(graph: Graph, variables: list[Variable], of: list[int], weights: frozenset[int]) -> dict[tuple[int, int], int]:
    """Gives a view to each tensor that several contractions read.

    None where it could gain little: where the stored layout serves nothing but these readers, or where the tensor is the
    largest that each of them touches, so that moving the others is cheaper. What that may lose is a copy made twice.
    """
    touched = _touched(graph, of)
    readers: dict[int, list[tuple[Node, int]]] = {}
    alone: dict[int, list[tuple[Node, int]]] = {}
    for node in graph.nodes:
        operands = {t for t in node.inputs if t >= 0 and of[t] != FREE}
        # a lookup or a convolution has two operands too; what puts many pieces together reads them as they are
        if node.signature.elementwise or len(operands) > 3:
            continue
        for slot, t in enumerate(node.inputs):
            if t in operands:
                (readers if len(operands) > 1 else alone).setdefault(t, []).append((node, slot))
    read: dict[tuple[int, int], int] = {}

    def add(ts: Sequence[int], uses: Iterable[tuple[Node, int]], kind: Literal["view", "backward"], sibling: int = FREE) -> int:
        variable = Variable(len(variables), graph.tensors[ts[0]].shape, tuple(ts), kind, of[ts[0]], sibling)
        variables.append(variable)
        for node, slot in uses:
            read[node.id, slot] = variable.id
        return variable.id

    alike: dict[tuple[int, frozenset[tuple[int, int, bool]]], list[int]] = {}

    for t in sorted(readers):
        uses = readers[t]
        if len({node.id for node, _ in uses}) < 2:
            continue
        forward = [u for u in uses if not u[0].backward]
        backward = [u for u in uses if u[0].backward]
        if t in weights and forward and backward:
            first = add([t], forward, "view")
            add([t], backward, "backward", first)
        elif len(touched.get(of[t], ())) > _PIECES and not all(_largest(graph, node, t) for node, _ in uses):
            key = of[t], frozenset((node.signature.id, slot, node.backward) for node, slot in uses)
            # the first and the last timestep may have fewer readers
            most = next((k for k, ts in alike.items() if k[0] == of[t] and len(ts) >= _TIMESTEPS and key[1] <= k[1]), key)
            alike.setdefault(most, []).append(t)
    for ts in alike.values():
        # the copies of unrolled timesteps share one choice, as what they are copies of does
        for group in [ts] if len(ts) >= _TIMESTEPS else [[t] for t in ts]:
            uses = [use for t in group for use in (*readers[t], *alone.get(t, ()))]  # a reduction reads the copy too
            add(group, uses, "view")
    return read


def _touched(graph: Graph, of: list[int]) -> dict[int, set[int]]:
    """For each variable, its tensors that an op other than an elementwise one reads or makes, or that enter or leave the
    program.
    """
    touched: dict[int, set[int]] = {}
    for node in graph.nodes:
        if not node.signature.elementwise:
            for t in (*node.inputs, *node.outputs):
                if t >= 0:
                    touched.setdefault(of[t], set()).add(t)
    for t in (*graph.inputs, *graph.outputs, *graph.boundary):
        if t >= 0:
            touched.setdefault(of[t], set()).add(t)
    return touched


def _largest(graph: Graph, node: Node, t: int) -> bool:
    others = [graph.tensors[u].size for u in (*node.inputs, *node.outputs) if u >= 0 and u != t]
    return graph.tensors[t].size > max(others, default=0)
