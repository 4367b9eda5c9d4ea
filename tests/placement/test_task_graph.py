"""What passes between parts: regions, copies, reductions and connections."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.errors import PlacementError
from shardplan.mesh import Cluster
from shardplan.placement.configurations import Configuration, degrees_of, groups_of, random_configuration
from shardplan.placement.device_topology import machine_of
from shardplan.placement.group_reductions import GroupPrices, members_of
from shardplan.placement.operators import Edge, Weight
from shardplan.placement.placement_problem import problem_of
from shardplan.placement.shared_regions import shared_bytes
from shardplan.placement.synchronisation import sync_groups
from shardplan.placement.tensor_transfers import backward_transfers, forward_transfers
from tests.placement.problems import problem

FOUR = machine_of(Cluster.load("flexflow-k80:1"))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_part_fetches_all_that_it_reads_once(seed: int) -> None:
    here, draw = problem("gpt", "2x2"), np.random.default_rng(seed)
    edge = here.graph.edges[int(draw.integers(len(here.graph.edges)))]
    made, read = (random_configuration(here.graph.operators[i], (2, 2), draw) for i in (edge.producer, edge.consumer))
    sent = forward_transfers(edge, made, read, here.machine)
    nbytes = shared_bytes(edge, made.degrees, read.degrees)
    whole = math.prod(edge.shape) * edge.itemsize
    cut = math.prod(read.degrees[n] for n in edge.read if n >= 0)
    fetched = np.bincount(sent.target, nbytes[sent.source, sent.target], len(read.devices))
    np.testing.assert_array_equal(fetched, whole // cut)
    one_device = np.array(made.devices)[sent.source] == np.array(read.devices)[sent.target]
    np.testing.assert_array_equal(one_device, sent.message < 0)


def test_a_copy_on_the_same_device_is_not_sent() -> None:
    """The producer is cut over a loop that does not split the tensor: devices 0 and 2 hold the same half of it."""
    edge = Edge(0, 1, (8,), 4, (1,), (0,), gradient=True)
    made = Configuration((2, 2), (0, 1, 2, 3))
    sent = forward_transfers(edge, made, Configuration((2,), (2, 0)), FOUR)
    assert [(int(p), int(c), int(m)) for p, c, m in zip(sent.source, sent.target, sent.message, strict=True)] == [
        (1, 1, 0),
        (2, 0, -1),
    ]
    back = backward_transfers(edge, made, Configuration((2,), (2, 0)), FOUR)
    assert len(back.source) == 4  # every copy needs the gradient of its half
    assert (back.message < 0).sum() == 1


def test_devices_that_hold_a_shard_of_a_weight_reduce_its_gradient() -> None:
    weight = Weight("w", (8, 6), 4, (0, 1), ((-1, 1), (-1, 1)))
    same = Configuration((2, 2), (0, 1, 2, 3))
    assert sync_groups(weight, [same, same]) == ((0b0101, 96), (0b1010, 96))
    alone = Configuration((1, 1), (3,))
    assert sync_groups(weight, [alone, alone]) == ()
    # the other reader has the whole weight on device 3: three devices hold the first half, two the second
    assert sync_groups(weight, [same, alone]) == ((0b1010, 96), (0b1101, 96))


def test_cells_of_uneven_cuts_are_as_fine_as_both() -> None:
    weight = Weight("w", (6,), 4, (0, 1), ((0,), (0,)))
    groups = sync_groups(weight, [Configuration((2,), (0, 1)), Configuration((3,), (0, 1, 2))])
    assert groups == ((0b011, 4), (0b110, 8))  # of six cells of 4 bytes, one lies on devices 0 and 1, two on 1 and 2


def test_connections_are_those_of_the_levels() -> None:
    """FlexFlow, Figure 5b: adjacent GPUs have a switch of their own, all others share a medium."""
    link = FOUR.link
    assert link[0, 1] != link[1, 0]
    assert link[0, 2] == link[0, 3] == link[1, 2] == link[2, 0]
    assert FOUR.latency_s[0, 1] < FOUR.latency_s[0, 2]
    assert (np.diagonal(link) == -1).all()


def test_a_group_that_follows_the_levels_has_the_best_program() -> None:
    prices = GroupPrices(machine_of(Cluster.load("flexflow-p100:4")))
    one, several = 0b1111, sum(1 << d for d in range(16))
    assert 0 < prices.seconds(one, 1 << 20) < prices.seconds(several, 1 << 20)
    odd = 0b10011
    assert prices.seconds(odd, 1 << 20) > 0
    assert members_of(odd) == [0, 1, 4]
    assert len(prices.links(one)) == 4  # the ports of four GPUs
    assert len(prices.links(several)) == 4  # the ports of four nodes


def test_groups_that_follow_the_levels_take_all_some_or_one_of_each() -> None:
    assert groups_of((2, 2), 2) == ((0, 1), (2, 3), (0, 2), (1, 3))
    assert set(map(len, groups_of((4, 4), 8))) == {8}


def test_degrees_divide_and_fit_the_devices() -> None:
    here = problem("gpt", "2x2")
    for operator in here.graph.operators:
        for degrees in degrees_of(operator, 4):
            assert math.prod(degrees) <= 4
            assert all(loop.extent % k == 0 for loop, k in zip(operator.loops, degrees, strict=True))


def test_slower_devices_take_longer() -> None:
    here = problem("mlp", "2x2")
    slow = machine_of(here.machine.cluster, np.array([1.0, 1.0, 0.5, 1.0]))
    whole = tuple(Configuration((1,) * len(o.loops), (2,)) for o in here.graph.operators)
    fast, slower = here.simulation(), type(here)(here.graph, slow, here.tables).simulation()
    assert slower.full(whole) == pytest.approx(2 * fast.full(whole), rel=1e-6)
    for wrong, message in (
        ([1.0, 0.0, 1.0, 1.0], r"speed\[1\] is 0: give a finite number above 0"),
        ([1.0, 1.0, np.inf, 1.0], r"speed\[2\] is inf: give a finite number above 0"),
        ([1.0] * 3, r"speed=\[1.0, 1.0, 1.0\]: give 4 numbers"),
        ([1, 1, 1, 10**400], "give 4 numbers"),
        ("fast", "speed='fast': give 4 numbers"),
    ):
        with pytest.raises(PlacementError, match=message):
            machine_of(here.machine.cluster, wrong)  # type: ignore[arg-type]


def test_a_device_or_connection_whose_time_cannot_be_counted_is_refused() -> None:
    here = problem("mlp", "2x2")
    with pytest.raises(PlacementError, match="device 2 has the speed 1e-15, so slow that the time of a step cannot be counted"):
        problem_of(here.graph, machine_of(here.machine.cluster, [1, 1, 1e-15, 1]))
    slow = replace(here.machine, bytes_per_s=here.machine.bytes_per_s * 1e-20)
    with pytest.raises(PlacementError, match=r"a connection of 2x2 has .* bytes per second, so few that"):
        problem_of(here.graph, slow)
    problem_of(here.graph, machine_of(here.machine.cluster, [1, 1, 1e-6, 1]))
