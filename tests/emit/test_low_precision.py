"""Products of 8-bit numbers, as in training with scales: planned at the peak of their own dtype, and right on shares."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.cost.compute import flops, product_dtype
from shardplan.frontend.trace import trace
from shardplan.graph import flatten
from shardplan.graph.nodes import Node
from shardplan.mesh import Cluster
from shardplan.search.problem.compute_prices import least_compute_s
from shardplan.tdl import Call
from shardplan.verify.verify import verify

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
ROWS, WIDTH = 64, 32


def draw(*shape: int, dtype: Any = np.float32, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def dot(x: Any, y: Any, over: tuple[int, int], dtype: Any = jnp.float32) -> Any:
    return jax.lax.dot_general(x, y, (((over[0],), (over[1],)), ((), ())), preferred_element_type=dtype)


def fp8_training() -> tuple[Any, tuple[Any, ...]]:
    """Forward in e4m3; the gradients come in e5m2 and meet e4m3."""

    @jax.custom_vjp
    def product(x: Any, w: Any) -> Any:
        return forward(x, w)[0]

    def forward(x: Any, w: Any) -> Any:
        kept = x.astype(E4M3), w.astype(E4M3)
        return dot(*kept, (1, 0)), kept

    def backward(kept: Any, gradient: Any) -> Any:
        x, w = kept
        small = gradient.astype(E5M2)
        return dot(small, w, (1, 1)), dot(x, small, (0, 0))

    product.defvjp(forward, backward)

    def step(w: Any, x: Any) -> Any:
        loss, slope = jax.value_and_grad(lambda w: jnp.mean(jax.nn.relu(product(x, w)) ** 2))(w)
        return w - 0.1 * slope, loss

    return step, (draw(WIDTH, 2 * WIDTH), draw(ROWS, WIDTH, seed=1))


def int8_inference() -> tuple[Any, tuple[Any, ...]]:
    def step(w: Any, x: Any) -> Any:
        scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
        return dot(jnp.round(x / scale).astype(jnp.int8), w, (1, 0), jnp.int32) * scale

    return step, (jnp.asarray(np.random.default_rng(0).integers(-127, 128, (WIDTH, WIDTH)), jnp.int8), draw(ROWS, WIDTH))


def ragged_training() -> tuple[Any, tuple[Any, ...]]:
    def step(w: Any, x: Any, sizes: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean(jax.lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32) ** 2)

        return w - jax.grad(loss)(w)

    return step, (draw(4, WIDTH, WIDTH, dtype=jnp.bfloat16), draw(ROWS, WIDTH, dtype=jnp.bfloat16), jnp.array([32, 16, 8, 8]))


def scaled_training() -> tuple[Any, tuple[Any, ...]]:
    config = [jax.nn.get_scaled_dot_general_config("mxfp8") for _ in range(3)]

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            made = jax.nn.scaled_dot_general(x, w, (((2,), (1,)), ((), ())), configs=config)
            return jnp.mean(made.astype(jnp.float32) ** 2)

        return w - jax.grad(loss)(w).astype(w.dtype)

    return step, (draw(2 * WIDTH, 64, dtype=jnp.bfloat16), draw(2, ROWS, 2 * WIDTH, dtype=jnp.bfloat16, seed=1))


STEPS = {"fp8": fp8_training, "int8": int8_inference, "ragged": ragged_training, "scaled": scaled_training}


def products(step: Any, args: Any) -> list[Node]:
    return [n for n in flatten(trace(step, *args).program).nodes if n.signature.multiplies]


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("fp8", ["float8_e4m3fn", "float8_e4m3fn"]),
        ("int8", ["int8"]),
        ("ragged", ["bfloat16", "float32"]),
        ("scaled", ["float8_e4m3fn", "float8_e4m3fn"]),
    ],
)
def test_products_run_at_the_peak_of_what_they_multiply(name: str, dtypes: list[str]) -> None:
    signatures = [n.signature for n in products(*STEPS[name]())]
    assert [product_dtype(s.call, contracts=s.contracts) for s in signatures] == dtypes


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        (("float8_e4m3fn", "float8_e5m2"), "float8_e4m3fn"),
        (("float8_e5m2", "bfloat16"), "bfloat16"),
        (("bfloat16", "float32"), "float32"),
        (("int8", "bfloat16"), "bfloat16"),
    ],
)
def test_of_two_types_the_wider_counts(types: tuple[str, str], expected: str) -> None:
    call = Call("dot_general", ((8, 8), (8, 8)), ((8, 8),), {}, types, ("float32",))
    assert product_dtype(call, contracts=True) == expected


def test_a_product_in_fp8_takes_half_the_time_of_one_in_bfloat16() -> None:
    device = Cluster.load("dgx-h100:1").device
    big = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)

    def seconds(x: Any, y: Any) -> float:
        (node,) = products(lambda a, b: dot(a.astype(x), b.astype(y), (1, 0)), (big, big))
        return least_compute_s(node.signature, device, 1) - device.launch_s

    assert seconds(jnp.bfloat16, jnp.bfloat16) / seconds(E4M3, E5M2) == pytest.approx(2.0, rel=1e-3)


def test_the_gradient_of_a_ragged_products_weights_counts_the_sum_over_its_rows() -> None:
    _, backward = products(*ragged_training())
    assert backward.signature.description is not None
    assert flops(backward.signature.description) == 2 * ROWS * WIDTH * WIDTH


@pytest.mark.parametrize("name", ["fp8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int8", "ragged", "scaled"))])
def test_a_step_of_small_numbers_is_equal_on_shares(name: str, eager: Any) -> None:
    step, args = STEPS[name]()
    plan = shardplan.plan(step, *args, cluster=eager, pins={"x": P("gpu")} if name != "scaled" else None)
    found = verify(plan, step, args, steps=1, backend="explicit")
    assert found.passed, found
    uses = plan.session.decisions.uses
    cut = [uses[n.id].loops for n in plan.session.problem.graph.nodes if n.signature.multiplies and n.id in uses]
    assert any(loop >= 0 for loops in cut for loop in loops)
