"""The time of a step in which communication hides: two streams that slow each other, and what may run beside what."""

from __future__ import annotations

import math

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.cost.overlap import Concurrency, Weights, step_s, weights_at

SECONDS = st.floats(0, 10)
CONTENTION = st.floats(1, 2)


def two_streams(compute_s: float, exposed_s: float, hideable_s: float, contention: float) -> float:
    """The step event by event: both streams run at 1 / contention until one is done, then the other at full speed."""
    clock, left = exposed_s, [compute_s, hideable_s]
    while any(left):
        rate = 1 / contention if all(left) else 1.0
        until = min(x for x in left if x) / rate
        clock += until
        left = [0.0 if not x or x / rate <= until else x - rate * until for x in left]
    return clock


@given(SECONDS, SECONDS, SECONDS, CONTENTION)
def test_a_step_saves_half_of_what_two_streams_save(
    compute_s: float, exposed_s: float, hideable_s: float, contention: float
) -> None:
    serial_s = compute_s + exposed_s + hideable_s
    expected = (two_streams(compute_s, exposed_s, hideable_s, contention) + serial_s) / 2
    assert step_s(compute_s, exposed_s, hideable_s, contention) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(SECONDS, SECONDS, SECONDS, CONTENTION, st.floats(0, 1))
def test_every_weighted_sum_is_a_lower_bound(
    compute_s: float, exposed_s: float, hideable_s: float, contention: float, share: float
) -> None:
    weights = weights_at(share, contention)
    least = 0.02 * max(compute_s, hideable_s)  # no weight is below 0.02
    bound = exposed_s + weights.compute * compute_s + weights.hideable * hideable_s
    assert bound <= step_s(compute_s, exposed_s, hideable_s, contention) * (1 + 1e-9) + least


@given(SECONDS, SECONDS, SECONDS)
def test_one_of_the_two_ends_is_the_step(compute_s: float, exposed_s: float, hideable_s: float) -> None:
    ends = [weights_at(share, 1.3) for share in (0.0, 1.0)]
    costs = [exposed_s + w.compute * compute_s + w.hideable * hideable_s for w in ends]
    assert max(costs) == pytest.approx(step_s(compute_s, exposed_s, hideable_s, 1.3), rel=1e-9)


@given(SECONDS, SECONDS)
def test_beyond_a_contention_of_two_a_step_takes_turns(compute_s: float, hideable_s: float) -> None:
    """Two streams that slow each other more than twice would take longer than one after the other."""
    assert step_s(compute_s, 1.0, hideable_s, 3.0) == pytest.approx(1.0 + compute_s + hideable_s)
    assert two_streams(compute_s, 1.0, hideable_s, 3.0) >= step_s(compute_s, 1.0, hideable_s, 3.0) * (1 - 1e-9)


@given(st.lists(SECONDS, min_size=1, max_size=4), st.one_of(SECONDS, st.just(math.inf)), st.floats(0, 1))
def test_seconds_beyond_the_window_cost_as_exposed_ones(seconds: list[float], window_s: float, hideable: float) -> None:
    costs = Weights(1.0, hideable).of(np.array(seconds), window_s)
    expected = [hideable * s if s <= window_s else hideable * window_s + (s - window_s) for s in seconds]
    assert costs == pytest.approx(expected, rel=1e-9, abs=1e-12)


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[list[int]], list[float], list[bool]]:
    n = draw(st.integers(1, 24))
    waits_for = [sorted(draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else [] for i in range(n)]
    work = draw(st.lists(st.sampled_from([0.0, 1.0, 2.5, 4.0]), min_size=n, max_size=n))
    return waits_for, work, draw(st.lists(st.booleans(), min_size=n, max_size=n))


@given(programs(), st.data())
def test_a_window_is_what_neither_waits_nor_is_waited_for(
    program: tuple[list[list[int]], list[float], list[bool]], data: st.DataObject
) -> None:
    waits_for, work, heavy = program
    n = len(work)
    graph = nx.DiGraph()
    graph.add_nodes_from(range(n))
    graph.add_edges_from((j, i) for i, before in enumerate(waits_for) for j in before)
    makers = sorted(data.draw(st.sets(st.integers(0, n - 1), max_size=2)))
    after = [i for i in range(n) if i > max(makers, default=-1)]
    readers = sorted(data.draw(st.sets(st.sampled_from(after), max_size=2))) if after else []
    stages = [max((j for j in nx.ancestors(graph, i) if heavy[j]), default=-1) for i in makers]
    ends = [min((j for j in {i, *nx.descendants(graph, i)} if heavy[j]), default=n - 1) for i in readers]
    first, last = min(stages, default=-1) + 1, min(ends, default=n - 1)
    taken = {*makers, *readers}.union(*(nx.ancestors(graph, i) for i in makers), *(nx.descendants(graph, i) for i in readers))
    expected = sum(work[i] for i in range(first, max(last, *makers, -1) + 1) if i not in taken)
    assert Concurrency(waits_for, work, heavy).window(makers, readers) == pytest.approx(expected)


def test_a_gather_hides_behind_what_comes_before_its_reader() -> None:
    # three stages in a row, each reading a gathered weight: the third's gather hides behind the two before it
    concurrency = Concurrency([[], [0], [1]], [1.0, 2.0, 4.0], [True, True, True])
    assert [concurrency.window([], [i]) for i in range(3)] == [0.0, 1.0, 3.0]
    # an activation between two stages has nothing to hide behind
    assert concurrency.window([1], [2]) == 0.0
