"""Chunks one behind another: never faster than the busiest level, never slower than one after the other."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.collectives import parse, program_seconds, synthesize
from shardplan.cost import Network
from shardplan.ir import Collective
from shardplan.mesh import Cluster, Level, factors
from tests.collectives.pipeline import _stages, best_chunks, pipelined_seconds
from tests.machines import launchless

DEVICE = launchless(Cluster.load("8")).device
FIGURE_10 = parse(
    "(node, InsideGroup, ReduceScatter) (node, Parallel(root), AllReduce) (node, InsideGroup, AllGather)", ("node", "gpu")
)


def network(node: float, gpu: float, latency_s: float = 0.0) -> Network:
    cluster = Cluster("c", (Level("node", 4, node, latency_s), Level("gpu", 4, gpu, latency_s)), DEVICE)
    return Network(cluster, factors(cluster))


def test_counted_by_hand():
    # scatter and gather keep the inner level 3/4 each, the all-reduce keeps the outer one 4 * 1.5 / 4 = 1.5 (and the inner one
    # 1.5 / 4): with two halves the second scatter runs beside the first all-reduce
    net = network(1.0, 1.0)
    whole = 0.75 + 1.5 + 0.75
    assert pipelined_seconds(net, (0, 1), FIGURE_10, 1.0, 1, algorithm="ring") == pytest.approx(whole)
    halves = pipelined_seconds(net, (0, 1), FIGURE_10, 1.0, 2, algorithm="ring")
    assert halves < whole
    assert halves >= 1.5 + 0.375 + 0.375  # the outer level's work, between a first scatter and a last gather


@given(
    st.floats(1.0, 100.0), st.floats(1.0, 100.0), st.floats(0.0, 1.0), st.integers(1, 12), st.integers(0, 92), st.floats(0.1, 100)
)
@settings(max_examples=60)
def test_between_the_busiest_level_and_one_after_the_other(
    node: float, gpu: float, latency_s: float, chunks: int, which: int, nbytes: float
):
    net, program = network(node, gpu, latency_s), synthesize(2)[which]
    seconds = pipelined_seconds(net, (0, 1), program, nbytes, chunks)
    stages = _stages(net, (0, 1), program, nbytes / chunks, "auto")
    busiest = max(sum(dict(stage.keeps).get(level, 0.0) for stage in stages) for level in (0, 1))
    assert seconds >= chunks * busiest * (1 - 1e-9)
    assert seconds <= chunks * sum(stage.seconds for stage in stages) * (1 + 1e-9)
    assert pipelined_seconds(net, (0, 1), program, nbytes, 1) == pytest.approx(program_seconds(net, (0, 1), program, nbytes))


def test_many_chunks_suit_large_data_and_one_small():
    net = network(1e9, 2e9, 1e-5)
    assert best_chunks(net, (0, 1), FIGURE_10, 1e9)[1] > 1
    assert best_chunks(net, (0, 1), FIGURE_10, 10.0)[1] == 1
    for nbytes in (10.0, 1e5, 1e9):
        assert best_chunks(net, (0, 1), FIGURE_10, nbytes)[0] <= program_seconds(net, (0, 1), FIGURE_10, nbytes)


def test_levels_are_busy_as_long_as_the_slope_says():
    draw = random.Random(0)
    for spec in ("gcp-a100:2", "dgx-h100:4", "gcp-v100:2", "2x2x4"):
        net = Network(Cluster.load(spec), factors(Cluster.load(spec)))
        for kind in (
            Collective.ALL_REDUCE,
            Collective.REDUCE_SCATTER,
            Collective.ALL_GATHER,
            Collective.REDUCE,
            Collective.BROADCAST,
            Collective.SHIFT,
            Collective.ALL_TO_ALL,
        ):
            over = tuple(sorted(draw.sample(range(len(net.factors)), draw.randint(1, len(net.factors)))))
            assert net.busy(kind, over).max(axis=1) == pytest.approx(net.lines(kind, over)[:, 1])
