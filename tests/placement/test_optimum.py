"""The optimum of small problems is that of a full enumeration, and chains of proposals find it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from shardplan.mesh import Cluster
from shardplan.placement.machine import machine_of
from shardplan.placement.mcmc import Limits, anneal
from shardplan.placement.optimum import candidates_of, optimum
from shardplan.placement.problem import problem_of
from shardplan.placement.starts import data_parallel
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


@pytest.mark.parametrize("cluster", ["flexflow-p100:1", "flexflow-k80:1"])
def test_a_chain_finds_the_optimum_of_a_small_problem(cluster: str) -> None:
    """FlexFlow, section 8.3. The chain may place parts in any order, so it may even be better."""
    here = problem_of(operators("mlp", layers=3), machine_of(Cluster.load(cluster)))
    chain = anneal(here, data_parallel(here), np.random.default_rng(0), Limits(), engine="python")
    assert chain.seconds <= optimum(here, data_parallel(here)).seconds
