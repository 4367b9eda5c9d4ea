"""Copies beside collectives: which collectives find their blocks one behind another, and what the others cost."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.ir import Collective, Layout
from shardplan.mesh import Cluster
from shardplan.planning.scheduled import scheduled
from shardplan.schedule import Bundle, Move, instructions_of
from shardplan.schedule.copies import Copies
from shardplan.schedule.planned import PlannedProgram
from tests.machines import machine

CLUSTER = machine("4:slow")
SHAPE = (64, 32, 128)
SIZE = 4 * math.prod(SHAPE)


def program(step: Any, *args: Any, cluster: Cluster = CLUSTER) -> PlannedProgram:
    plan = shardplan.plan(step, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in args), cluster=cluster, factors={})
    return plan.planned


def filters_gradient(x: Any, g: Any) -> Any:
    def of(w: Any) -> Any:
        return jnp.vdot(convolved(x, w), g)

    return jax.grad(of)(jnp.zeros((1, 1, 64, 64)))


def convolved(x: Any, w: Any) -> Any:
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def multiplied(x: Any, w: Any) -> Any:
    return jnp.einsum("bhwi,xyio->bhwo", x, w)


def copied_s(planned: PlannedProgram, shape: tuple[int, ...], before: Layout, after: Layout) -> float:
    """The copies beside the one collective between two layouts of the step's first argument."""
    steps = planned.programs.between(shape, 4 * math.prod(shape), before, after)
    assert len(steps) == 1
    move = Move(0, 1, planned.graph.inputs[0], shape, before, after, steps, "")
    return Copies(planned).ordering_s(move, steps[0])


def seconds(*nbytes: float) -> float:
    """Each block is read and written by a kernel of its own."""
    device = CLUSTER.device
    return sum(device.launch_s + 2 * n / (device.memory_bytes_per_s * device.memory_efficiency) for n in nbytes)


def split(dim: int | None, rank: int = 3, partial: tuple[int, ...] = ()) -> Layout:
    return Layout(tuple((0,) if d == dim else () for d in range(rank)), partial)


@pytest.mark.parametrize(
    ("before", "after", "blocks"),
    [
        (split(0), split(None), ()),
        (split(1), split(None), (4,)),
        (split(2), split(None), (4,)),
        (split(None, partial=(0,)), split(0), ()),
        (split(None, partial=(0,)), split(2), (4,)),
        (split(None, partial=(0,)), split(None), ()),
        (split(0), split(1), (4,)),
        (split(2), split(0), (4,)),
        (split(1), split(2), (4, 4)),
    ],
)
def test_blocks_behind_other_dims_are_copied(before: Layout, after: Layout, blocks: tuple[int, ...]) -> None:
    planned = program(lambda x: x * 2, SHAPE)
    assert copied_s(planned, SHAPE, before, after) == pytest.approx(seconds(*(SIZE / ways for ways in blocks)))


def test_dims_of_one_element_lie_nowhere() -> None:
    """What comes before the dim that is split has one element, in all or in a device's block."""
    planned = program(lambda x: x * 2, (1, 32, 128))
    assert copied_s(planned, (1, 32, 128), split(1), split(None)) == 0
    planned = program(lambda x: x * 2, (4, 32, 128))
    assert copied_s(planned, (4, 32, 128), split(1), split(None)) > 0
    planned = program(lambda x: x * 2, (2, 32, 128), cluster=machine("2x2:slow"))
    nowhere = Layout(((0,), (1,), ())), Layout(((0,), (), ()))
    assert copied_s(planned, (2, 32, 128), *nowhere) == 0


def test_a_convolution_reads_gathered_images_in_one_order() -> None:
    """What it reads is copied as a whole; what a matrix product reads is not."""
    image, kernel = (4, 8, 8, 64), (1, 1, 64, 64)
    size = 4 * math.prod(image)
    gathered = [copied_s(program(step, image, kernel), image, split(3, 4), split(None, 4)) for step in (convolved, multiplied)]
    assert gathered == pytest.approx([seconds(size / 4, size), seconds(size / 4)])


def test_the_gradient_of_a_filter_reads_two_images() -> None:
    image = (4, 8, 8, 64)
    size = 4 * math.prod(image)
    planned = program(filters_gradient, image, image)
    steps = planned.programs.between(image, size, split(3, 4), split(None, 4))
    (gradient,) = (node for node in planned.graph.nodes if node.signature.filter == "result")
    for tensor in gradient.inputs:
        move = Move(0, 1, tensor, image, split(3, 4), split(None, 4), steps, "")
        assert Copies(planned).ordering_s(move, steps[0]) == pytest.approx(seconds(size / 4, size))


def test_a_plan_counts_the_copies_beside_its_collectives() -> None:
    """The same step and bytes, gathered along the first dim and along the second."""

    def step(x: Any, w: Any) -> Any:
        return x @ w

    args = jax.ShapeDtypeStruct((4096, 512), jnp.float32), jax.ShapeDtypeStruct((512, 512), jnp.float32)
    size, found = 4 * 512 * 512, []
    for spec in (P("gpu"), P(None, "gpu")):
        plan = shardplan.plan(step, *args, cluster=CLUSTER, pins={"x": P("gpu"), "w": spec}, factors={}, time_model="sum")
        (gather,) = scheduled(plan.session).issued
        assert (gather.step.kind, gather.step.nbytes) == ("all-gather", size)
        assert plan.communication_s == pytest.approx(gather.seconds)
        found.append(gather)
    assert [g.copied_s for g in found] == pytest.approx([0, seconds(size / 4)])
    assert found[1].seconds - found[0].seconds == pytest.approx(seconds(size / 4))


def test_one_kernel_packs_a_bundle_and_one_unpacks_each_member() -> None:
    weights = {f"w{n}": jax.ShapeDtypeStruct((256, 256), jnp.float32) for n in range(2)}

    def step(x: Any, ws: Any) -> Any:
        return x @ ws["w0"] + x @ ws["w1"]

    x = jax.ShapeDtypeStruct((2**17, 256), jnp.float32)
    slow = replace(CLUSTER, device=replace(CLUSTER.device, collective_launch_s=1e-2))
    plan = shardplan.plan(step, x, weights, cluster=slow, pins={"*": P("gpu")}, factors={}, time_model="sum")
    (bundle,) = (i for i in instructions_of(plan.schedule.body.instructions) if isinstance(i, Bundle))
    whole = 2 * 4 * 256 * 256
    assert Copies(plan.planned).packing_s(bundle) == pytest.approx(seconds(whole / 4, whole / 2, whole / 2))


@pytest.mark.parametrize(("kept", "unpacked"), [(False, 0), (True, 2)], ids=["the update reads it", "it is a result"])
def test_what_fused_kernels_read_is_not_unpacked(kept: bool, unpacked: int) -> None:
    """The reduced gradients travel together. The update reads each as a slice of the buffer; a result has memory of its own."""
    weights = {f"w{n}": jax.ShapeDtypeStruct((256, 256), jnp.float32) for n in range(2)}

    def step(x: Any, ws: Any) -> Any:
        grads = {"w0": x.T @ x, "w1": x.T @ jnp.tanh(x)}
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), grads if kept else None

    x = jax.ShapeDtypeStruct((2**17, 256), jnp.float32)
    slow = replace(CLUSTER, device=replace(CLUSTER.device, collective_launch_s=1e-2))
    pins = {"ws/*": P(), "x": P("gpu")}
    plan = shardplan.plan(step, x, weights, cluster=slow, pins=pins, factors={}, time_model="sum")
    (bundle,) = (i for i in instructions_of(plan.schedule.body.instructions) if isinstance(i, Bundle))
    assert bundle.step.kind == Collective.ALL_REDUCE
    one = 4 * 256 * 256
    assert Copies(plan.planned).packing_s(bundle) == pytest.approx(seconds(2 * one, *[one] * unpacked))


def test_copies_do_not_hide() -> None:
    """A gather beside a product that is longer than it: the gather hides, and the copies beside it do not."""

    def step(x: Any, v: Any, w: Any) -> Any:
        return jnp.tanh(x @ v) @ w

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2**16, 512), (512, 512), (512, 512))]
    pins = {"x": P("gpu"), "v": P(), "w": P(None, "gpu")}
    plan = shardplan.plan(step, *args, cluster=CLUSTER, pins=pins, factors={})
    (gather,) = scheduled(plan.session).issued
    assert gather.copied_s == pytest.approx(seconds(512 * 512))
    assert gather.hideable_s == pytest.approx(gather.seconds - gather.copied_s)
