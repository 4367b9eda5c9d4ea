"""Envelopes: the best program of every size at once, the same as the best of all programs listed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.collectives import replay, search, table
from shardplan.collectives.dsl import Reduction
from shardplan.collectives.envelope import Envelope, _lowest, envelope
from shardplan.collectives.ranking import program_seconds
from shardplan.collectives.states import Goal
from shardplan.cost import Network
from shardplan.ir import Collective
from shardplan.mesh import Cluster, factors

SIZES = np.logspace(0, 12, 49)


def network(cluster: str) -> Network:
    loaded = Cluster.load(cluster)
    return Network(loaded, factors(loaded))


@pytest.mark.parametrize("goal", [Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER])
@pytest.mark.parametrize("cluster", ["8", "2x4", "64x8", "gcp-a100:4", "gcp-v100:4", "gb200-nvl72:4", "2x2x2", "8x4x2"])
def test_the_envelope_is_the_least_of_all_listed_programs(cluster: str, goal: Goal) -> None:
    net = network(cluster)
    for n in range(1, len(net.factors) + 1):
        for over in itertools.combinations(range(len(net.factors)), n):
            found, every = envelope(net, over, goal), table(net, over, algorithm="emitted", goal=goal)
            for nbytes in SIZES:
                assert found.best(nbytes)[0] == pytest.approx(every.best(nbytes)[0], rel=1e-12)


@pytest.mark.parametrize("cluster", ["gcp-a100:4", "gb200-nvl72:4", "8x4x2", "2x2x2x2"])
def test_every_program_of_an_envelope_is_right_and_takes_what_its_line_says(cluster: str) -> None:
    net = network(cluster)
    over = tuple(range(len(net.factors)))
    found = envelope(net, over)
    for nbytes in SIZES:
        seconds, program = found.best(nbytes)
        assert seconds == pytest.approx(program_seconds(net, over, program, nbytes, algorithm="emitted"), rel=1e-12)
    for program in found.programs:
        replay(program, (2,) * len(over))


def test_four_levels_are_priced_by_programs_that_join_two_of_them() -> None:
    """Never below the best of all; a tenth above it at most on this one."""
    net = network("2x2x2x2")
    for nbytes in (1e4, 1e6, 1e9):
        best, priced = search(net, (0, 1, 2, 3), nbytes, algorithm="emitted")[0], envelope(net, (0, 1, 2, 3)).best(nbytes)[0]
        assert best <= priced * (1 + 1e-12)
        assert priced <= 1.11 * best


def test_nothing_to_reduce_takes_no_time() -> None:
    assert envelope(network("2x4"), ()).best(1e9) == (0.0, Reduction((), 0))


lines = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6)


@given(of=st.lists(lines, min_size=1, max_size=3))
def test_lines_that_are_nowhere_the_least_are_left_out(of: list[list[tuple[int, int]]]) -> None:
    every = np.array([line for rows in of for line in rows], float)
    found = _lowest([Envelope(np.array(rows, float), (Reduction((), 0),) * len(rows)) for rows in of]).lines
    at = np.concatenate([[0.0], np.logspace(-2, 4, 200)])[:, None]
    assert np.allclose(np.min(found[:, 0] + found[:, 1] * at, axis=1), np.min(every[:, 0] + every[:, 1] * at, axis=1))
    assert np.all(np.diff(found[:, 0]) > 0), "more latency"
    assert np.all(np.diff(found[:, 1]) < 0), "for a flatter slope"
