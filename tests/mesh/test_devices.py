"""Meshes carry the cluster's devices in its order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from jax.sharding import AxisType

from shardplan.errors import ClusterError, DeviceError
from shardplan.mesh import Cluster, factors
from shardplan.mesh.devices import build_mesh


def test_axes_are_groups_of_factors_in_device_order(devices: list[Any]):
    cluster = Cluster.load("2x4")
    of = factors(cluster, {"gpu": (2, 2)})
    mesh = build_mesh(cluster, of, {"model": (1,), "data": (0, 2)}, devices)
    assert mesh.axis_names == ("model", "data")
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    ids = np.vectorize(lambda d: d.id)(mesh.devices)
    assert ids.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_the_first_devices_are_used_where_there_are_more(devices: list[Any]):
    cluster = Cluster.load("2x2")
    mesh = build_mesh(cluster, factors(cluster), {"a": (0, 1)}, devices)
    assert [d.id for d in mesh.devices] == [0, 1, 2, 3]


def test_too_few_devices_are_refused_with_both_numbers(devices: list[Any]):
    cluster = Cluster.load("4x8")
    with pytest.raises(DeviceError, match="has 32 devices, and devices= gives 8: give 32 or more, or plan for a cluster of 8"):
        build_mesh(cluster, factors(cluster), {"a": (0,), "b": (1,)}, devices)
    with pytest.raises(DeviceError, match=r"has 32 devices, and devices= gives 0: give 32 or more$"):
        build_mesh(cluster, factors(cluster), {"a": (0,), "b": (1,)}, [])
    says = (
        r"has 32 devices, \d+ are present \(cpu\); to simulate them.*NUM_CPU_DEVICES=32.*`shardplan verify` simulates them itself"
    )
    with pytest.raises(DeviceError, match=says):
        build_mesh(cluster, factors(cluster), {"a": (0,), "b": (1,)})


def test_axes_that_name_a_factor_twice_or_not_at_all_are_refused(devices: list[Any]):
    cluster = Cluster.load("2x4")
    for axes in ({"a": (0,)}, {"a": (0, 1), "b": (1,)}):
        with pytest.raises(ClusterError, match="each of 0 to 1 belongs to exactly one axis"):
            build_mesh(cluster, factors(cluster), axes, devices)
