"""Searches of parts of FlexFlow's space, as the frameworks that it is compared with search them (FlexFlow, section 8.1.3).

Both are chains of the same kind as `shardplan.placement.mcmc`, with the same simulator, on fewer configurations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from shardplan.constants import CONSTANTS
from shardplan.placement.configurations import Configuration, Strategy, degrees_of, single
from shardplan.placement.mcmc import Chain, ChainLimits, anneal, least_proposals, over
from shardplan.placement.operators import Operator, OperatorGraph
from shardplan.placement.placement_problem import PlacementProblem
from shardplan.placement.whole_operators import scheduled

Layers = tuple[tuple[int, ...], ...]
"""The operators of each layer."""


def colocrl(problem: PlacementProblem, limits: ChainLimits, seed: int = 0) -> Chain:
    """Whole operators on single devices, as ColocRL places them (Mirhoseini et al. 2017); the better of two chains.

    One chain begins with all operators on one device, the other with the schedule of HEFT.
    """
    starts = [tuple(single(o, 0) for o in problem.graph.operators), scheduled(problem, "heft")]
    each = ChainLimits(limits.budget_s / len(starts), limits.proposals, limits.rule)
    chains = [
        anneal(problem, start, np.random.default_rng((seed, n)), each, proposer=on_one_device) for n, start in enumerate(starts)
    ]
    return min(chains, key=lambda c: c.seconds)


def on_one_device(
    problem: PlacementProblem, strategy: Sequence[Configuration], neighbours: Sequence[Sequence[int]], draw: np.random.Generator
) -> tuple[int, Configuration]:
    """An operator whole on another device, which may be that of a neighbour."""
    i = int(draw.integers(len(strategy)))
    near = neighbours[i]
    if near and draw.random() < CONSTANTS.from_neighbour:
        device = strategy[near[int(draw.integers(len(near)))]].devices[0]
    else:
        device = int(draw.integers(problem.machine.count))
    return i, single(problem.graph.operators[i], device)


def optcnn(problem: PlacementProblem, starts: Sequence[Strategy], limits: ChainLimits, seed: int = 0) -> Chain:
    """A configuration for each layer, all of them on one set of devices, as OptCNN has it (Jia et al. 2018).

    All parts of a layer have the configuration of its first operator. Every configuration uses the first device, so that no two
    operators run at once. One chain begins at each start, and the best counts.
    """
    each = ChainLimits(limits.budget_s / len(starts), limits.proposals, limits.rule)
    chains = [_anneal_layers(problem, start, np.random.default_rng((seed, n)), each) for n, start in enumerate(starts)]
    return min(chains, key=lambda c: c.seconds)


def layers_of(graph: OperatorGraph) -> Layers:
    """Operators that share their weights, or without weights their source line, and their loops.

    OptCNN's operators are in a chain, so that FlexFlow's authors fuse the nodes of a recurrence that share parameters.
    """
    weights: dict[int, list[int]] = {}
    for w, weight in enumerate(graph.weights):
        for u in weight.users:
            weights.setdefault(u, []).append(w)
    found: dict[object, list[int]] = {}
    for i, operator in enumerate(graph.operators):
        loops = tuple((loop.extent, loop.kind) for loop in operator.loops)
        found.setdefault((tuple(weights.get(i, ())), operator.source, loops), []).append(i)
    return tuple(map(tuple, found.values()))


def _anneal_layers(problem: PlacementProblem, start: Strategy, draw: np.random.Generator, limits: ChainLimits) -> Chain:
    began = time.monotonic()
    layers, simulation = layers_of(problem.graph), problem.simulation()
    cost = best = simulation.full(_of_layers(layers, start))
    strategy = tuple(simulation.strategy)
    history = [(0, time.monotonic() - began, simulation.seconds)]
    proposals = accepted = 0
    least = least_proposals(len(layers))
    while not over(limits, proposals, max(least, 2 * history[-1][0]), time.monotonic() - began):
        proposals += 1
        layer = layers[int(draw.integers(len(layers)))]
        before = simulation.strategy[layer[0]]
        chosen = _on_all(problem.graph.operators[layer[0]], problem.machine.count, draw)
        slack = -math.log(1.0 - draw.random()) / (CONSTANTS.beta * len(layers))
        if chosen == before:
            continue
        for i in layer:
            simulation.change(i, chosen)
        if simulation.ticks > cost + int(cost * slack):
            for i in layer:
                simulation.change(i, before)
            continue
        cost, accepted = simulation.ticks, accepted + 1
        if cost < best:
            best, strategy = cost, tuple(simulation.strategy)
            history.append((proposals, time.monotonic() - began, simulation.seconds))
    return Chain(strategy, history[-1][2], proposals, proposals, accepted, time.monotonic() - began, tuple(history))


def _of_layers(layers: Layers, strategy: Strategy) -> Strategy:
    """Every operator with the configuration of the first of its layer."""
    first = {i: layer[0] for layer in layers for i in layer}
    return tuple(strategy[first[i]] for i in range(len(strategy)))


def _on_all(operator: Operator, count: int, draw: np.random.Generator) -> Configuration:
    """Random degrees, on the first devices or on devices spread over all."""
    choices = degrees_of(operator, count)
    degrees = choices[int(draw.integers(len(choices)))]
    parts = math.prod(degrees)
    step = count // parts if draw.random() < 0.5 else 1
    return Configuration(degrees, tuple(range(0, parts * step, step)))
