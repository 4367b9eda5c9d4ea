"""Factors number the devices as the levels do, whole or split."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.errors import ClusterError
from shardplan.ir import Factor
from shardplan.mesh import Cluster, coordinates, factors
from shardplan.mesh.factoring import check_cover, device_order

shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@given(shapes)
def test_whole_levels_number_devices_in_row_major_order(shape: list[int]):
    cluster = Cluster.load("x".join(map(str, shape)))
    of = factors(cluster)
    check_cover(cluster, of)
    assert [f.size for f in of] == [n for n in shape if n > 1]
    expected = np.stack(np.unravel_index(np.arange(cluster.size), [n for n in shape if n > 1] or [1]), axis=1)
    assert np.array_equal(coordinates(cluster, of), expected[:, : len(of)])


def test_a_split_level_is_major_first():
    cluster = Cluster.load("2x8")
    of = factors(cluster, {"gpu": (2, 2, 2)})
    assert [(f.name, f.size, f.level, f.stride) for f in of] == [
        ("node", 2, 0, 1),
        ("gpu0", 2, 1, 4),
        ("gpu1", 2, 1, 2),
        ("gpu2", 2, 1, 1),
    ]
    assert coordinates(cluster, of)[0b1101].tolist() == [1, 1, 0, 1]


def test_parts_never_have_the_name_of_another_level():
    cluster = Cluster.load("2x2x8")
    names = ("gpu0", "gpu_1", "gpu")
    cluster = replace(cluster, levels=tuple(replace(level, name=n) for level, n in zip(cluster.levels, names, strict=True)))
    assert [f.name for f in factors(cluster, {"gpu": (4, 2)})] == ["gpu0", "gpu_1", "gpu__0", "gpu__1"]


def test_device_order_transposes_the_levels():
    cluster = Cluster.load("2x4")
    of = factors(cluster, {"gpu": (2, 2)})
    assert device_order(cluster, of, [(0,), (1, 2)]).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert device_order(cluster, of, [(1,), (2, 0)]).tolist() == [[0, 4, 1, 5], [2, 6, 3, 7]]
    assert device_order(cluster, tuple(reversed(of)), [(2,), (1, 0)]).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


@given(shapes, st.randoms(use_true_random=False))
def test_device_order_names_every_device_once(shape: list[int], random: object):
    cluster = Cluster.load("x".join(map(str, shape)))
    of = factors(cluster)
    order = device_order(cluster, of, [(i,) for i in reversed(range(len(of)))])
    assert sorted(order.ravel().tolist()) == list(range(math.prod(shape)))


def test_a_split_that_does_not_multiply_out_is_refused():
    with pytest.raises(ClusterError, match=r"the split 3 \* 2 of level 'gpu' makes 6, the level has 8"):
        factors(Cluster.load("2x8"), {"gpu": (3, 2)})
    with pytest.raises(ClusterError, match="no level 'rack'"):
        factors(Cluster.load("2x8"), {"rack": (3, 2)})


def test_factors_that_do_not_make_the_cluster_are_refused():
    cluster = Cluster.load("2x4")
    with pytest.raises(ClusterError, match=r"the factors node=2 make 2 devices, '2x4' has 8"):
        check_cover(cluster, factors(cluster)[:1])
    wrong = (Factor("a", 4, 0), Factor("b", 2, 1))
    with pytest.raises(ClusterError, match="a=4 make 4 of level 'node', which has 2"):
        check_cover(cluster, wrong)
    with pytest.raises(ClusterError, match="has stride 2, 1 is next"):
        check_cover(cluster, (Factor("a", 2, 0), Factor("b", 2, 1, 2), Factor("c", 2, 1, 2)))
