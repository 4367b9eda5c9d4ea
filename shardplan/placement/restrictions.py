"""Searches of parts of FlexFlow's space, as the frameworks that it is compared with search them (FlexFlow, section 8.1.3).

Both are chains of the same kind as `shardplan.placement.mcmc`, with the same simulator, on fewer configurations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from shardplan.constants import CONSTANTS
from shardplan.placement.configurations import Configuration, Strategy, degrees_of, single
from shardplan.placement.mcmc import Chain, ChainLimits, Present, anneal, layers_of
from shardplan.placement.placement_problem import PlacementProblem
from shardplan.placement.whole_operators import scheduled


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


def on_one_device(at: Present) -> dict[int, Configuration]:
    """An operator whole on another device, which may be that of a neighbour."""
    i = at.one_of(len(at.strategy))
    near = at.near(i)
    device = near.devices[0] if near is not None else at.one_of(at.problem.machine.count)
    return {i: single(at.problem.graph.operators[i], device)}


def optcnn(problem: PlacementProblem, starts: Sequence[Strategy], limits: ChainLimits, seed: int = 0) -> Chain:
    """A configuration for each layer, all of them on one set of devices, as OptCNN has it (Jia et al. 2018).

    All parts of a layer have the configuration of its first operator. Every configuration uses the first device, so that no two
    operators run at once. One chain begins at each start, and the best counts.
    """
    layers = layers_of(problem.graph)
    each = ChainLimits(limits.budget_s / len(starts), limits.proposals, limits.rule)
    chains = [
        anneal(
            problem,
            _of_layers(layers, start),
            np.random.default_rng((seed, n)),
            each,
            beta=CONSTANTS.beta * len(layers),
            proposer=layer_on_all,
        )
        for n, start in enumerate(starts)
    ]
    return min(chains, key=lambda c: c.seconds)


def layer_on_all(at: Present) -> dict[int, Configuration]:
    """A layer in random degrees, on the first devices or on devices spread over all."""
    layers, count = tuple(dict.fromkeys(at.related.layer)), at.problem.machine.count
    layer = layers[at.one_of(len(layers))]
    choices = degrees_of(at.problem.graph.operators[layer[0]], count)
    degrees = choices[at.one_of(len(choices))]
    parts = math.prod(degrees)
    step = count // parts if at.draw.random() < 0.5 else 1
    return dict.fromkeys(layer, Configuration(degrees, tuple(range(0, parts * step, step))))


def _of_layers(layers: Sequence[Sequence[int]], start: Strategy) -> Strategy:
    """Gives every operator the configuration of the first operator of its layer."""
    first = {i: layer[0] for layer in layers for i in layer}
    return tuple(start[first[i]] for i in range(len(start)))
