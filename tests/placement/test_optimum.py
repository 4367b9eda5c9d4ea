"""The optimum of small problems is that of a full enumeration, and chains of proposals find it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.mesh import Cluster, SingleDevice, SingleLink
from shardplan.placement.configurations import Configuration, degrees_of
from shardplan.placement.device_topology import TICK_S, machine_of
from shardplan.placement.held_bytes import Memory
from shardplan.placement.mcmc import ChainLimits, anneal
from shardplan.placement.operators import Edge, Operator, OperatorGraph, OperatorLoop
from shardplan.placement.optimum import aligned_configurations, optimum
from shardplan.placement.placement_problem import PlacementProblem, problem_of
from shardplan.placement.starts import data_parallel, random_strategy
from tests.placement.problems import operators


@pytest.mark.parametrize(
    ("cluster", "layers", "strategies"), [("2", 3, 64), ("1x2", 3, 64), ("4", 3, 11**3), ("2x2", 2, 15**2), ("2x4", 2, 40**2)]
)
def test_the_optimum_is_that_of_all_strategies(cluster: str, layers: int, strategies: int) -> None:
    here = problem_of(operators("mlp", layers=layers), machine_of(Cluster.load(cluster)))
    assert math.prod(map(len, aligned_configurations(here))) == strategies
    found = optimum(here, data_parallel(here))
    assert found.seconds == found.bound_s == here.seconds(found.strategy, "python") == _least_s(here)
    assert found.simulated < strategies


def _least_s(here: PlacementProblem) -> float:
    """The seconds of the best strategy, by enumeration."""
    simulation = here.simulation("python")
    return min(simulation.full(s) for s in itertools.product(*aligned_configurations(here))) * TICK_S


def _drawn(cluster: str, extents: list[int], ticks: list[int], edges: list[tuple[int, int]]) -> PlacementProblem:
    """Operators with one loop each, which cut evenly and keep their ticks in sum, and tensors between some of them."""
    made = tuple(Operator(f"o{n}", "", (OperatorLoop("i", extent, "S"),), ((), (), ())) for n, extent in enumerate(extents))
    tensors = tuple(Edge(i, j, (12,), 8, (0,), (0,), gradient=False) for i, j in edges)
    tables = tuple(
        {d: (max(1, whole // d[0]), 0, 0) for d in degrees_of(o, Cluster.load(cluster).size)}
        for o, whole in zip(made, ticks, strict=True)
    )
    return PlacementProblem(OperatorGraph(made, tensors, ()), machine_of(Cluster.load(cluster)), tables)


def test_independent_operators_run_beside_each_other_on_a_level_of_four() -> None:
    """The second one is whole on a device or cut over two: they end together only on disjoint aligned groups."""
    here = _drawn("4", [1, 2], [100, 200], [])
    found = optimum(here, [Configuration((1,), (0,)), Configuration((1,), (0,))])
    assert found.seconds == found.bound_s == _least_s(here) == 100 * TICK_S


@settings(max_examples=15, deadline=None)
@given(data=st.data(), cluster=st.sampled_from(["4", "2x4"]))
def test_the_optimum_of_drawn_operators_is_that_of_all_strategies(data: st.DataObject, cluster: str) -> None:
    count = 3 if cluster == "4" else 2
    extents = data.draw(st.lists(st.sampled_from([1, 2, 4]), min_size=count, max_size=count))
    ticks = data.draw(st.lists(st.integers(10**5, 10**8), min_size=count, max_size=count))
    pairs = list(itertools.combinations(range(count), 2))
    here = _drawn(cluster, extents, ticks, data.draw(st.lists(st.sampled_from(pairs), unique=True)))
    start = [Configuration((1,), (0,))] * count
    found = optimum(here, start)
    assert found.seconds == found.bound_s == here.seconds(found.strategy, "python") == _least_s(here)


@pytest.mark.parametrize("memory", [None, 120_000])
@pytest.mark.parametrize("devices", [(SingleDevice(1, speed=0.5),), (SingleDevice(0, absent=True),)])
def test_devices_that_differ_have_the_optimum_of_all_strategies(devices: tuple[SingleDevice, ...], memory: int | None) -> None:
    limits = tuple(d if d.absent else replace(d, memory_bytes=memory) for d in devices)
    cluster = replace(Cluster.load("3"), single_devices=limits, single_links=(SingleLink((1, 2), 1e9),))
    here = problem_of(operators("mlp", layers=3), machine_of(cluster))
    candidates, simulation = aligned_configurations(here), here.simulation("python")
    fitting = [s for s in itertools.product(*candidates) if Memory(here, s).fits]
    found = optimum(here, fitting[0])
    assert found.seconds == min(simulation.full(s) for s in fitting) * TICK_S
    assert Memory(here, found.strategy).fits


@pytest.mark.slow
def test_chains_find_the_optimum_of_lenet() -> None:
    """FlexFlow, section 8.3: four devices, 64 images for each."""
    here = problem_of(operators("lenet", batch=256), machine_of(Cluster.load("flexflow-p100:1")))
    starts = [data_parallel(here), random_strategy(here, np.random.default_rng(0))]
    chains = [anneal(here, start, np.random.default_rng(0), ChainLimits(proposals=1000)) for start in starts]
    best = min(chains, key=lambda chain: chain.seconds)
    found = optimum(here, starts[0], engine="auto")
    assert best.seconds == found.seconds
    assert found.strategies > 900_000
    assert found.simulated < 5000


def test_a_search_that_is_cut_off_bounds_all_strategies() -> None:
    here = problem_of(operators("rnnlm", steps=2), machine_of(Cluster.load("4")))
    cut_off = optimum(here, data_parallel(here), most_bounded=200)
    assert 0 < cut_off.bound_s < cut_off.seconds
    small = problem_of(operators("mlp", layers=3), machine_of(Cluster.load("4")))
    whole = optimum(small, data_parallel(small))
    assert whole.bound_s == whole.seconds
    for most in (1, 10, 30):
        part = optimum(small, data_parallel(small), most_bounded=most)
        assert part.bound_s <= whole.seconds <= part.seconds


@pytest.mark.parametrize("cluster", ["flexflow-p100:1", "flexflow-k80:1"])
def test_a_chain_finds_the_optimum_of_a_small_problem(cluster: str) -> None:
    """FlexFlow, section 8.3. The chain may place parts in any order, so it may even be better."""
    here = problem_of(operators("mlp", layers=3), machine_of(Cluster.load(cluster)))
    chain = anneal(here, data_parallel(here), np.random.default_rng(0), ChainLimits(), engine="python")
    assert chain.seconds <= optimum(here, data_parallel(here)).seconds
