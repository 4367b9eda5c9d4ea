"""A mesh of the user's own: its names, its devices, and the figures that it is priced by."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.mesh.detect import machine
from shardplan.shell.clusters import like_machine, resolve_cluster


def test_a_mesh_of_ones_own_keeps_its_names_and_devices(devices: list[Any]) -> None:
    mesh = Mesh(np.array(devices[::-1]).reshape(2, 4), ("rows", "columns"), axis_types=(AxisType.Explicit,) * 2)
    plan = shardplan.plan(lambda x: x @ x, jax.ShapeDtypeStruct((8, 8), jnp.float32), cluster=mesh)
    assert list(plan.axes) == ["rows", "columns"]
    assert plan.mesh().axis_names == ("rows", "columns")
    assert plan.mesh().devices.tolist() == mesh.devices.tolist()
    assert plan.mesh().axis_types == (AxisType.Auto,) * 2


def test_simulated_devices_are_priced_as_h100s_and_say_so(devices: list[Any]) -> None:
    cluster, _ = resolve_cluster(Mesh(np.array(devices).reshape(2, 4), ("rows", "columns")))
    like = shardplan.Cluster.load("2x4")
    assert cluster.name == "mesh, priced as H100s"
    assert cluster.device == like.device
    assert [x.bandwidth_bytes_per_s for x in cluster.levels] == [x.bandwidth_bytes_per_s for x in like.levels]


def test_gpus_are_priced_as_what_they_are_axis_by_axis() -> None:
    seats = [(0, process) for process in range(2) for _ in range(8)]
    found = machine("gpu", "NVIDIA A100-SXM4-40GB", seats).cluster
    node, gpu = found.levels
    cluster = like_machine(found, np.arange(16).reshape(2, 4, 2), ("data", "fsdp", "model"))
    assert cluster.device == found.device
    assert cluster.shape == (2, 4, 2)
    assert cluster.level_names == ("data", "fsdp", "model")
    links = [node.bandwidth_bytes_per_s, gpu.bandwidth_bytes_per_s, gpu.bandwidth_bytes_per_s]
    assert [x.bandwidth_bytes_per_s for x in cluster.levels] == links
    wide = like_machine(found, np.arange(16), ("all",))
    assert [x.bandwidth_bytes_per_s for x in wide.levels] == [node.bandwidth_bytes_per_s], "it crosses the nodes"


@pytest.mark.parametrize(
    "order", [np.arange(16).reshape(2, 8).T, np.arange(16)[::-1].reshape(2, 8)], ids=["fast first", "reversed"]
)
def test_a_mesh_across_the_levels_is_refused(order: Any) -> None:
    found = machine("gpu", "NVIDIA A100-SXM4-40GB", [(0, process) for process in range(2) for _ in range(8)]).cluster
    with pytest.raises(shardplan.ClusterError):
        like_machine(found, order, ("a", "b"))


def test_an_axis_of_one_device_may_be_pinned(devices: list[Any]) -> None:
    """Its name is kept, though nothing is cut over it."""
    mesh = Mesh(np.array(devices).reshape(1, 8), ("dp", "tp"))
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    for pin, kept in ((P("dp", "tp"), P(None, "tp")), (P(("dp", "tp")), P("tp")), (P("dp"), P())):
        plan = shardplan.plan(lambda w: w * 2, x, cluster=mesh, pins={"w": pin})
        assert plan.in_specs[0] == kept
        assert plan.mesh().axis_names == ("dp", "tp")


@pytest.mark.parametrize("name", ["root", "a b"])
def test_an_axis_that_no_program_could_name_is_refused(devices: list[Any], name: str) -> None:
    with pytest.raises(shardplan.ClusterError, match=f"level '{name}': name: must be letters.*got '{name}': rename it"):
        resolve_cluster(Mesh(np.array(devices).reshape(2, 4), (name, "model")))
