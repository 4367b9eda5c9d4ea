"""What compilers for GPUs compute again, and the memory that results take over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

import shardplan
from shardplan.mesh import Cluster

W, ROWS = 32, 4096


def test_gpus_compute_transcendentals_again() -> None:
    """Of a GELU both keep its operand and its result; others keep its hyperbolic tangent, too."""

    def step(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            return jnp.sum((jax.nn.gelu(x @ weights[0]) @ weights[1]) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    args = ([jax.ShapeDtypeStruct((W, 4 * W), "float32"), jax.ShapeDtypeStruct((4 * W, W), "float32")], _like(ROWS, W))
    on_gpu, on_cpu = (peak_bytes(step, args, platform) for platform in ("gpu", "cpu"))
    assert on_cpu - on_gpu == 4 * ROWS * 4 * W


def test_a_result_takes_the_memory_of_the_operand_that_is_read_last() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.exp(x @ w) @ jnp.tanh(w)

    assert peak_bytes(step, (_like(W, W), _like(ROWS, W)), "gpu") < 4 * ROWS * W * 3.1, "x, the product and the result"


def _like(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def peak_bytes(step: Any, args: Any, platform: Any) -> int:
    one = Cluster.load("1")
    return shardplan.plan(step, *args, cluster=replace(one, device=replace(one.device, platform=platform))).peak_bytes
