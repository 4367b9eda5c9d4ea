"""Plans of single regions: each operator cut over the group of its region, by a short chain over the region alone.

Regions of equal operators on groups that are alike have one plan.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shardplan.constants import CONSTANTS
from shardplan.placement.configurations import Configuration, Group, Strategy
from shardplan.placement.device_groups import Region, regions_of
from shardplan.placement.mcmc import Chain, ChainLimits, anneal
from shardplan.placement.operators import OperatorGraph, Weight
from shardplan.placement.placement_problem import PlacementProblem
from shardplan.placement.simulation import Engine


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy in which operator i runs on devices of ``groups[i]``, and where it comes from."""

    origin: str
    groups: tuple[Group, ...]
    strategy: Strategy
    seconds: float


@dataclass(slots=True)
class RegionPlans:
    """Plans of regions, kept for regions alike on groups alike. ``chains`` are those that made them."""

    problem: PlacementProblem
    limits: ChainLimits
    until_s: float
    seed: int
    engine: Engine
    chains: list[Chain] = field(default_factory=list[Chain])
    _plans: dict[tuple[object, ...], Strategy] = field(default_factory=dict[tuple[object, ...], Strategy])

    def planned(self, candidate: Candidate) -> Candidate:
        """The candidate with the plans of its regions in place of its own, region by region, where a step gets shorter."""
        simulation = self.problem.simulation(self.engine)
        simulation.full(candidate.strategy)
        best, seconds = list(candidate.strategy), candidate.seconds
        for region in regions_of(self.problem, candidate.strategy, candidate.groups):
            if len(region.devices) == 1 or time.monotonic() >= self.until_s:
                continue
            tried = best.copy()
            for i, chosen in zip(region.operators, self._plan(region, best), strict=True):
                tried[i] = chosen
            simulation.full(tried)
            if simulation.seconds < seconds:
                best, seconds = tried, simulation.seconds
        return replace(candidate, strategy=tuple(best), seconds=seconds)

    @property
    def interrupted(self) -> bool:
        """Whether an interrupt ended a chain: those after it only begin."""
        return any(c.interrupted for c in self.chains)

    def _plan(self, region: Region, strategy: Sequence[Configuration]) -> Strategy:
        own = tuple(strategy[i] for i in region.operators)
        here = part_of(self.problem, region.operators)
        key = _likeness(here, own, region.devices)
        if key not in self._plans:
            most = CONSTANTS.least_proposals[1] * len(own)
            limits = ChainLimits(
                0.0 if self.interrupted else max(0.0, self.until_s - time.monotonic()),
                most if self.limits.proposals is None else min(most, self.limits.proposals),
            )
            draw = np.random.default_rng((self.seed, 1 << 21, len(self._plans)))
            chain = anneal(here, own, draw, limits, groups=[region.devices] * len(own), engine=self.engine)
            self.chains.append(chain)
            self._plans[key] = _places(chain.strategy, region.devices)
        planned = self._plans[key]
        return tuple(Configuration(c.degrees, tuple(region.devices[n] for n in c.devices)) for c in planned)


def _places(strategy: Sequence[Configuration], group: Group) -> Strategy:
    """A strategy whose devices are places in a group."""
    at = {d: n for n, d in enumerate(group)}
    return tuple(Configuration(c.degrees, tuple(at[d] for d in c.devices)) for c in strategy)


def _likeness(problem: PlacementProblem, strategy: Sequence[Configuration], group: Group) -> tuple[object, ...]:
    """Equal for equal operators that start alike on groups whose devices are alike and joined alike."""
    graph, machine, own = problem.graph, problem.machine, np.ix_(group, group)
    link = np.unique(machine.link[own], return_inverse=True)[1].tolist()
    rates = (machine.speed[list(group)], machine.latency_s[own], machine.bytes_per_s[own])
    return (
        tuple(map(id, problem.tables)),  # equal operators share a table
        graph.edges,
        tuple(replace(w, path="") for w in graph.weights),
        _places(strategy, group),
        str(link),
        *(r.tobytes() for r in rates),
    )


def part_of(problem: PlacementProblem, operators: Sequence[int]) -> PlacementProblem:
    """The problem of some operators alone, with the tensors between them and their weights."""
    graph, at = problem.graph, {i: n for n, i in enumerate(operators)}
    edges = tuple(
        replace(e, producer=at[e.producer], consumer=at[e.consumer]) for e in graph.edges if e.producer in at and e.consumer in at
    )
    weights, arguments = (
        tuple(_of_part(w, at) for w in own if not at.keys().isdisjoint(w.users)) for own in (graph.weights, graph.arguments)
    )
    owners = tuple((op, at[i]) for op, i in graph.owners if i in at)
    part = OperatorGraph(tuple(graph.operators[i] for i in operators), edges, weights, arguments, owners)
    return PlacementProblem(part, problem.machine, tuple(problem.tables[i] for i in operators))


def _of_part(weight: Weight, at: Mapping[int, int]) -> Weight:
    """An argument with only the users that ``at`` renumbers."""
    own = [(at[u], labels) for u, labels in zip(weight.users, weight.labels, strict=True) if u in at]
    return replace(weight, users=tuple(u for u, _ in own), labels=tuple(labels for _, labels in own))
