"""The optimum of small problems is that of a full enumeration, and chains of proposals find it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from shardplan.mesh import Cluster, SingleDevice, SingleLink
from shardplan.placement.device_topology import TICK_S, machine_of
from shardplan.placement.held_bytes import Memory
from shardplan.placement.mcmc import Limits, anneal
from shardplan.placement.optimum import candidates_of, optimum
from shardplan.placement.placement_problem import problem_of
from shardplan.placement.starts import data_parallel, random_strategy
from tests.placement.problems import operators


@pytest.mark.parametrize("cluster", ["2", "1x2"])
def test_the_optimum_is_that_of_all_strategies(cluster: str) -> None:
    here = problem_of(operators("mlp", layers=3), machine_of(Cluster.load(cluster)))
    candidates = candidates_of(here)
    assert math.prod(map(len, candidates)) == 64
    simulation = here.simulation("python")
    least = min(simulation.full(s) for s in itertools.product(*candidates))
    start = data_parallel(here)
    found = optimum(here, start)
    simulation.full(found.strategy)
    assert simulation.ticks == least
    assert found.simulated < 64


@pytest.mark.parametrize("memory", [None, 120_000])
@pytest.mark.parametrize("devices", [(SingleDevice(1, speed=0.5),), (SingleDevice(0, absent=True),)])
def test_devices_that_differ_have_the_optimum_of_all_strategies(devices: tuple[SingleDevice, ...], memory: int | None) -> None:
    limits = tuple(replace(d, memory_bytes=memory) for d in devices)
    cluster = replace(Cluster.load("3"), single_devices=limits, single_links=(SingleLink((1, 2), 1e9),))
    here = problem_of(operators("mlp", layers=3), machine_of(cluster))
    candidates, simulation = candidates_of(here), here.simulation("python")
    fitting = [s for s in itertools.product(*candidates) if Memory(here, s).fits]
    found = optimum(here, fitting[0])
    assert found.seconds == min(simulation.full(s) for s in fitting) * TICK_S
    assert Memory(here, found.strategy).fits


def test_chains_find_the_optimum_of_lenet() -> None:
    """FlexFlow, section 8.3: four devices, 64 images for each."""
    here = problem_of(operators("lenet", batch=256), machine_of(Cluster.load("flexflow-p100:1")))
    starts = [data_parallel(here), random_strategy(here, np.random.default_rng(0))]
    chains = [anneal(here, start, np.random.default_rng(0), Limits(proposals=1000)) for start in starts]
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
    chain = anneal(here, data_parallel(here), np.random.default_rng(0), Limits(), engine="python")
    assert chain.seconds <= optimum(here, data_parallel(here)).seconds
