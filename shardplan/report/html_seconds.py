"""The seconds of a step by layer, source line and kind, for the treemap of the HTML page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from shardplan.collectives.issued import PlannedCollective
from shardplan.graph import Node
from shardplan.schedule import PlannedProgram

FORWARD, BACKWARD = "forward compute", "backward compute"
"""The kinds of compute seconds; every other kind is a collective's."""

_MOST = 300
"""The most parts of a treemap; the smaller parts beyond it are one part for each kind."""

_WRAPPER = re.compile(r"\b(?:jvp|transpose|vmap|remat|checkpoint)\(")
_NO_LAYER = frozenset({"", "while", "body", "cond", "scan", "closed_call", "checkpoint", "remat", "rematted_computation"})

_OWN = "shardplan_"
"""The prefix of the scopes that transforms of a step add (`shardplan.regions`)."""


@dataclass(frozen=True, slots=True)
class LineSeconds:
    """The ``seconds`` of a step that one ``kind`` of work takes at one source line of a layer.

    ``layers`` counts the layers that share the name, in which ``*`` stands for any number.
    """

    layer: str
    layers: int
    source: str
    kind: str
    seconds: float


@dataclass(slots=True)
class _Sum:
    seconds: float = 0.0
    layers: set[str] = field(default_factory=set[str])


def parts_of(planned: PlannedProgram, collectives: Iterable[PlannedCollective]) -> tuple[LineSeconds, ...]:
    """The parts of a step, the largest first. They add up to ``serial_s``: communication hidden behind compute counts too."""
    names = planned.product_names
    computed = [
        (node, _layer(node, names.get(node.id)), planned.op_seconds[node.id] * node.weight) for node in planned.graph.nodes
    ]
    homes = _homes(computed)
    sums: dict[tuple[str, str, str], _Sum] = {}
    for layer, source, kind, seconds in (*_computed(computed), *_sent(collectives, homes)):
        one = sums.setdefault((re.sub(r"\d+", "*", layer), source, kind), _Sum())
        one.seconds += seconds
        one.layers.add(layer)
    every = (
        LineSeconds(layer, len(s.layers), source, kind, s.seconds) for (layer, source, kind), s in sums.items() if s.seconds > 0
    )
    return _with_rest(sorted(every, key=lambda p: (-p.seconds, p.layer, p.source, p.kind)))


def _computed(computed: Iterable[tuple[Node, str, float]]) -> Iterator[tuple[str, str, str, float]]:
    for node, layer, seconds in computed:
        if seconds > 0:
            source = str(node.op.source)
            yield layer or _function(source), source, BACKWARD if node.backward else FORWARD, seconds


def _sent(collectives: Iterable[PlannedCollective], homes: dict[str, str]) -> Iterator[tuple[str, str, str, float]]:
    for c in collectives:
        yield homes.get(c.source) or _function(c.source), c.source, c.kind.value, c.seconds * c.times


def _homes(computed: Iterable[tuple[Node, str, float]]) -> dict[str, str]:
    """The layer of each source line: that of its slowest op."""
    most: dict[str, tuple[float, str]] = {}
    for node, layer, seconds in computed:
        if layer:
            source = str(node.op.source)
            most[source] = max(most.get(source, (-1.0, "")), (seconds, layer))
    return {source: layer for source, (_, layer) in most.items()}


def _layer(node: Node, product: str | None) -> str:
    """The layer of an op; a product of attention is a layer of its own, with its gradients."""
    layer = layer_of(node.op.scope)
    if product is None:
        return layer
    return f"{layer or _function(str(node.op.source))}/{product.removeprefix('gradient of ')}"


def layer_of(scope: str) -> str:
    """The named scope of an op without the names of transformations; empty where no name is left.

    >>> [layer_of(s) for s in ("transpose(jvp(block_0))/mlp", "while/body/attention/bqk,bsk->bqs", "shardplan_stage_0_part")]
    ['block_0/mlp', 'attention', '']
    """
    words = (word.strip("()") for word in _WRAPPER.sub("(", scope).split("/"))
    return "/".join(w for w in words if w not in _NO_LAYER and not w.startswith(_OWN) and not re.search(r"[(),>]", w))


def _function(source: str) -> str:
    """The function of a source line, ``step.py:7 (loss)``; the whole text where it names none."""
    found = re.search(r"\(([^()]+)\)$", source)
    return found.group(1) if found else source


def _with_rest(parts: list[LineSeconds]) -> tuple[LineSeconds, ...]:
    """The largest parts; the others as one part for each kind."""
    rest: dict[str, float] = {}
    for part in parts[_MOST:]:
        rest[part.kind] = rest.get(part.kind, 0.0) + part.seconds
    return (*parts[:_MOST], *(LineSeconds("all other lines", 1, "", kind, seconds) for kind, seconds in rest.items()))
