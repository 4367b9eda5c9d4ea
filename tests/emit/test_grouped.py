"""Convolutions in groups of several channels: the partitioner alone would gather whole operands of their gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import shardplan
from shardplan.emit.backends import BACKENDS
from shardplan.frontend.trace import trace
from shardplan.graph import flatten
from shardplan.ir import Backend
from shardplan.verify.verify import measured_program, verify

LAYOUT = ("NHWC", "HWIO", "NHWC")


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("groups", [pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow), 32])
def test_shares_are_as_large_as_predicted_and_right(groups: int, stride: int, devices: list[Any]) -> None:
    def step(kernel: jax.Array, x: jax.Array) -> jax.Array:
        def loss(kernel: jax.Array) -> jax.Array:
            made = lax.conv_general_dilated(
                x, kernel, (stride, stride), "SAME", feature_group_count=groups, dimension_numbers=LAYOUT
            )
            return (jnp.tanh(made) ** 2).mean()

        return kernel - 0.1 * jax.grad(loss)(kernel)

    args = draw(3, 3, 32 // groups, 32), draw(8, 28, 28, 32)
    plan = shardplan.plan(step, *args, cluster="2x4")
    assert any(entry for spec in plan.in_specs for entry in spec), "it is cut"
    program, _ = measured_program(plan, step, backend="specs", devices=devices)
    assert program.wire_bytes <= plan.communication_bytes
    assert verify(plan, step, args, backend="specs", devices=devices).passed


def test_a_share_is_not_padded(devices: list[Any]) -> None:
    """Seven groups over two devices: the call would run whole, and what it reads would be gathered."""

    def step(kernel: jax.Array, x: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", feature_group_count=7, dimension_numbers=LAYOUT)

    args = draw(3, 3, 4, 28), draw(9, 28, 28, 28)
    plan = shardplan.plan(step, *args, cluster="2x4", backend="specs")
    graph = plan.session.problem.graph
    for node in graph.nodes:
        use = plan.session.decisions.uses.get(node.id)
        loops = node.signature.description.loops if node.signature.description else ()
        assert node.signature.fenced == set(range(len(loops)))
        for loop, info in enumerate(loops):
            assert node.signature.cut(loop, 2) is None or info.extent % 2 == 0
            assert use is None or loop not in use.loops or info.extent % 2 == 0
    program, _ = measured_program(plan, step, backend="specs", devices=devices)
    assert program.wire_bytes <= plan.communication_bytes


def grouped(x: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, jnp.ones((3, 3, 2, 4)), (1, 1), "SAME", feature_group_count=2, dimension_numbers=LAYOUT)


def pooled(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "SAME")


PADDED = {
    "fft": (lambda x: jnp.fft.fft(x).real, False),
    "sort": (lambda x: jnp.sort(x, axis=1), False),
    "cumsum": (lambda x: jnp.cumsum(x, axis=1), False),
    "conv_general_dilated": (grouped, False),
    "select_and_scatter_add": (jax.grad(lambda x: pooled(x).sum()), False),
    "concatenate": (lambda x: jnp.concatenate([x, x], axis=1), True),
    "stack": (lambda x: jnp.stack([x, x], axis=1), True),
    "split": (lambda x: jnp.split(x, 2, axis=1)[0], True),
    "random_bits": (lambda x: jax.random.uniform(jax.random.key(0), x.shape), True),
}


UNPADDED = {"select_and_scatter_add"}
"""No device can run its own share of them with padding."""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("primitive", PADDED)
def test_only_the_partitioner_keeps_an_op_from_being_padded(primitive: str, backend: Backend) -> None:
    function, pads = PADDED[primitive]
    program = trace(lambda x: function(x) + x[:1, :1, :1, :1].sum(), draw(9, 8, 8, 4)).program
    found = [n.signature for n in flatten(program, backend=backend).nodes if n.signature.call.primitive == primitive]
    pads = pads or backend == "explicit"
    assert found
    for signature in found:
        assert (0 not in signature.fenced) == pads
        assert (signature.cut(0, 2) is not None) == (pads and primitive not in UNPADDED)
        assert signature.cut(0, 3) is not None


def test_a_plan_with_a_cut_that_the_partitioner_gets_wrong_runs_explicitly_alone(slow_devices: Any) -> None:
    def step(x: jax.Array) -> jax.Array:
        kernel = jnp.linspace(-1, 1, 27).reshape(3, 3, 1, 3)
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", feature_group_count=3, dimension_numbers=LAYOUT)

    x = draw(9, 7, 7, 3)
    pinned = {"x": PartitionSpec()}
    plan = shardplan.plan(step, x, cluster=slow_devices(2), pins=pinned)
    assert any(use.loops[0] >= 0 for use in plan.session.decisions.uses.values())
    np.testing.assert_allclose(plan.jit(step)(x), jax.jit(step)(x), rtol=1e-5, atol=1e-6)
    with pytest.raises(shardplan.ShardplanError, match=r"cuts conv_general_dilated at .*test_grouped.py:\d+.*backend='specs'"):
        plan.jit(step, backend="specs")
    other = shardplan.plan(step, x, cluster=slow_devices(2), pins=pinned, backend="specs")
    np.testing.assert_allclose(other.jit(step)(x), jax.jit(step)(x), rtol=1e-5, atol=1e-6)
