"""Chains cut into stages: the dynamic program beside all cuts, and a traced chain of equal layers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from shardplan.mesh import Cluster
from shardplan.placement.branches import units_of
from shardplan.placement.device_groups import GroupTimes
from shardplan.placement.device_topology import machine_of
from shardplan.placement.placement_problem import problem_of
from shardplan.placement.stage_cuts import stage_cuts, staged
from tests.placement.problems import operators

Floats = NDArray[np.float64]


def _slowest(firsts: tuple[int, ...], work_s: Floats, received_s: Floats) -> float:
    ends = (*firsts[1:], work_s.shape[1])
    received = [0.0, *(float(received_s[k, first]) for k, first in enumerate(firsts) if k)]
    return max(float(work_s[k, a:b].sum()) + extra for k, (a, b, extra) in enumerate(zip(firsts, ends, received, strict=True)))


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cut_has_a_faster_slowest_stage(seed: int) -> None:
    draw = np.random.default_rng(seed)
    stages, count = int(draw.integers(1, 5)), int(draw.integers(5, 9))
    work_s, received_s = draw.random((stages, count)), draw.random((stages, count))
    best = min(_slowest((0, *cuts), work_s, received_s) for cuts in itertools.combinations(range(1, count), stages - 1))
    firsts = stage_cuts(work_s, received_s)
    assert len(firsts) == stages
    assert _slowest(firsts, work_s, received_s) == pytest.approx(best)


def test_equal_units_are_cut_into_equal_stages() -> None:
    assert stage_cuts(np.ones((4, 8)), np.zeros((4, 8))) == (0, 2, 4, 6)


def test_a_chain_of_equal_layers_is_cut_into_balanced_stages() -> None:
    graph = operators("mlp", layers=8, width=256, inputs=256, classes=256, batch=64)
    here = problem_of(graph, machine_of(Cluster.load("flexflow-p100:1")))
    units, groups = units_of(graph, tied=True), ((0, 1), (2, 3))
    assert units == tuple((i,) for i in range(8))
    placed = staged(GroupTimes(here), units, groups)
    assert placed == (groups[0],) * 4 + (groups[1],) * 4


def test_the_steps_of_an_unrolled_layer_stay_in_one_stage() -> None:
    graph = operators("rnn", layers=2)
    here = problem_of(graph, machine_of(Cluster.load("2x2")))
    units = units_of(graph, tied=True)
    placed = staged(GroupTimes(here), units, ((0, 1), (2, 3)))
    assert len(units) < len(graph.operators)
    assert all(len({placed[i] for i in w.users}) == 1 for w in graph.weights)
    assert len(set(placed)) == 2
