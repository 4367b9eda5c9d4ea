"""Search by Markov chain Monte Carlo (FlexFlow, section 6): Metropolis-Hastings with the simulator as its oracle.

A proposal gives an operator, drawn at random, or its whole layer (the steps of an unrolled recurrence) a random configuration,
or a random one on the devices of a neighbour. It is accepted with probability min(1, exp(beta * (cost(S) - cost(S*)) /
cost(S))): equation 1 on relative costs, so that one ``beta`` serves steps of any length. The draw comes first, so the
simulation knows the largest cost that is accepted, and stops once a step must exceed it. Proposals are not symmetric, and the
acceptance does not correct for it: chains do not sample equation 1.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.constants import CONSTANTS
from shardplan.placement.bounds import Loads
from shardplan.placement.configurations import (
    Configuration,
    Group,
    Strategy,
    configuration_within,
    degrees_of,
    random_configuration,
)
from shardplan.placement.device_topology import TICK_S
from shardplan.placement.held_bytes import Memory, may_exceed
from shardplan.placement.operators import OperatorGraph
from shardplan.placement.placement_problem import PlacementProblem
from shardplan.placement.simulation import Engine, Simulation


@dataclass(frozen=True, slots=True)
class ChainLimits:
    """When a chain ends: after ``budget_s`` seconds, after ``proposals``, or by the paper's rule (section 6.2).

    The rule: the best strategy has not improved for half of the search, which is counted in proposals and so is repeatable.
    """

    budget_s: float = math.inf
    proposals: int | None = None
    rule: bool = True


@dataclass(frozen=True, slots=True)
class Chain:
    """The result of one chain. ``simulated`` counts the proposals that were simulated: others exceed a bound at once.

    ``history`` has (proposals, seconds since the start, seconds of the best step) at each improvement. ``interrupted``: the user
    ended the chain.
    """

    strategy: Strategy
    seconds: float
    proposals: int
    simulated: int
    accepted: int
    elapsed_s: float
    history: tuple[tuple[int, float, float], ...]
    interrupted: bool = False


Observer = Callable[[float, float], None]
"""Called with the seconds of the best step and the fraction of the budget that has passed."""


@dataclass(frozen=True, slots=True)
class Related:
    """For each operator, its ``neighbours``, with which it shares a tensor or a weight, and its ``layer``, itself among them."""

    neighbours: tuple[tuple[int, ...], ...]
    layer: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Present:
    """The source of proposals: the present strategy, and the devices over which each operator is cut (None: any)."""

    problem: PlacementProblem
    strategy: Sequence[Configuration]
    related: Related
    draw: np.random.Generator
    groups: Sequence[Group] | None = None

    def one_of(self, count: int) -> int:
        """A number below ``count``."""
        return int(self.draw.integers(count))

    def near(self, i: int) -> Configuration | None:
        """The configuration of a neighbour of operator i, at times (`CONSTANTS.from_neighbour`); else None."""
        near = self.related.neighbours[i]
        return self.strategy[near[self.one_of(len(near))]] if near and self.draw.random() < CONSTANTS.from_neighbour else None


Proposer = Callable[[Present], Mapping[int, Configuration]]
"""Draws operators with another configuration for each."""


def least_proposals(operators: int) -> int:
    """The proposals after which the stop rule applies to a chain over so many operators."""
    return max(CONSTANTS.least_proposals[0], CONSTANTS.least_proposals[1] * operators)


def propose(at: Present) -> dict[int, Configuration]:
    """An operator or its layer, and another configuration for it, at random; some on the devices of a neighbour."""
    i = at.one_of(len(at.strategy))
    chosen = _other(at, i)
    if at.draw.random() >= CONSTANTS.whole_layers:
        return {i: chosen}
    return {j: chosen for j in at.related.layer[i] if at.groups is None or set(at.groups[j]) == set(at.groups[i])}


def _other(at: Present, i: int) -> Configuration:
    """Another configuration for operator i."""
    operator, machine, groups = at.problem.graph.operators[i], at.problem.machine, at.groups
    if (near := at.near(i)) is not None:
        fitting = [d for d in degrees_of(operator, len(near.devices)) if math.prod(d) == len(near.devices)]
        if fitting and (groups is None or set(near.devices) == set(groups[i])):
            return Configuration(fitting[at.one_of(len(fitting))], near.devices)
    if groups is not None:
        return configuration_within(operator, machine.cluster.shape, groups[i], at.draw)
    return random_configuration(operator, machine.cluster.shape, at.draw, machine.absent)


def related_of(problem: PlacementProblem) -> Related:
    """The operators to which each operator of a step is related."""
    layers = {i: layer for layer in layers_of(problem.graph) for i in layer}
    return Related(neighbours_of(problem), tuple(layers[i] for i in range(len(layers))))


def neighbours_of(problem: PlacementProblem) -> tuple[tuple[int, ...], ...]:
    """For each operator, those with which it shares a tensor or a weight."""
    near: list[set[int]] = [set() for _ in problem.graph.operators]
    for e in problem.graph.edges:
        near[e.producer].add(e.consumer)
        near[e.consumer].add(e.producer)
    for w in problem.graph.weights:
        for u in w.users:
            near[u].update(w.users)
    return tuple(tuple(sorted(own - {i})) for i, own in enumerate(near))


def layers_of(graph: OperatorGraph) -> tuple[tuple[int, ...], ...]:
    """The operators of each layer: they share their weights, or without weights their source line, and their loops.

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


def anneal(
    problem: PlacementProblem,
    start: Sequence[Configuration],
    draw: np.random.Generator,
    limits: ChainLimits,
    *,
    beta: float | None = None,
    groups: Sequence[Group] | None = None,
    proposer: Proposer = propose,
    observer: Observer | None = None,
    engine: Engine = "auto",
) -> Chain:
    """One chain from a strategy, which fits in memory, until its limits or an interrupt. Proposals that do not fit are rejected.

    A ``proposer`` of its own searches a part of the space.
    """
    began = time.monotonic()
    simulation = problem.simulation(engine)
    simulation.full(start)
    loads = Loads(problem, start)
    memory = Memory(problem, start) if may_exceed(problem) else None
    best: tuple[int, Strategy] = simulation.ticks, tuple(start)
    history = [(0, time.monotonic() - began, simulation.seconds)]
    proposals = simulated = accepted = 0
    count, related = len(problem.graph.operators), related_of(problem)
    beta = CONSTANTS.beta * count if beta is None else beta
    least = least_proposals(count)
    interrupted = False
    try:
        while not over(limits, proposals, max(least, 2 * history[-1][0]), time.monotonic() - began):
            proposals += 1
            proposed = proposer(Present(problem, simulation.strategy, related, draw, groups))
            slack = -math.log(1.0 - draw.random()) / beta
            before = {i: own for i in proposed if (own := simulation.strategy[i]) != proposed[i]}
            if not before:
                continue
            changed = {i: proposed[i] for i in before}
            limit = simulation.ticks + int(simulation.ticks * slack)
            if (busy := loads.changed(before, changed)).max() > limit:
                continue
            simulated += 1
            if not _taken(simulation, memory, before, changed, limit):
                continue
            accepted += 1
            loads.ticks = busy
            if simulation.ticks < best[0]:
                best = simulation.ticks, tuple(simulation.strategy)
                history.append((proposals, time.monotonic() - began, simulation.seconds))
                if observer is not None:
                    observer(simulation.seconds, min(1.0, history[-1][1] / limits.budget_s))
    except KeyboardInterrupt:  # goes on with the best so far
        interrupted = True
    counts = proposals, simulated, accepted
    return Chain(best[1], best[0] * TICK_S, *counts, time.monotonic() - began, tuple(history), interrupted)


def _taken(
    simulation: Simulation,
    memory: Memory | None,
    before: Mapping[int, Configuration],
    changed: Mapping[int, Configuration],
    limit: int,
) -> bool:
    """Changes the strategy, if a step then takes at most ``limit`` ticks and fits in memory; whether it did."""
    if simulation.change(changed, limit) is not None and (memory is None or memory.changed(simulation.strategy, before)):
        return True
    simulation.undo()
    return False


def over(limits: ChainLimits, proposals: int, enough: int, elapsed_s: float) -> bool:
    """Whether a chain ends after so many proposals and seconds; the rule applies after ``enough`` proposals."""
    if elapsed_s >= limits.budget_s or (limits.proposals is not None and proposals >= limits.proposals):
        return True
    return limits.rule and proposals >= enough
