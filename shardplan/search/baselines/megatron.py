"""The side of each matrix that tensor parallelism cuts, by the rule of Megatron-LM (section 3): columns first, then rows.

A matrix that multiplies a whole activation is cut along its output dims, so that the product is split. A matrix that multiplies a
split activation is cut along its contracted dims, so that the product is a partial sum. Attention between them keeps its heads.
The rule follows the program, not names.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardplan.graph.nodes import Graph, Node
from shardplan.search.coarsening.coarsen import Coarse
from shardplan.tdl.index import loops_of

Root = tuple[int, int]
"""An input of the program, and the number of its extra leading dims (a stack of layers, in a scan)."""


def sides(graph: Graph, coarse: Coarse) -> Mapping[int, frozenset[int]]:
    """For each weight that a product reads (a program input, or computed from one alone), the dims that may be cut."""
    root_of = roots(graph, coarse)
    chosen: dict[int, frozenset[int]] = {}
    split: set[int] = set()
    link_sources: dict[int, list[int]] = {}
    for link in graph.links:
        link_sources.setdefault(link.target, []).append(link.source)
    for node in graph.nodes:
        if node.backward:
            continue
        alive = [t for t in dict.fromkeys(node.inputs) if t >= 0 and t not in coarse.free]
        read = [t for t in alive if t in coarse.weights]
        is_split = any(t in split or any(s in split for s in link_sources.get(t, ())) for t in alive if t not in read)
        if len(read) == 1 and len(alive) == 2 and read[0] in root_of and node.signature.contracts:
            root, stack_dims = root_of[read[0]]
            rows, columns = _dims(node, read[0])
            if root not in chosen:
                chosen[root] = frozenset(d + stack_dims for d in (rows if is_split else columns))
            is_split = not any(d - stack_dims in rows for d in chosen[root])
        if is_split:
            split.update(node.outputs)
    return {t: frozenset(d - stack_dims for d in chosen[root]) for t, (root, stack_dims) in root_of.items() if root in chosen}


def _dims(node: Node, weight: int) -> tuple[frozenset[int], frozenset[int]]:
    """(the weight's dims that the product sums over, all its other dims)."""
    description = node.signature.description
    assert description is not None
    rows: set[int] = set()
    every: set[int] = set()
    for operand, indices in description.accesses:
        if node.inputs[operand] == weight:
            for dim, ix in enumerate(indices):
                every.add(dim)
                if any(description.loops[v].reducer is not None for v in loops_of(ix)):
                    rows.add(dim)
    return frozenset(rows), frozenset(every - rows)


def roots(graph: Graph, coarse: Coarse) -> dict[int, Root]:
    """For each weight the input of the program that it is made from."""
    result: dict[int, Root] = {t: (t, 0) for t in graph.inputs if t in coarse.weights}
    changed = True
    while changed:
        size = len(result)
        for link in graph.links:
            if link.source in result and link.target in coarse.weights:
                root, stack_dims = result[link.source]
                result.setdefault(link.target, (root, stack_dims + link.lift))
        for node in graph.nodes:
            if node.signature.elementwise:
                origins = [t for t in dict.fromkeys(node.inputs) if t in result]
                for o in node.outputs:
                    if len(origins) == 1 and o in coarse.weights:
                        result.setdefault(o, result[origins[0]])
        changed = len(result) > size
    return result
