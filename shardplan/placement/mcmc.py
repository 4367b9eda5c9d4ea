"""Search by Markov chain Monte Carlo (FlexFlow, section 6): Metropolis-Hastings with the simulator as its oracle.

A proposal gives one operator, drawn at random, a random configuration, or a random one on the devices of a neighbour. It is
accepted with probability min(1, exp(beta * (cost(S) - cost(S*)) / cost(S))): equation 1 on relative costs, so that one ``beta``
serves steps of any length. The draw comes first, so the simulation knows the largest cost that is accepted, and stops once a
step must exceed it. Proposals are not symmetric, and the acceptance does not correct for it: chains do not sample equation 1.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
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
from shardplan.placement.held_bytes import Memory, may_exceed
from shardplan.placement.placement_problem import PlacementProblem
from shardplan.placement.simulation import Engine


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
    """What one chain found. ``simulated`` counts the proposals that were simulated: others exceed a bound at once.

    ``history`` has (proposals, seconds since the start, seconds of the best step) at each improvement.
    """

    strategy: Strategy
    seconds: float
    proposals: int
    simulated: int
    accepted: int
    elapsed_s: float
    history: tuple[tuple[int, float, float], ...]


Observer = Callable[[float, float], None]
"""Called with the seconds of the best step and the fraction of the budget that has passed."""


Proposer = Callable[
    [PlacementProblem, Sequence[Configuration], Sequence[Sequence[int]], np.random.Generator], tuple[int, Configuration]
]
"""Draws an operator and another configuration for it, given the present strategy and the neighbours of each operator."""


def least_proposals(operators: int) -> int:
    """The proposals after which the stop rule applies to a chain over so many operators."""
    return max(CONSTANTS.least_proposals[0], CONSTANTS.least_proposals[1] * operators)


def propose(
    problem: PlacementProblem,
    strategy: Sequence[Configuration],
    neighbours: Sequence[Sequence[int]],
    draw: np.random.Generator,
    groups: Sequence[Group] | None = None,
) -> tuple[int, Configuration]:
    """An operator and another configuration for it, both at random; some on the devices of one of its ``neighbours``.

    ``groups[i]`` are the devices over which operator i is cut (None: any).
    """
    i = int(draw.integers(len(strategy)))
    operator, near = problem.graph.operators[i], neighbours[i]
    if near and draw.random() < CONSTANTS.from_neighbour:
        devices = strategy[near[int(draw.integers(len(near)))]].devices
        fitting = [d for d in degrees_of(operator, len(devices)) if math.prod(d) == len(devices)]
        if fitting and (groups is None or set(devices) == set(groups[i])):
            return i, Configuration(fitting[int(draw.integers(len(fitting)))], devices)
    if groups is not None:
        return i, configuration_within(operator, problem.machine.cluster.shape, groups[i], draw)
    return i, random_configuration(operator, problem.machine.cluster.shape, draw, problem.machine.absent)


def neighbours_of(problem: PlacementProblem) -> list[list[int]]:
    """For each operator those that it shares a tensor or a weight with."""
    near: list[set[int]] = [set() for _ in problem.graph.operators]
    for e in problem.graph.edges:
        near[e.producer].add(e.consumer)
        near[e.consumer].add(e.producer)
    for w in problem.graph.weights:
        for u in w.users:
            near[u].update(w.users)
    return [sorted(own - {i}) for i, own in enumerate(near)]


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
    """One chain from a strategy, which fits in memory, until its limits. Proposals that do not fit are rejected.

    Operator i is cut over the devices ``groups[i]`` (None: any). A ``proposer`` of its own searches a part of the space.
    """
    began = time.monotonic()
    simulation = problem.simulation(engine)
    simulation.full(start)
    loads = Loads(problem, start)
    memory = Memory(problem, start) if may_exceed(problem) else None
    best, best_strategy = simulation.ticks, tuple(start)
    history = [(0, time.monotonic() - began, simulation.seconds)]
    proposals = simulated = accepted = 0
    count, neighbours = len(problem.graph.operators), neighbours_of(problem)
    beta = CONSTANTS.beta * count if beta is None else beta
    least = least_proposals(count)
    while not over(limits, proposals, max(least, 2 * history[-1][0]), time.monotonic() - began):
        proposals += 1
        drawn = (problem, simulation.strategy, neighbours, draw)
        i, chosen = proposer(*drawn) if groups is None else propose(*drawn, groups)
        slack = -math.log(1.0 - draw.random()) / beta
        if chosen == simulation.strategy[i]:
            continue
        limit = simulation.ticks + int(simulation.ticks * slack)
        if loads.with_change(i, simulation.strategy[i], chosen) > limit:
            continue
        before = simulation.strategy[i]
        simulated += 1
        if simulation.change(i, chosen, limit) is None:
            simulation.undo()
            continue
        if memory is not None and not memory.changed(simulation.strategy, i, before):
            simulation.undo()
            continue
        accepted += 1
        loads.change(i, before, chosen)
        if simulation.ticks < best:
            best, best_strategy = simulation.ticks, tuple(simulation.strategy)
            history.append((proposals, time.monotonic() - began, simulation.seconds))
            if observer is not None:
                observer(simulation.seconds, min(1.0, history[-1][1] / limits.budget_s))
    return Chain(best_strategy, history[-1][2], proposals, simulated, accepted, time.monotonic() - began, tuple(history))


def over(limits: ChainLimits, proposals: int, enough: int, elapsed_s: float) -> bool:
    """Whether a chain ends after so many proposals and seconds; the rule applies after ``enough`` proposals."""
    if elapsed_s >= limits.budget_s or (limits.proposals is not None and proposals >= limits.proposals):
        return True
    return limits.rule and proposals >= enough
