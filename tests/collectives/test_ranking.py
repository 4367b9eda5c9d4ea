"""Prices of programs: sums of their steps, in the units of the network; the best one is the best of all."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.collectives import (
    best_reduction,
    parse,
    program_seconds,
    replay,
    search,
    synthesize,
    table,
)
from shardplan.collectives.ranking import entries, payloads, shape_of
from shardplan.collectives.states import StateSpace
from shardplan.cost import Network
from shardplan.errors import ReductionError
from shardplan.ir import Collective
from shardplan.mesh import Cluster, Interconnect, Level, factors
from shardplan.mesh.machine import LinkKind
from tests.machines import launchless

DEVICE = Cluster.load("8").device
NAMES = ("node", "gpu")
FIGURE_10 = parse("(node, InsideGroup, ReduceScatter) (node, Parallel(root), AllReduce) (node, InsideGroup, AllGather)", NAMES)
MASTERS = parse("(node, InsideGroup, Reduce) (node, Master(root), AllReduce) (node, InsideGroup, Broadcast)", NAMES)


@st.composite
def networks(draw: st.DrawFn, *, deepest: int = 3) -> Network:
    levels: list[Level] = []
    for i in range(draw(st.integers(1, deepest))):
        kind: LinkKind = draw(st.sampled_from(["switch", "switch", "ring", "bus"]))
        also = Interconnect("also", 1, draw(st.floats(1e9, 1e11)), 1e-6) if kind == "ring" and draw(st.booleans()) else None
        size, speed = draw(st.integers(2, 4)), 10 ** draw(st.floats(9, 11.5))
        rails = draw(st.integers(1, 4)) if kind == "switch" else 1
        efficiency = draw(st.floats(0.5, 1.2)), draw(st.floats(0.5, 1.2))
        levels.append(Level(f"l{i}", size, speed, draw(st.floats(1e-7, 1e-4)), kind, rails, efficiency[0], efficiency[1], also))
    cluster = Cluster("drawn", tuple(levels), DEVICE)
    return Network(cluster, factors(cluster))


def test_a_program_counted_by_hand():
    cluster = Cluster("slow", (Level("node", 2, 1.0, 10.0), Level("gpu", 4, 4.0, 1.0)), DEVICE)
    net = Network(cluster, factors(cluster))
    inner = 3 / 4 * 100 / 4 + 3.0
    across = 4 * 25 / 1 + 10 * 2 * (1 / 2) * 2  # four groups of two share the node's link, a quarter of the data each
    assert program_seconds(net, (0, 1), FIGURE_10, 100.0, algorithm="ring") == pytest.approx(2 * inner + across)
    rooted = 2 * (100 / 4 + 3.0) + 100 + 20.0
    assert program_seconds(net, (0, 1), MASTERS, 100.0, algorithm="ring") == pytest.approx(rooted)


def true_payloads(program, shape: tuple[int, ...]) -> tuple[float, ...]:
    """The largest part of the chunks that any member moves, counted on the states themselves."""
    space = StateSpace(math.prod(shape))
    contexts = replay(program, shape)
    result = []
    from shardplan.collectives import groups

    for step, before, after in zip(program.steps, contexts, contexts[1:], strict=False):
        held = after if step.collective == Collective.ALL_GATHER else before
        result.append(max(space.chunks(held[g[0]]).bit_count() for g in groups(shape, step)) / space.k)
    return tuple(result)


@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (2, 5), (4, 3)])
def test_payloads_are_those_of_the_states(shape: tuple[int, ...]):
    for program in synthesize(2):
        assert payloads(program, shape) == pytest.approx(true_payloads(program, shape))


def test_payloads_of_three_levels():
    for program in synthesize(3, 4):
        assert payloads(program, (2, 3, 2)) == pytest.approx(true_payloads(program, (2, 3, 2)))


@given(networks(), st.floats(1.0, 1e10))
@settings(max_examples=30)
def test_the_best_is_never_slower_than_one_all_reduce(net: Network, nbytes: float):
    everything = tuple(range(len(net.factors)))
    for r in range(1, len(everything) + 1):
        for over in itertools.combinations(everything, r):
            seconds, program = best_reduction(net, over, nbytes)
            flat = float(net.seconds(Collective.ALL_REDUCE, over, nbytes))
            assert seconds <= flat * (1 + 1e-12)
            if len(program.steps) == 1:
                assert seconds == pytest.approx(flat)
            assert seconds == pytest.approx(program_seconds(net, over, program, nbytes, algorithm="emitted"))
            replay(program, shape_of(net, entries(net, over)))


@pytest.mark.parametrize("nbytes", [float("nan"), float("inf"), -1.0])
def test_no_amount_of_data_has_no_best_program(nbytes: float):
    net = Network(Cluster.load("2x4"), factors(Cluster.load("2x4")))
    for best in (search, best_reduction, lambda net, over, nbytes: table(net, over).best(nbytes)):
        with pytest.raises(ReductionError, match="bytes cannot be reduced: give a finite number of at least 0"):
            best(net, (0, 1), nbytes)


def test_a_reduction_over_nothing_costs_nothing():
    net = Network(Cluster.load("2x4"), factors(Cluster.load("2x4")))
    assert best_reduction(net, (), 1e9)[0] == 0.0
    assert best_reduction(net, (), 1e9)[1].steps == ()


@given(networks(), st.floats(1.0, 1e10), st.sampled_from(["auto", "ring", "tree", "emitted"]))
@settings(max_examples=40)
def test_best_first_finds_the_optimum_of_the_enumeration(net: Network, nbytes: float, algorithm):
    over = tuple(range(len(net.factors)))
    seconds, program = search(net, over, nbytes, algorithm=algorithm)
    enumerated, _ = table(net, over, algorithm=algorithm).best(nbytes)
    assert seconds <= enumerated * (1 + 1e-9)
    if len(program.steps) <= 5:
        assert seconds == pytest.approx(enumerated, rel=1e-9)
    replay(program, shape_of(net, entries(net, over)))
    assert program_seconds(net, over, program, nbytes, algorithm=algorithm) == pytest.approx(seconds)


@pytest.mark.parametrize(("shape", "nbytes", "steps"), [("2x2x4", 1e6, 5), ("2x2x2x2", 1e4, 7), ("2x2x2x2", 1e6, 7)])
def test_the_shorter_of_equal_programs_is_the_best(shape: str, nbytes: float, steps: int):
    cluster = launchless(Cluster.load(shape))
    net = Network(cluster, factors(cluster))
    over = tuple(range(len(net.factors)))
    seconds, program = search(net, over, nbytes, algorithm="emitted")
    assert len(program.steps) == steps
    assert program_seconds(net, over, program, nbytes, algorithm="emitted") == pytest.approx(seconds)


@pytest.mark.slow
@given(networks(), st.floats(1.0, 1e10))
@settings(max_examples=10)
def test_best_first_finds_the_optimum_of_a_longer_enumeration(net: Network, nbytes: float):
    over = tuple(range(len(net.factors)))
    seconds, program = search(net, over, nbytes)
    assert len(program.steps) <= 7
    assert seconds == pytest.approx(table(net, over, max_size=7).best(nbytes)[0], rel=1e-9)


def test_best_first_goes_as_deep_as_one_likes():
    net = Network(Cluster.load("2x2x2x4"), factors(Cluster.load("2x2x2x4")))
    for nbytes in (1e4, 1e9):
        seconds, program = best_reduction(net, (0, 1, 2, 3), nbytes)
        replay(program, (2, 2, 2, 4))
        assert seconds <= float(net.seconds(Collective.ALL_REDUCE, (0, 1, 2, 3), nbytes))
        assert best_reduction(net, (0, 1, 2, 3), nbytes) == (seconds, program)


@given(networks(deepest=2), st.floats(1e3, 1e10))
@settings(max_examples=20)
def test_a_sharded_goal_costs_no_more_than_the_whole(net: Network, nbytes: float):
    over = tuple(range(len(net.factors)))
    whole = search(net, over, nbytes, algorithm="ring")[0]
    natural = search(net, over, nbytes, algorithm="ring", goal=Collective.REDUCE_SCATTER)
    replay(natural[1], shape_of(net, entries(net, over)), Collective.REDUCE_SCATTER)
    gather = search(net, over, nbytes, algorithm="ring", goal=Collective.ALL_GATHER)
    assert whole <= natural[0] + gather[0] + 1e-12  # one after the other is an all-reduce


def test_tables_price_many_sizes_as_one_by_one():
    net = Network(Cluster.load("gcp-a100:4"), factors(Cluster.load("gcp-a100:4")))
    priced = table(net, (0, 1))
    for nbytes in (1.0, 1e6, 1e10):
        each = [program_seconds(net, (0, 1), p, nbytes) for p in priced.programs[::7]]
        assert np.allclose(priced.seconds(nbytes)[::7], each)


def test_factors_of_one_level_collapse_into_one_entry():
    cluster = Cluster.load("4x16")
    net = Network(cluster, factors(cluster, {"gpu": (2, 4, 2), "node": (2, 2)}))
    assert entries(net, (4, 2, 0)) == ((0,), (2, 4))
    assert shape_of(net, entries(net, (4, 2, 0))) == (2, 4)
