"""Convolutions that the compiler gets wrong or aborts on, under layouts drawn at random.

Depthwise ones, and dilated operands whose blocks come without padding.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardplan
from tests.machines import machine
from tests.scattered import scattered


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def convolution(x: Any, k: Any, **options: Any) -> Any:
    given: dict[str, Any] = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "OIHW", "NCHW")}
    return lax.conv_general_dilated(x, k, **(given | options))


def depthwise(k: jax.Array, x: jax.Array) -> Any:
    """A step of a depthwise convolution, with the gradients of both operands."""
    return jax.value_and_grad(lambda k, x: jnp.mean(convolution(x, k, feature_group_count=8) ** 2), argnums=(0, 1))(k, x)


def two_a_channel(k: jax.Array, x: jax.Array) -> Any:
    """The gradient of a kernel with two filters for each channel, with a stride."""
    numbers = ("NCHW", "OIHW", "NCHW")
    return jax.grad(
        lambda k: jnp.mean(convolution(x, k, window_strides=(2, 1), dimension_numbers=numbers, feature_group_count=8) ** 2)
    )(k)


def dilated(k: jax.Array, x: jax.Array) -> Any:
    """Blocks of the dilated operand need no padding, and its other dim is smaller than the kernel."""
    return convolution(x, k, padding=[(0, 2), (2, 6)], lhs_dilation=(2, 1), rhs_dilation=(1, 3))


CASES = {
    "depthwise": (depthwise, (8, 1, 2, 2), (2, 9, 6, 8), "4x2", (1, 3, 8, 10)),
    "two filters for each channel": (two_a_channel, (16, 1, 2, 2), (8, 8, 2, 8), "4x2", (12, 20, 23, 47)),
    "dilated": (dilated, (4, 4, 2, 3), (8, 12, 1, 4), "2x2x2", (1, 29, 46)),
}


@pytest.mark.parametrize(
    "name", ["dilated", *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != "dilated")]
)
def test_a_convolution_is_right_however_it_is_cut(name: str) -> None:
    step, kernel, image, cluster, seeds = CASES[name]
    args = normal(0, *kernel), normal(1, *image)
    plan = shardplan.plan(step, *args, cluster=machine(cluster))
    wanted = jax.tree.leaves(jax.jit(step)(*args))
    for seed in seeds:
        drawn = scattered(plan, seed)
        assert drawn is not None
        for a, b in zip(jax.tree.leaves(drawn.jit(step, backend="specs")(*drawn.put(args))), wanted, strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=1e-5 * float(jnp.abs(b).max()))
