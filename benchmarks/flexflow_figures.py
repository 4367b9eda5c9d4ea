"""What a strategy computes, transfers and reduces, and how it splits the layers of a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from shardplan.placement.configurations import Strategy
from shardplan.placement.device_topology import TICK_S
from shardplan.placement.group_reductions import members_of
from shardplan.placement.mcmc import layers_of
from shardplan.placement.operators import Edge
from shardplan.placement.placement_problem import PlacementProblem
from shardplan.placement.shared_regions import shared_bytes
from shardplan.placement.synchronisation import sync_groups
from shardplan.placement.tensor_transfers import SharedRegions, backward_transfers, forward_transfers
from shardplan.report.placement_text import cut_text


@dataclass(frozen=True, slots=True)
class Totals:
    """Of all devices in one step: seconds of compute, bytes of tensors between operators, bytes of reductions of gradients."""

    compute_s: float
    transferred_bytes: float
    reduced_bytes: float

    @property
    def sent_bytes(self) -> float:
        """All bytes."""
        return self.transferred_bytes + self.reduced_bytes


def totals(problem: PlacementProblem, strategy: Strategy) -> Totals:
    """The totals of a strategy. A reduction among n devices sends 2 (n - 1) times the bytes of one copy."""
    compute = sum(sum(table[c.degrees]) * len(c.devices) for table, c in zip(problem.tables, strategy, strict=True))
    reduced = sum(
        2 * (len(members_of(mask)) - 1) * nbytes
        for weight in problem.graph.weights
        for mask, nbytes in sync_groups(weight, [strategy[u] for u in weight.users])
    )
    return Totals(compute * TICK_S, float(sum(_sent(problem, e, strategy) for e in problem.graph.edges)), float(reduced))


def _sent(problem: PlacementProblem, edge: Edge, strategy: Strategy) -> int:
    made, read = strategy[edge.producer], strategy[edge.consumer]
    nbytes = shared_bytes(edge, made.degrees, read.degrees)
    there = _between(forward_transfers(edge, made, read, problem.machine), nbytes)
    return there + (_between(backward_transfers(edge, made, read, problem.machine), nbytes.T) if edge.gradient else 0)


def _between(sent: SharedRegions, nbytes: np.ndarray) -> int:
    remote = sent.message >= 0
    return int(nbytes[sent.source[remote], sent.target[remote]].sum())


@dataclass(frozen=True, slots=True)
class Split:
    """How the operators of a layer are cut: the most common cut, how many have it, and the devices of one and of all."""

    layer: str
    operators: int
    cut: str
    have_it: int
    devices_each: float
    devices: int


def splits(problem: PlacementProblem, strategy: Strategy) -> list[Split]:
    """The split of each layer that has weights."""
    graph = problem.graph
    trained = {u for w in graph.weights for u in w.users}
    result: list[Split] = []
    for layer in layers_of(graph):
        if trained.isdisjoint(layer):
            continue
        cuts = Counter(cut_text(graph.operators[i], strategy[i]) for i in layer)
        cut, have_it = min(cuts.items(), key=lambda item: (-item[1], item[0]))
        used = [strategy[i].used for i in layer]
        each = sum(map(len, used)) / len(used)
        name = graph.operators[layer[0]].name.partition("#")[0]
        result.append(Split(name, len(layer), cut, have_it, each, len({d for own in used for d in own})))
    return result
