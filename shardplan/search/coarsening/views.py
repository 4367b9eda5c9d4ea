"""Views: which uses of a tensor share one resharded copy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from shardplan.constants import CONSTANTS
from shardplan.graph.nodes import Graph, Node
from shardplan.search.coarsening.variables import FREE, OneChoice, Variable

_Uses = dict[int, list[tuple[Node, int]]]
"""For each tensor the (op, slot) pairs that read it."""


def add_views(
    graph: Graph,
    variables: list[Variable],
    of: list[int],
    weights: frozenset[int],
    one_choice: OneChoice = "timesteps",
    alone: frozenset[int] = frozenset(),
) -> dict[tuple[int, int], int]:
    """Gives a view to each tensor that several contractions read. Tensors that share one choice share a view.

    There is no view where it would gain little: where the stored layout serves only these readers, or where the tensor is the
    largest that each of them touches, so that moving the others is cheaper. At worst, a copy is then made twice. A tensor in
    ``alone`` is not stored for its readers: it has a view wherever several ops read it, elementwise ones included. A tensor that
    may stay a partial sum also has a view, for the ops that do not lie as it does: they add it up once.

    The views are appended to ``variables``. Returns the view of each (op, slot) that reads one.
    """
    touched = _touched(graph, of)
    partial = frozenset(t for v in variables if v.deferred for t in v.tensors) - alone
    apart = alone | partial
    readers, single = _readers(graph, of, alone, partial)
    read: dict[tuple[int, int], int] = {}

    def add(ts: Sequence[int], uses: Iterable[tuple[Node, int]], kind: Literal["view", "backward"], sibling: int = FREE) -> int:
        deferred = variables[of[ts[0]]].deferred
        variable = Variable(len(variables), graph.tensors[ts[0]].shape, tuple(ts), kind, of[ts[0]], sibling, deferred)
        variables.append(variable)
        for node, slot in uses:
            read[node.id, slot] = variable.id
        return variable.id

    weight_groups: dict[tuple[int, frozenset[tuple[int, int, bool]]], list[int]] = {}
    other_groups: dict[tuple[int, frozenset[tuple[int, int, bool]]], list[int]] = {}
    least = {"none": len(graph.tensors) + 1, "timesteps": CONSTANTS.timesteps, "layers": 2}[one_choice]
    for t in sorted(readers):
        uses = readers[t]
        if len({node.id for node, _ in uses}) < 2:
            continue
        forward = [u for u in uses if not u[0].backward]
        backward = [u for u in uses if u[0].backward]
        if t in weights and forward and backward:
            # the copies of equal layers' weights share one choice, as the weights do
            reader_kinds = frozenset((node.signature.id, slot, node.backward) for node, slot in uses)
            weight_groups.setdefault((of[t] if one_choice == "layers" else -1 - t, reader_kinds), []).append(t)
        elif t in apart or (len(touched.get(of[t], ())) > CONSTANTS.view_pieces and not _always_largest(graph, t, uses)):
            key = of[t], frozenset((node.signature.id, slot, node.backward) for node, slot in uses)
            # the first and the last timestep may have fewer readers
            group_key = next((k for k, ts in other_groups.items() if k[0] == of[t] and len(ts) >= least and key[1] <= k[1]), key)
            other_groups.setdefault(group_key, []).append(t)
    for ts in weight_groups.values():
        forward, backward = ([u for t in ts for u in readers[t] if u[0].backward == late] for late in (False, True))
        add(ts, backward, "backward", add(ts, forward, "view"))
    for ts in other_groups.values():
        # the copies of unrolled timesteps share one choice, as the originals do
        for group in [ts] if len(ts) >= least else [[t] for t in ts]:
            uses = [use for t in group for use in (*readers[t], *single.get(t, ()))]  # a reduction reads the copy too
            add(group, uses, "view")
    return read


def _readers(graph: Graph, of: list[int], alone: frozenset[int], partial: frozenset[int]) -> tuple[_Uses, _Uses]:
    """(the contractions that read each tensor, or all ops if it is ``alone``; the ops that read it and no other tensor).

    For a tensor that may stay ``partial``, ops whose results lie as it does are not counted: they pass terms on.
    """
    readers: _Uses = {}
    single: _Uses = {}
    for node in graph.nodes:
        operands = {t for t in node.inputs if t >= 0 and of[t] != FREE}
        # lookups and convolutions count as contractions; an op that joins many pieces reads them as they are
        skipped = node.signature.elementwise or len(operands) > CONSTANTS.joined_operands
        for slot, t in enumerate(node.inputs):
            if t in partial:
                if any(of[r] != of[t] for r in node.outputs):
                    readers.setdefault(t, []).append((node, slot))
            elif t in alone or (t in operands and not skipped and len(operands) > 1):
                readers.setdefault(t, []).append((node, slot))
            elif t in operands and not skipped:
                single.setdefault(t, []).append((node, slot))
    return readers, single


def _touched(graph: Graph, of: list[int]) -> dict[int, set[int]]:
    """For each variable, its tensors that enter or leave the program, enter a body, or are operands or results of an op that is
    neither elementwise nor only adds or drops dims of one element.
    """
    touched: dict[int, set[int]] = {}
    for node in graph.nodes:
        if not (node.signature.elementwise or node.signature.resizes):
            for t in (*node.inputs, *node.outputs):
                if t >= 0:
                    touched.setdefault(of[t], set()).add(t)
    for t in (*graph.inputs, *graph.outputs, *graph.boundary):
        if t >= 0:
            touched.setdefault(of[t], set()).add(t)
    return touched


def _always_largest(graph: Graph, t: int, uses: Iterable[tuple[Node, int]]) -> bool:
    """Whether a tensor is the largest that each of the ops touches."""
    return all(_largest(graph, node, t) for node, _ in uses)


def _largest(graph: Graph, node: Node, t: int) -> bool:
    others = [graph.tensors[u].size for u in (*node.inputs, *node.outputs) if u >= 0 and u != t]
    return graph.tensors[t].size > max(others, default=0)
