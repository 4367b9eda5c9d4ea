"""Regions: branches, groups that follow the levels, plans inside, and the whole search beside its baselines."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shardplan.mesh import Cluster
from shardplan.placement.branches import branches_of, chains_of, partitions, scheduled_on, units_of
from shardplan.placement.configurations import configuration_within, partitions_of
from shardplan.placement.device_groups import GroupTimes, proportional_groups, regions_of, used_groups
from shardplan.placement.device_topology import machine_of
from shardplan.placement.mcmc import ChainLimits, anneal
from shardplan.placement.operators import Edge, Operator, OperatorGraph
from shardplan.placement.placement_problem import PlacementProblem, problem_of
from shardplan.placement.region_plans import Candidate, RegionPlans, part_of
from shardplan.placement.region_search import candidates_of, merged_regions, region_search
from shardplan.placement.search import starts_of
from shardplan.placement.starts import data_parallel, data_parallel_on, expert, random_strategy
from tests.placement.problems import operators, problem

TOWERS = ("two_tower", "flexflow-p100:1")


def _graph(count: int, *edges: tuple[int, int]) -> OperatorGraph:
    """Operators without work."""
    operators = tuple(Operator(str(i), "", (), ((), (), ())) for i in range(count))
    return OperatorGraph(operators, tuple(Edge(a, b, (), 4, (), (), gradient=True) for a, b in edges), ())


def test_branches_lie_between_joints() -> None:
    """0 forks into 1-2 and 3, which 4 joins; 5 follows."""
    graph = _graph(6, (0, 1), (1, 2), (0, 3), (2, 4), (3, 4), (4, 5))
    branches = branches_of(graph, units_of(graph, tied=False))
    assert branches.units == ((0,), (1, 2), (3,), (4,), (5,))
    assert branches.joint == (True, False, False, True, True)
    assert branches.section == (0, 1, 1, 1, 2)


def test_a_tensor_that_skips_a_joint_does_not_join_branches_across_it() -> None:
    graph = _graph(7, (0, 2), (1, 2), (2, 3), (2, 4), (3, 5), (4, 5), (0, 3), (5, 6))
    assert branches_of(graph, units_of(graph, tied=False)).units == ((0,), (1,), (2,), (3,), (4,), (5,), (6,))


def test_chains_are_the_branches_inside_of_a_branch() -> None:
    """Beside 7, a branch forks into 2-3 and 4-5."""
    graph = _graph(9, (0, 1), (1, 2), (2, 3), (1, 4), (4, 5), (3, 6), (5, 6), (0, 7), (6, 8), (7, 8))
    units = units_of(graph, tied=False)
    assert branches_of(graph, units).units == ((0,), (1, 2, 3, 4, 5, 6), (7,), (8,))
    assert chains_of(graph, units).units == ((0,), (1,), (2, 3), (4, 5), (6,), (7,), (8,))


@pytest.mark.parametrize("shape", [(1, 4), (4, 4), (2, 3, 2)])
@pytest.mark.parametrize("seed", range(5))
def test_groups_by_work_are_disjoint_and_the_most_work_has_the_largest(shape: tuple[int, ...], seed: int) -> None:
    work = np.random.default_rng(seed).random(3).tolist()
    groups = proportional_groups(shape, work)
    devices = [d for g in groups for d in g]
    assert len(devices) == len(set(devices)) <= math.prod(shape)
    sizes = [len(g) for g in groups]
    assert sizes[int(np.argmax(work))] == max(sizes)
    assert proportional_groups((2,), work) == ()


def test_partitions_have_each_device_once() -> None:
    for size in (1, 2, 4, 8):
        for groups in partitions_of((2, 2, 2), size):
            assert sorted(d for g in groups for d in g) == list(range(8))


def test_fd_dps_puts_towers_on_disjoint_groups() -> None:
    here = problem(*TOWERS)
    branches = branches_of(here.graph, units_of(here.graph, tied=True))
    times = GroupTimes(here)
    for _, groups in partitions(times, branches):
        placed = scheduled_on(times, branches.units, groups)
        left, right = ({placed[i] for i, n in enumerate(here.graph.names) if n.startswith(side)} for side in ("left", "right"))
        assert len(left) == len(right) == 1
        assert left != right


def test_draws_within_a_group_stay_on_it() -> None:
    here, draw = problem("gpt", "2x2"), np.random.default_rng(0)
    for group in ((1,), (0, 2), (0, 1, 2, 3)):
        for operator in here.graph.operators:
            for _ in range(5):
                chosen = configuration_within(operator, (2, 2), group, draw)
                assert set(chosen.devices) <= set(group)
                assert len(set(chosen.devices)) == len(chosen.devices)


def test_a_chain_with_groups_leaves_none() -> None:
    here = problem(*TOWERS)
    groups = tuple((0, 1) if n.startswith("left") else (2, 3) for n in here.graph.names)
    start = tuple(data_parallel_on(here, o, g) for o, g in zip(here.graph.operators, groups, strict=True))
    chain = anneal(here, start, np.random.default_rng(0), ChainLimits(proposals=100), groups=groups, engine="python")
    assert chain.seconds <= here.seconds(start, "python")
    assert all(set(c.devices) <= set(g) for c, g in zip(chain.strategy, groups, strict=True))


def test_equal_regions_on_equal_groups_are_planned_once() -> None:
    here = problem(*TOWERS)
    first = {"left/layer_0/kernel": (0, 1), "left/layer_1/kernel": (0, 1)}
    second = {"right/layer_0/kernel": (2, 3), "right/layer_1/kernel": (2, 3)}
    groups = tuple((first | second).get(n, (0, 1, 2, 3)) for n in here.graph.names)
    strategy = tuple(data_parallel_on(here, o, g) for o, g in zip(here.graph.operators, groups, strict=True))
    plans = RegionPlans(here, ChainLimits(proposals=20), math.inf, 0, "python")
    candidate = Candidate("towers", groups, strategy, here.seconds(strategy, "python"))
    planned = plans.planned(candidate)
    assert len(plans.chains) == 2  # the first layers of a tower, and the rest
    assert planned.seconds == here.seconds(planned.strategy, "python") <= candidate.seconds


def test_a_part_of_a_problem_has_its_tensors_and_weights() -> None:
    here = problem("rnn", "2x2")
    whole = part_of(here, range(len(here.graph.operators)))
    assert whole == here
    part = part_of(here, (0, 1, 2))
    assert part.seconds(data_parallel(part), "python") > 0


def test_merged_regions_are_fewer_and_hardly_slower() -> None:
    here = problem(*TOWERS)
    strategy = random_strategy(here, np.random.default_rng(1))
    first = Candidate("random", used_groups(strategy), strategy, here.seconds(strategy, "python"))
    merged = merged_regions(here, first, math.inf, "python")
    count = [len(regions_of(here, c.strategy, c.groups)) for c in (first, merged)]
    assert count[1] < count[0]
    assert merged.seconds == here.seconds(merged.strategy, "python") <= 1.02 * first.seconds


@pytest.mark.parametrize(("model", "cluster"), [TOWERS, ("mlp", "2x2"), ("rnn", "flexflow-k80:1"), ("gpt", "2x2")])
def test_regions_are_never_worse_than_their_baselines(model: str, cluster: str) -> None:
    here = problem(model, cluster)
    found, regions = _search(here)
    assert found.seconds == here.seconds(found.strategy, "python")
    assert found.seconds <= min(here.seconds(s, "python") for s in (data_parallel(here), expert(here)))
    assert found.seconds <= min(found.starts.values())
    assert sorted(i for r in regions for i in r.operators) == list(range(len(here.graph.operators)))
    for region in regions:
        assert all(set(found.strategy[i].devices) <= set(region.devices) for i in region.operators)


def test_chains_begin_at_the_given_starts_alone() -> None:
    here = problem("mlp", "2x2")
    found, _ = region_search(here, starts_of(here, ("random",), 0, None), ChainLimits(proposals=5), workers=1, engine="python")
    assert list(found.starts) == ["random"]
    assert found.seconds <= min(here.seconds(s, "python") for s in (data_parallel(here), expert(here)))


@pytest.mark.parametrize("seed", range(3))
def test_towers_run_beside_each_other_and_beat_data_parallelism(seed: int) -> None:
    machine = machine_of(Cluster.load("flexflow-p100:1"))
    here = problem_of(operators("two_tower", width=256, batch=256), machine)
    starts = starts_of(here, ("dp", "expert"), 0, None)
    found, regions = region_search(here, starts, ChainLimits(proposals=40), seed=seed, workers=1, engine="python")
    left, right = (
        {d for r in regions for i in r.operators if here.graph.names[i].startswith(side) for d in r.devices}
        for side in ("left", "right")
    )
    assert not left & right
    assert found.seconds < found.starts["dp"]


def test_equal_seeds_find_equal_regions() -> None:
    here = problem(*TOWERS)
    (first, regions), (second, same) = _search(here), _search(here)
    assert (first.strategy, first.seconds, regions) == (second.strategy, second.seconds, same)


def test_candidates_come_in_the_order_of_their_steps() -> None:
    here = problem("rnn", "2x2")
    candidates = candidates_of(here, engine="python")
    assert [c.seconds for c in candidates] == sorted(here.seconds(c.strategy, "python") for c in candidates)
    assert {c.origin.split(" on ")[0].split()[-1] for c in candidates} == {"branches", "stages"}


def _search(here: PlacementProblem):
    starts = starts_of(here, ("dp", "random"), 0, None)
    return region_search(here, starts, ChainLimits(proposals=40), seed=3, workers=1, engine="python")
