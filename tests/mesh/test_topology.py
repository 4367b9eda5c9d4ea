"""Routes are paths of the networkx graph, and share the links that they say."""

from __future__ import annotations

import itertools

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.mesh import Cluster, Interconnect, Level
from shardplan.mesh.machine import LinkKind
from shardplan.mesh.topology import Topology, counts, graph

DEVICE = Cluster.load("8").device
RING = Cluster("ring", (Level("node", 2, 10.0, 2.0), Level("gpu", 6, 100.0, 1.0, "ring")), DEVICE)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    levels: list[Level] = []
    for i in range(draw(st.integers(1, 3))):
        kind: LinkKind = draw(st.sampled_from(["switch", "ring", "bus"]))
        size = draw(st.integers(1, 5))
        also = Interconnect(f"also{i}", draw(st.integers(1, size)), 3.0, 0.5) if kind == "ring" and draw(st.booleans()) else None
        levels.append(Level(f"l{i}", size, 10.0 + i, 1.0, kind, also=also))
    return Cluster("c", tuple(levels), DEVICE)


@given(clusters())
def test_links_and_places_are_counted_without_making_them(cluster: Cluster):
    found = counts(cluster)
    assert found.links == len(Topology(cluster).bandwidth)
    assert found.places == graph(cluster).number_of_nodes()


@given(clusters(), st.data())
def test_a_route_is_a_path_of_the_graph(cluster: Cluster, data: st.DataObject):
    topology, net = Topology(cluster), graph(cluster)
    last = cluster.level_names[-1]
    a, b = data.draw(st.integers(0, cluster.size - 1)), data.draw(st.integers(0, cluster.size - 1))
    _, links = topology.routes(np.array([a]), np.array([b]))
    assert len(set(links.tolist())) == len(links)
    taken = {int(link) for link in links}
    allowed = nx.DiGraph()
    allowed.add_nodes_from(net)
    for u, v, link in net.edges(data="link"):
        if link is None or link in taken:
            allowed.add_edge(u, v, link=link)
    path = nx.shortest_path(allowed, f"{last}:{a}", f"{last}:{b}")
    # no link of the route is beside the path, unless two parallel ways of a tiny ring join the same pair
    used = {allowed.edges[u, v]["link"] for u, v in itertools.pairwise(path)} - {None}
    assert used <= taken


def test_every_link_of_the_graph_has_its_bandwidth():
    for spec in ("gcp-v100:2", "cpu:2", "dgx-h100:2", "flexflow-k80:2"):
        cluster = Cluster.load(spec)
        topology = Topology(cluster)
        seen: dict[int, float] = {}
        for _, _, data in graph(cluster).edges(data=True):
            if "link" in data:
                seen[data["link"]] = data["bandwidth_bytes_per_s"]
        assert seen == {i: float(topology.bandwidth[i]) for i in range(len(topology.bandwidth))}


def test_a_message_goes_the_shorter_way_around_a_ring():
    topology = Topology(RING)
    loads = topology.loads(np.array([0, 0, 6]), np.array([2, 5, 9]), np.array([1.0, 10.0, 100.0]))
    ring = topology.tiers[1]
    assert ring.clockwise is not None
    assert ring.counter is not None
    forward = loads[ring.clockwise : ring.clockwise + 12]
    assert forward.tolist() == [1, 1, 0, 0, 0, 0, 100, 100, 100, 0, 0, 0]
    assert loads[ring.counter : ring.counter + 12].tolist() == [10] + [0] * 11
    assert topology.latencies(np.array([0, 0, 6, 0]), np.array([2, 5, 9, 7])).tolist() == [2.0, 1.0, 3.0, 2.0]


def test_v100_neighbours_use_nvlink_and_others_pcie():
    cluster = Cluster.load("gcp-v100:2")
    topology = Topology(cluster)
    tier = topology.tiers[1]
    assert tier.up is not None
    near = topology.routes(np.array([3]), np.array([4]))[1]
    assert near.tolist() == [(tier.clockwise or 0) + 3]
    far = topology.routes(np.array([3]), np.array([5]))[1]
    assert far.tolist() == [tier.up, (tier.down or 0) + 1]  # from the first CPU's PCIe switch to the second's
    away = topology.loads(np.array([3, 2]), np.array([8, 9]), np.array([1.0, 1.0]))
    assert away[tier.up] == 2.0  # both leave through the same PCIe switch
    assert away[topology.tiers[0].up or 0] == 2.0


def test_messages_that_stay_below_a_level_do_not_touch_it():
    topology = Topology(Cluster.load("2x4"))
    _, links = topology.routes(np.arange(8), np.array([1, 2, 3, 0, 5, 6, 7, 4]))
    assert set(topology.link_level[links].tolist()) == {1}
    assert topology.meeting_level(np.array([0, 0, 0]), np.array([0, 1, 4])).tolist() == [2, 1, 0]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_rings_of_any_size_close(size: int):
    cluster = Cluster("r", (Level("gpu", size, 1.0, 0.0, "ring"),), DEVICE)
    topology = Topology(cluster)
    following = (np.arange(size) + 1) % size
    loads = topology.loads(np.arange(size), following, np.ones(size))
    assert loads.max(initial=0.0) <= 1.0
    assert loads.sum() == (size if size > 1 else 0)
