"""The search of strategies made of regions: connected operators on one group of devices, planned inside.

Candidates are independent branches on disjoint groups, chains cut into stages, and what chains of proposals find, merged. Every
operator of a branch or stage is first data parallel on its group. The best candidates get plans of their regions, and the best of
these a chain over all operators, each on its own group. All are simulated as they would run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from shardplan.constants import CONSTANTS
from shardplan.placement.branches import (
    Unit,
    branches_of,
    chains_of,
    groups_text,
    partitions,
    scheduled_on,
    units_of,
)
from shardplan.placement.configurations import Configuration, Group, Strategy, partitions_of
from shardplan.placement.device_groups import GroupTimes, Region, regions_of, used_groups
from shardplan.placement.held_bytes import Memory, may_exceed
from shardplan.placement.mcmc import ChainLimits, Observer, anneal, neighbours_of
from shardplan.placement.placement_problem import PlacementProblem
from shardplan.placement.region_plans import Candidate, RegionPlans
from shardplan.placement.search import BestStrategy, search
from shardplan.placement.simulation import Engine, Simulation
from shardplan.placement.stage_cuts import staged
from shardplan.placement.starts import data_parallel, data_parallel_on, expert

TRIED, PROPOSED, MERGED, INSIDE = 0.2, 0.6, 0.7, 0.8
"""The fractions of the budget by which branches and stages are simulated, chains over all devices end, what they found is merged
into regions, and regions have plans. The rest is for chains over whole candidates. They were not measured: a phase that ends
early leaves its time to the next.
"""


def candidates_of(
    problem: PlacementProblem, until_s: float = math.inf, engine: Engine = "auto", *, stages: bool = True
) -> list[Candidate]:
    """Branches and ``stages``, every operator data parallel on its group, the best first; those that are ready by ``until_s``."""
    times, found, simulation = GroupTimes(problem), dict[tuple[Group, ...], Candidate](), problem.simulation(engine)
    graph = problem.graph
    for origin, groups in _groupings(times, stages=stages):
        if groups not in found and len(set(groups)) > 1:
            strategy = tuple(data_parallel_on(problem, o, g) for o, g in zip(graph.operators, groups, strict=True))
            simulation.full(strategy)
            found[groups] = Candidate(origin, groups, strategy, simulation.seconds)
        if time.monotonic() >= until_s:
            break
    return sorted(found.values(), key=lambda c: c.seconds)


def _groupings(times: GroupTimes, *, stages: bool) -> Iterator[tuple[str, tuple[Group, ...]]]:
    """The groups of all operators, with what they come from."""
    graph, shape = times.problem.graph, times.problem.machine.cluster.shape
    count = math.prod(shape)
    everywhere = tuple(range(count))
    for units in dict.fromkeys(units_of(graph, tied=tied) for tied in (True, False)):
        for branches in dict.fromkeys((branches_of(graph, units), chains_of(graph, units))):
            if len(branches.units) > CONSTANTS.branch_tasks:
                continue
            joint = {i for unit, own in zip(branches.units, branches.joint, strict=True) if own for i in unit}
            for name, groups in partitions(times, branches):
                placed = scheduled_on(times, branches.units, groups)
                yield f"branches on {name}, joints on all devices", _with(placed, joint, everywhere)
                yield f"branches on {name}", placed
        if stages:
            yield from _stages(times, units, shape)


def _with(groups: Sequence[Group], operators: set[int], group: Group) -> tuple[Group, ...]:
    return tuple(group if i in operators else own for i, own in enumerate(groups))


def _stages(times: GroupTimes, units: Sequence[Unit], shape: Sequence[int]) -> Iterator[tuple[str, tuple[Group, ...]]]:
    count = math.prod(shape)
    for size in range(1, count):
        for groups in partitions_of(shape, size) if count % size == 0 else ():
            if len(groups) <= len(units):
                yield f"{len(groups)} stages on {groups_text(groups)}", staged(times, units, groups)


def region_search(
    problem: PlacementProblem,
    starts: Mapping[str, Strategy],
    limits: ChainLimits,
    *,
    chains: int | None = None,
    seed: int = 0,
    workers: int | None = None,
    observer: Observer | None = None,
    engine: Engine = "auto",
) -> tuple[BestStrategy, tuple[Region, ...]]:
    """The best strategy of regions and its regions; never worse than data parallel, the experts' strategy or a start."""
    began = time.monotonic()
    tried_s, proposed_s, merged_s, inside_s, end_s = (began + limits.budget_s * f for f in (TRIED, PROPOSED, MERGED, INSIDE, 1))
    tried = [c for c in candidates_of(problem, tried_s, engine) if _fits(problem, c)]
    heard: Observer | None = None if observer is None else lambda s, done: observer(s, PROPOSED * done)
    share = replace(limits, budget_s=max(0.0, proposed_s - time.monotonic()))
    found = search(problem, starts, share, chains=chains, seed=seed, workers=workers, observer=heard, engine=engine)
    if found.interrupted:
        return found, regions_of(problem, found.strategy, used_groups(found.strategy))
    proposed = Candidate(found.origin, used_groups(found.strategy), found.strategy, found.seconds)
    baselines = {"dp": data_parallel(problem), "expert": expert(problem)} | dict(starts)
    known = [Candidate(name, used_groups(s), s, problem.seconds(s, engine)) for name, s in baselines.items()]
    inside = RegionPlans(problem, limits, inside_s, seed, engine)
    first = [*tried[: CONSTANTS.regions_planned - 1], merged_regions(problem, proposed, merged_s, engine)]
    planned = [inside.planned(c) for c in first if _fits(problem, c)]
    ranked = sorted((c for c in planned if _fits(problem, c)), key=lambda c: c.seconds)
    for n, candidate in enumerate(ranked[:2]):
        left = 0.0 if inside.interrupted else max(0.0, end_s - time.monotonic()) / (2 - n)
        draw = np.random.default_rng((seed, 2 << 20, n))
        chain = anneal(problem, candidate.strategy, draw, replace(limits, budget_s=left), groups=candidate.groups, engine=engine)
        inside.chains.append(chain)
        ranked[n] = replace(candidate, strategy=chain.strategy, seconds=chain.seconds)
        if observer is not None:
            observer(min(c.seconds for c in ranked), INSIDE + (1 - INSIDE) * (n + 1) / 2)
    best = min((c for c in (*known, proposed, *ranked) if _fits(problem, c)), key=lambda c: c.seconds)
    regions = regions_of(problem, best.strategy, best.groups)
    return BestStrategy(best.strategy, best.seconds, best.origin, found.starts, (*found.chains, *inside.chains)), regions


def _fits(problem: PlacementProblem, candidate: Candidate) -> bool:
    """Whether every device holds its part of a candidate."""
    return not may_exceed(problem) or Memory(problem, candidate.strategy).fits


def merged_regions(problem: PlacementProblem, candidate: Candidate, until_s: float, engine: Engine = "auto") -> Candidate:
    """The candidate with fewer regions: short ones move to the group of a neighbour while a step hardly gets longer."""
    simulation, neighbours = problem.simulation(engine), neighbours_of(problem)
    limit_s, origin = candidate.seconds * (1 + CONSTANTS.merge_loss), f"{candidate.origin}, merged into regions"
    while True:
        regions = regions_of(problem, candidate.strategy, candidate.groups)
        for region in sorted(regions, key=lambda r: (r.seconds, r.operators)):
            near = {candidate.groups[j] for i in region.operators for j in neighbours[i]} - {region.devices}
            moved: list[Candidate] = []
            for group in sorted(near):
                moved.append(_moved(problem, candidate, region.operators, group, simulation))
                if time.monotonic() >= until_s:
                    return candidate
            if moved and (best := min(moved, key=lambda c: c.seconds)).seconds <= limit_s:
                candidate = replace(best, origin=origin)
                break
        else:
            return candidate


def _moved(
    problem: PlacementProblem, candidate: Candidate, operators: Sequence[int], group: Group, simulation: Simulation
) -> Candidate:
    """The candidate with some operators on another group: cut as before if they have a part for each device, or over samples."""
    groups, strategy = list(candidate.groups), list(candidate.strategy)
    for i in operators:
        fits = len(strategy[i].devices) == len(group)
        operator = problem.graph.operators[i]
        strategy[i] = Configuration(strategy[i].degrees, group) if fits else data_parallel_on(problem, operator, group)
        groups[i] = group
    simulation.full(strategy)
    return Candidate(candidate.origin, tuple(groups), tuple(strategy), simulation.seconds)
