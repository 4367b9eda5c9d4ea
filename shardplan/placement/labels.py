"""Follows the loops of an operator through its ops: which dim of each tensor a loop splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardplan.graph.nodes import Node, Signature
from shardplan.ir import Partial, Split
from shardplan.placement.operators import Labels
from shardplan.tdl import Strategy


@dataclass(frozen=True, slots=True)
class Passed:
    """How an op passes labels on: those of its operands and results, its own loops paired with the operator's, and the loops of
    the operator over which its results are partial.
    """

    operands: tuple[Labels, ...]
    results: tuple[Labels, ...]
    cut: tuple[tuple[int, int], ...]
    reduces: tuple[int, ...]


def cut_smallest(signature: Signature, loop: int) -> Strategy | None:
    """The cut of a loop into the fewest equal parts; None where there is none."""
    description = signature.description
    if description is None or description.loops[loop].extent < 2:
        return None
    return signature.cut(loop, _smallest_factor(description.loops[loop].extent))


def anchored(node: Node) -> Passed | None:
    """The labels of the first op of an operator: loop number n is the n-th of its parallel loops that may be cut."""
    description = node.signature.description
    if description is None or not description.results:
        return None
    own = [v for v in dict.fromkeys(description.results[0]) if cut_smallest(node.signature, v) is not None]
    return _labelled(node.signature, [(v, n) for n, v in enumerate(own)])


def passed(node: Node, known: Sequence[Labels | None]) -> Passed | None:
    """How an op passes on the labels ``known`` of its operands (None: made elsewhere); None if it breaks the cut of a loop."""
    signature, description = node.signature, node.signature.description
    wanted = sorted({n for labels in known if labels for n in labels if n >= 0})
    if not wanted:
        return _labelled(signature, [])
    if description is None:
        return None
    strategies = [(v, s) for v in range(len(description.loops)) if (s := cut_smallest(signature, v)) is not None]
    pairs: list[tuple[int, int]] = []
    for n in wanted:
        at = {i: labels.index(n) for i, labels in enumerate(known) if labels and n in labels}
        v = next((v for v, s in strategies if _splits(s, at)), None)
        if v is None:
            return None
        pairs.append((v, n))
    return _labelled(signature, pairs)


def labels_before(node: Node, result: Labels) -> tuple[Labels, ...]:
    """The labels of an op's operands that give its result these labels."""
    description = node.signature.description
    if description is None or not description.results:
        return tuple((-1,) * len(shape) for shape in node.signature.call.operands)
    pairs = [(v, n) for v, n in zip(description.results[0], result, strict=True) if n >= 0]
    return _labelled(node.signature, [(v, n) for v, n in pairs if cut_smallest(node.signature, v) is not None]).operands


def merged(first: Labels, second: Labels) -> Labels:
    """The labels of a tensor that two ops read: a dim that they cut differently is read whole."""
    return tuple(a if a == b else -1 for a, b in zip(first, second, strict=True))


def by_shape(node: Node, shapes: Mapping[tuple[int, ...], Labels]) -> Passed:
    """The labels of an op of the backward pass, by the shapes of its tensors: a gradient has the shape of its value."""
    call = node.signature.call
    operands, results = (
        tuple(shapes.get(shape, (-1,) * len(shape)) for shape in group) for group in (call.operands, call.results)
    )
    return Passed(operands, results, (), ())


def _labelled(signature: Signature, pairs: Sequence[tuple[int, int]]) -> Passed:
    """The labels of all tensors of an op whose loops are cut with those of the operator, in pairs."""
    call = signature.call
    operands, results = ([[-1] * len(shape) for shape in group] for group in (call.operands, call.results))
    reduces: list[int] = []
    for v, n in pairs:
        strategy = cut_smallest(signature, v)
        assert strategy is not None, "only what may be cut is paired"
        for group, placements in ((operands, strategy.operands), (results, strategy.results)):
            for labels, placement in zip(group, placements, strict=True):
                if isinstance(placement, Split):
                    labels[placement.dim] = n
        if any(isinstance(p, Partial) for p in strategy.results):
            reduces.append(n)
    return Passed(tuple(map(tuple, operands)), tuple(map(tuple, results)), tuple(pairs), tuple(reduces))


def _splits(strategy: Strategy, at: Mapping[int, int]) -> bool:
    """Whether a cut splits these operands at these dims; an operand of one element along the loop may be read whole."""
    return all(isinstance(p := strategy.operands[i], Split) and p.dim == dim for i, dim in at.items())


def _smallest_factor(n: int) -> int:
    return next((f for f in range(2, int(n**0.5) + 1) if n % f == 0), n)
