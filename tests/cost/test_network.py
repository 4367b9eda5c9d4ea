"""Prices of collectives follow the links that they use."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.cost import Network, wire_bytes
from shardplan.cost.network import _all_to_all, binary_tree, binomial_rounds
from shardplan.errors import ClusterError
from shardplan.ir import Collective
from shardplan.mesh import Cluster, Interconnect, Level, factors
from shardplan.mesh.machine import LinkKind
from tests.machines import launchless

DEVICE = launchless(Cluster.load("8")).device
KINDS = (
    Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER, Collective.ALL_TO_ALL,
    Collective.PERMUTE, Collective.SHIFT, Collective.REDUCE, Collective.BROADCAST,
)  # fmt: skip
# two nodes of four, a byte per second out of a node and four into a GPU: slopes can be counted by hand
SLOW = Cluster("slow", (Level("node", 2, 1.0, 10.0), Level("gpu", 4, 4.0, 1.0)), DEVICE)


def network(cluster: Cluster, splits: dict[str, tuple[int, ...]] | None = None) -> Network:
    return Network(cluster, factors(cluster, splits))


@st.composite
def networks(draw: st.DrawFn) -> Network:
    levels: list[Level] = []
    splits: dict[str, tuple[int, ...]] = {}
    for i in range(draw(st.integers(1, 3))):
        parts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
        kind: LinkKind = draw(st.sampled_from(["switch", "switch", "ring", "bus"]))
        also = (
            Interconnect("also", min(2, math.prod(parts)), draw(st.floats(1, 9)), 0.5)
            if kind == "ring" and draw(st.booleans())
            else None
        )
        rails = draw(st.integers(1, 3)) if kind == "switch" else 1
        level = Level(f"l{i}", math.prod(parts), draw(st.floats(1.0, 9.0)), draw(st.floats(0, 3)), kind, rails, also=also)
        levels.append(level)
        splits[f"l{i}"] = tuple(parts)
    return network(Cluster("drawn", tuple(levels), DEVICE), splits)


def named(kind: Collective, over: tuple[int, ...]) -> tuple[int, ...]:
    """The factors of a collective; of a permute, to the reversed order."""
    return (*over, *reversed(over)) if kind == Collective.PERMUTE else over


def test_lines_counted_by_hand():
    net = network(SLOW)
    # a ring of 8 sends 2 * 7/8 out of each node; its way around is 6 local and 2 remote hops
    assert net.lines(Collective.ALL_REDUCE, (0, 1), algorithm="ring").tolist() == [[7 / 4 * 26, 7 / 4]]
    # four groups of two leave each node together
    assert net.lines(Collective.ALL_REDUCE, (0,), algorithm="ring").tolist() == [[20.0, 4.0]]
    assert net.lines(Collective.REDUCE_SCATTER, (1,)).tolist() == [[3.0, 3 / 4 / 4]]
    assert net.lines(Collective.ALL_GATHER, (0, 1)).tolist() == [[7 / 8 * 26, 7 / 8]]
    # each of four devices sends half of its bytes across
    assert net.lines(Collective.ALL_TO_ALL, (0, 1)).tolist() == [[10.0 + 6, 2.0]]
    # places 1 and 3 of node 0 move to node 1, and as many back; the others stay in their node
    assert net.lines(Collective.PERMUTE, (0, 1, 1, 0)).tolist() == [[10.0, 2.0]]
    assert net.lines(Collective.SHIFT, (1,)).tolist() == [[1.0, 1 / 4]]
    # by rows one block crosses, by columns every second device sends to the other node, and as many come back
    assert net.lines(Collective.SHIFT, (0, 1)).tolist() == [[10.0, 1.0]]
    assert net.lines(Collective.SHIFT, (1, 0)).tolist() == [[10.0, 4.0]]
    # two nodes in a double tree: all bytes each way over the NIC once; chains of three hops inside
    # and both on the one connection between the nodes, of which a tree reaches 0.65
    assert net.lines(Collective.ALL_REDUCE, (0, 1), algorithm="tree").tolist() == [[2 * (3 + 10), 1 / 0.65]]


def test_every_instruction_costs_a_launch():
    """One for each collective; of what is emitted among masters or to a root, one for each permute."""
    launched = replace(SLOW, device=replace(DEVICE, collective_launch_s=100.0))
    bare, net = network(SLOW), network(launched)
    for kind in KINDS:
        over = named(kind, (0, 1))
        assert (net.lines(kind, over) - bare.lines(kind, over)).tolist() == [[100.0, 0.0]] * len(net.lines(kind, over))
    counts: tuple[tuple[Collective, tuple[int, ...], int], ...] = (
        (Collective.REDUCE, (), 3), (Collective.BROADCAST, (), 3), (Collective.ALL_REDUCE, (), 1), (Collective.ALL_GATHER, (), 1),
        (Collective.ALL_REDUCE, (0,), 2 * 3), (Collective.REDUCE_SCATTER, (0,), 3), (Collective.ALL_GATHER, (0,), 3),
        (Collective.REDUCE, (0,), 2),
    )  # fmt: skip
    for kind, first, count in counts:
        over = (1,) if first else (0, 1)
        a, b = (n.lines(kind, over, first=first, algorithm="emitted") for n in (bare, net))
        assert (b - a).tolist() == [[100.0 * count, 0.0]] * len(a), (kind, first)


def test_a_file_without_the_launch_of_a_collective_gets_that_of_a_kernel():
    silent = replace(SLOW, device=replace(DEVICE, launch_s=0.5, collective_launch_s=None))
    assert network(silent).lines(Collective.SHIFT, (1,)).tolist() == [[1.5, 1 / 4]]
    assert Cluster.from_toml(silent.to_toml()).device == silent.device


def test_strided_groups_share_the_link_of_their_node():
    net = network(SLOW, {"gpu": (2, 2)})
    whole, half, one = (net.lines(Collective.ALL_REDUCE, over, algorithm="ring")[0, 1] for over in ((0, 1, 2), (0, 2), (0,)))
    assert half == pytest.approx(2 * (3 / 4) * 2)  # two groups a node
    assert (whole, one) == (7 / 4, 4.0)
    masters = net.lines(Collective.ALL_REDUCE, (0,), first=(1, 2), algorithm="ring")[0, 1]
    assert masters == 1.0  # one group alone


@given(networks(), st.data())
def test_halving_every_bandwidth_doubles_slopes_and_leaves_latencies(net: Network, data: st.DataObject):
    over = tuple(sorted(data.draw(st.sets(st.integers(0, max(0, len(net.factors) - 1)))))) if net.factors else ()
    levels = [
        replace(
            level,
            bandwidth_bytes_per_s=level.bandwidth_bytes_per_s / 2,
            also=replace(level.also, bandwidth_bytes_per_s=level.also.bandwidth_bytes_per_s / 2) if level.also else None,
        )
        for level in net.cluster.levels
    ]
    slower = Network(replace(net.cluster, levels=tuple(levels)), net.factors)
    for kind in KINDS:
        a, b = net.lines(kind, named(kind, over)), slower.lines(kind, named(kind, over))
        assert np.allclose(b[:, 1], 2 * a[:, 1], rtol=1e-12)
        assert np.array_equal(a[:, 0], b[:, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_slope_scales_exactly_with_the_level_that_limits_it(kind: Collective):
    faster = replace(SLOW, levels=(replace(SLOW.levels[0], bandwidth_bytes_per_s=2.0), SLOW.levels[1]))
    for over in ((0,), (0, 1)):
        a, b = (network(c).lines(kind, named(kind, over)) for c in (SLOW, faster))
        assert a[:, 1].tolist() == (2 * b[:, 1]).tolist()
    assert network(SLOW).lines(kind, named(kind, (1,))).tolist() == network(faster).lines(kind, named(kind, (1,))).tolist()


@given(networks())
def test_groups_partition_the_devices(net: Network):
    for r in range(len(net.factors) + 1):
        for over in itertools.combinations(range(len(net.factors)), r):
            groups = net.groups(over)
            assert sorted(groups.ravel().tolist()) == list(range(net.cluster.size))
            assert groups.shape[1] == math.prod(net.factors[i].size for i in over)
            assert np.all(np.diff(groups, axis=1) > 0)


@given(networks())
def test_groups_of_one_device_cost_nothing(net: Network):
    for kind in KINDS:
        assert net.lines(kind, ()).tolist() == [[0.0, 0.0]]
        assert net.seconds(kind, (), [1.0, 1e9]).tolist() == [0.0, 0.0]


@given(networks())
def test_an_all_to_all_without_its_messages_is_the_same(net: Network):
    over = tuple(range(len(net.factors)))
    for part in (over, over[1:], over[:-1]):
        members = net.groups(part)
        if members.shape[1] < 2 or any(level.kind == "ring" for level in net.cluster.levels):
            continue
        (whole,) = _all_to_all(net, Collective.ALL_TO_ALL, members, part)
        line = net.lines(Collective.ALL_TO_ALL, part)[0]
        assert line == pytest.approx([whole.latency_s, net._slope(whole, part, tree=False)], rel=1e-9)


def test_one_device_drives_one_rail():
    railed = replace(SLOW, levels=(replace(SLOW.levels[0], rails=4), SLOW.levels[1]))
    a, b = network(SLOW), network(railed)
    assert a.lines(Collective.ALL_REDUCE, (0, 1)).tolist() == b.lines(Collective.ALL_REDUCE, (0, 1)).tolist()  # all four drive
    # four groups, a rail each: for rings that is as good as a quarter of the link, a tree does not fill a rail alone
    assert a.lines(Collective.ALL_REDUCE, (0,))[0].tolist() == b.lines(Collective.ALL_REDUCE, (0,))[0].tolist()
    assert a.lines(Collective.ALL_REDUCE, (0,))[1, 1] == pytest.approx(0.65 * b.lines(Collective.ALL_REDUCE, (0,))[1, 1])
    masters = b.lines(Collective.ALL_REDUCE, (0,), first=(1,), algorithm="ring")[0, 1]
    assert masters == 4 * a.lines(Collective.ALL_REDUCE, (0,), first=(1,), algorithm="ring")[0, 1]


def test_a_ring_of_links_is_shared_by_strided_groups():
    ring = Cluster("ring", (Level("gpu", 8, 1.0, 1.0, "ring"),), DEVICE)
    net = network(ring, {"gpu": (4, 2)})
    assert net.lines(Collective.ALL_GATHER, (0, 1))[0, 1] == 7 / 8
    assert net.lines(Collective.ALL_GATHER, (0,))[0, 1] == 2 * 3 / 4  # two groups of stride two on the same links


def test_trees_suit_small_messages_and_rings_large_ones():
    net = network(Cluster.load("dgx-h100:16"))
    ring, tree = (net.seconds(Collective.ALL_REDUCE, (0, 1), [8.0, 1e10], algorithm=a) for a in ("ring", "tree"))
    assert tree[0] < ring[0]
    assert ring[1] < tree[1]
    assert net.seconds(Collective.ALL_REDUCE, (0, 1), [8.0, 1e10]).tolist() == [tree[0], ring[1]]


def test_seconds_keep_the_shape_of_the_bytes():
    net = network(SLOW)
    assert net.seconds(Collective.ALL_REDUCE, (0,), np.ones((3, 2))).shape == (3, 2)
    assert net.seconds(Collective.ALL_REDUCE, (0,), 1.0).shape == ()


def test_the_order_of_the_factors_does_not_matter():
    net = network(SLOW, {"gpu": (2, 2)})
    assert net.lines(Collective.ALL_REDUCE, (2, 0)).tolist() == net.lines(Collective.ALL_REDUCE, (0, 2)).tolist()


@pytest.mark.parametrize("n", range(1, 40))
def test_both_binary_trees_span_and_share_the_inner_work(n: int):
    parents = binary_tree(n)
    assert parents[0] == -1
    for rank in range(1, n):
        at, steps = rank, 0
        while at:
            at, steps = parents[at], steps + 1
        assert steps <= max(1, math.ceil(math.log2(n)))
    assert max((parents.count(r) for r in range(n)), default=0) <= 2


@pytest.mark.parametrize("n", range(1, 20))
def test_binomial_rounds_reach_everyone_once(n: int):
    have = {0}
    for parents, children in reversed(binomial_rounds(n)):
        assert set(parents) <= have
        assert not set(children) & have
        have |= set(children)
    assert have == set(range(n))
    assert len(binomial_rounds(n)) == (math.ceil(math.log2(n)) if n > 1 else 0)


def test_wire_bytes_follow_the_ring():
    assert [wire_bytes(k, 8, 80.0) for k in KINDS] == [140.0, 70.0, 70.0, 70.0, 80.0, 80.0, 70.0, 70.0]
    assert [wire_bytes(k, 1, 80.0) for k in KINDS] == [0.0] * len(KINDS)


def test_factors_of_another_cluster_are_refused():
    with pytest.raises(ClusterError, match="make 8 devices, '4x8' has 32"):
        Network(Cluster.load("4x8"), factors(SLOW))


@given(networks(), st.data())
def test_the_groups_of_some_factors_cost_what_the_factors_do(net: Network, data: st.DataObject):
    over = tuple(data.draw(st.permutations([i for i in range(len(net.factors)) if data.draw(st.booleans())])))
    nbytes = data.draw(st.floats(1.0, 1e9))
    levels = frozenset(net.factors[i].level for i in over if net.factors[i].size > 1)
    groups = net.groups(over)
    inside = sorted(over)
    grid = groups.reshape(len(groups), *(net.factors[i].size for i in inside))
    placed = grid.transpose(0, *(1 + inside.index(i) for i in over)).reshape(groups.shape)
    shifted = np.stack([placed[:, :-1].ravel(), placed[:, 1:].ravel()], axis=1)
    for kind in KINDS:
        if kind != Collective.PERMUTE:
            rows = shifted if kind == Collective.SHIFT else placed  # the members of a group in any order
            seconds, crossed = net.among(kind, [[int(device) for device in row] for row in rows], nbytes)
            assert seconds == pytest.approx(float(net.seconds(kind, over, nbytes)), rel=1e-12)
            assert crossed == levels
    moved = np.stack([groups.ravel(), placed.ravel()], axis=1)
    seconds, crossed = net.among(Collective.PERMUTE, moved.tolist(), nbytes)
    assert seconds == 0.0 if np.array_equal(groups, placed) else seconds > 0
    assert crossed <= levels
    if crossed == levels:  # else it changes no place along some factor, which `over` need not have named
        assert seconds == pytest.approx(float(net.seconds(Collective.PERMUTE, (*inside, *over), nbytes)), rel=1e-12)


def test_one_group_alone_reaches_no_more_than_its_connection() -> None:
    capped = replace(SLOW, levels=(replace(SLOW.levels[0], connection_bytes_per_s=0.5), SLOW.levels[1]))
    free, net = network(SLOW), network(capped)
    # a ring of all devices has one connection each way; four rings of two share the link, a quarter each
    assert (
        net.lines(Collective.ALL_REDUCE, (0, 1), algorithm="ring")[0, 1]
        == 2 * free.lines(Collective.ALL_REDUCE, (0, 1), algorithm="ring")[0, 1]
    )
    assert (
        net.lines(Collective.ALL_REDUCE, (0,), algorithm="ring").tolist()
        == free.lines(Collective.ALL_REDUCE, (0,), algorithm="ring").tolist()
    )
    assert (
        net.lines(Collective.ALL_REDUCE, (1,), algorithm="ring").tolist()
        == free.lines(Collective.ALL_REDUCE, (1,), algorithm="ring").tolist()
    )


def test_a_second_interconnect_reaches_the_bandwidth_that_it_states() -> None:
    v100 = Cluster.load("gcp-v100:4")
    slower = replace(v100, levels=(v100.levels[0], replace(v100.levels[1], ring_efficiency=0.5)))
    closing = [replace(f, size=4) if f.level else f for f in factors(v100)]
    closing.append(replace(closing[-1], name="rest", size=2, stride=4))
    closing[1], closing[2] = closing[2], closing[1]
    ring = [Network(c, tuple(closing)).lines(Collective.ALL_REDUCE, (2,), algorithm="ring")[0, 1] for c in (v100, slower)]
    assert ring[0] == ring[1] == pytest.approx(2 * 3 / 4 / 10.9e9)


@given(networks(), st.data())
def test_groups_cost_the_same_whatever_the_factors_of_the_network_are(net: Network, data: st.DataObject):
    over = tuple(i for i in range(len(net.factors)) if data.draw(st.booleans()))
    whole = Network(net.cluster, factors(net.cluster))
    nbytes = data.draw(st.floats(1.0, 1e9))
    for kind in KINDS:
        if kind not in (Collective.PERMUTE, Collective.SHIFT):
            groups = [[int(device) for device in row] for row in net.groups(over)]
            assert whole.among(kind, groups, nbytes)[0] == pytest.approx(float(net.seconds(kind, over, nbytes)), rel=1e-12)


def test_one_permuting_device_drives_one_rail() -> None:
    net = network(Cluster.load("2x8"))
    rail = net.cluster.levels[0].bandwidth_bytes_per_s * net.cluster.levels[0].ring_efficiency / net.cluster.levels[0].rails
    assert net.lines(Collective.SHIFT, (0, 1))[0, 1] == pytest.approx(1 / rail)  # one device of each node sends to the next
    assert net.among(Collective.PERMUTE, [(7, 8)], 1e9)[0] == pytest.approx(1e9 / rail, rel=1e-3)
    assert net.lines(Collective.PERMUTE, (0, 1, 1, 0))[0, 1] > 0


def test_an_all_to_all_over_a_part_of_a_node_pays_for_what_leaves_it() -> None:
    net = network(Cluster.load("2x8"))
    cut = network(net.cluster, {"gpu": (4, 2)})
    groups = cut.groups((0, 1)).tolist()
    assert net.among(Collective.ALL_TO_ALL, groups, 64e6)[0] == pytest.approx(
        float(cut.seconds(Collective.ALL_TO_ALL, (0, 1), 64e6))
    )
    ports = net.cluster.levels[0]
    half = 64e6 * 8 * 0.5 / (ports.bandwidth_bytes_per_s * ports.ring_efficiency)
    assert net.among(Collective.ALL_TO_ALL, groups, 64e6)[0] == pytest.approx(half, rel=0.05)
