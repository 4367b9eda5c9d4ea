"""Convolutions in groups of several channels: the partitioner alone would gather whole operands of their gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardplan
from shardplan.emit.verify import measured_program, verify

LAYOUT = ("NHWC", "HWIO", "NHWC")


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("groups", [4, 8, 32])
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
    program, _ = measured_program(plan, step, devices=devices)
    assert program.wire_bytes <= plan.communication_bytes
    assert verify(plan, step, args, devices=devices).passed
