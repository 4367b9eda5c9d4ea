"""Kernels described by a plain function: `register(kernel, like=function)`."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.tdl import Call, cuts
from shardplan.tdl.describe import describe
from shardplan.verify.verify import verify

EXAMPLE = [jax.ShapeDtypeStruct((4, 6, 8), jnp.float32)] * 3


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k)), v)


@cache
def kernels() -> tuple[Any, Any, Any]:
    """Attention with a gradient of its own, as three functions that are not seen through."""

    @jax.custom_vjp
    def fused(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention(q, k, v)

    @jax.jit
    def fused_forward(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return fused(q, k, v), (q, k, v)

    @jax.jit
    def fused_backward(saved: Any, g: jax.Array) -> Any:
        return jax.vjp(attention, *saved)[1](g)

    fused.defvjp(fused_forward, fused_backward)
    return fused, fused_forward, fused_backward


@pytest.mark.parametrize(
    "pins",
    [
        pytest.param({"x": P(("node", "gpu"))}, id="batch", marks=pytest.mark.slow),
        pytest.param({"x": P(None, "gpu")}, id="queries"),
    ],
)
def test_a_step_with_a_registered_kernel_runs_as_on_one_device(pins: Any, devices: list[Any]) -> None:
    fused, forward, backward = kernels()
    shardplan.register(fused, like=attention, example=EXAMPLE)
    shardplan.register(forward, like=lambda *args: (attention(*args), args), example=EXAMPLE)
    shardplan.register(backward, like=lambda saved, g: jax.vjp(attention, *saved)[1](g), example=[tuple(EXAMPLE), EXAMPLE[0]])

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: jnp.sum(fused(x @ w, x, x) ** 2))(w)

    args = jax.random.normal(jax.random.key(0), (8, 8)), jax.random.normal(jax.random.key(1), (8, 8, 8))
    plan = shardplan.plan(step, *args, cluster="2x4", pins=pins)
    kernel_ops = [op for op in plan.traced.program.ops if op.primitive.startswith("jit:fused")]
    assert [op.primitive for op in kernel_ops] == ["jit:fused_forward", "jit:fused_backward"]
    assert not plan.data.whole_ops
    assert verify(plan, step, args, steps=2, devices=devices).passed


def test_a_pallas_kernel_is_cut_like_its_plain_function() -> None:
    def body(x_ref: Any, y_ref: Any) -> None:
        y_ref[...] = x_ref[...] / jnp.sum(x_ref[...], axis=-1, keepdims=True)

    def parts(x: jax.Array) -> jax.Array:
        return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True, name="parts_of_one")(x)

    example = [jax.ShapeDtypeStruct((4, 6), jnp.float32)]
    shardplan.register("pallas_call:parts_of_one", run=parts, like=lambda x: x / x.sum(-1, keepdims=True), example=example)
    description = describe(Call("pallas_call:parts_of_one", ((8, 6),), ((8, 6),), {}, ("float32",), ("float32",)))
    assert description is not None
    assert [cut.loop for cut in cuts(description, 2)] == [0], "rows alone"


def test_results_that_are_all_summed_over_a_dim_are_cut_along_it_together() -> None:
    @jax.jit
    def gradients(x: jax.Array, g: jax.Array) -> Any:
        return x.T @ g, g.sum(0)

    example = [jax.ShapeDtypeStruct((4, 6), jnp.float32), jax.ShapeDtypeStruct((4, 8), jnp.float32)]
    shardplan.register(gradients, like=lambda x, g: (x.T @ g, g.sum(0)), example=example)
    call = Call("jit:gradients", ((4, 6), (4, 8)), ((6, 8), (8,)), {}, ("float32",) * 2, ("float32",) * 2)
    description = describe(call)
    assert description is not None
    summed = [cut for cut in cuts(description, 2) if all(str(p).startswith("Partial") for p in cut.results)]
    assert len(summed) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"like": lambda q, k, v: attention(k, q, v), "example": EXAMPLE}, "result 0 of custom_vjp_call:fused is off by"),
        ({"like": lambda q, k, v: (q, k), "example": EXAMPLE}, "has 1 results, like= has 2"),
        ({"like": lambda q, k, v: q[:2], "example": EXAMPLE}, r"has shape \(4, 6, 8\), not \(2, 6, 8\)"),
        ({"like": lambda q: q, "example": EXAMPLE}, "like= fails on the example: TypeError"),
        ({"like": attention}, "needs an example"),
        ({"like": 3, "example": EXAMPLE}, "takes a function"),
    ],
)
def test_what_is_not_alike_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(shardplan.DescriptionError, match=said):
        shardplan.register(kernels()[0], **options)


def test_without_a_function_it_is_the_decorator_of_descriptions() -> None:
    @jax.jit
    def doubled(x: jax.Array) -> jax.Array:
        return 2.0 * x

    @shardplan.register(doubled, example=[jax.ShapeDtypeStruct((4, 6), jnp.float32)])
    def describe_doubled(x: Any) -> Any:
        return lambda i, j: x[i, j]

    assert describe_doubled is not None
    assert describe(Call("jit:doubled", ((4, 6),), ((4, 6),), {}, ("float32",), ("float32",))) is not None


@pytest.mark.parametrize(
    ("kernel", "like", "alike"),
    [
        (lambda x: jnp.log(x), jnp.log, True),
        (lambda x: jnp.where(x > 0, x, -jnp.inf), lambda x: jnp.where(x > 0, x, -jnp.inf), True),
        (lambda x: jnp.argmax(x, 0) + 1000, lambda x: jnp.argmax(x, 0) + 999, False),
        (lambda x: jnp.conj(x * 1j), lambda x: x * 1j, False),
        (lambda x: x * 1e-6, lambda x: x * 2e-6, False),
        (lambda x: x * 1.015, lambda x: x, False),
        (lambda x: jnp.where(x > 0, x, 0.01 * x), jax.nn.relu, False),
        (lambda x: x.astype(jnp.bfloat16) * jnp.bfloat16(1.005), lambda x: x.astype(jnp.bfloat16), True),
    ],
    ids=["nan", "inf", "integers", "complex", "small", "scaled", "leaky", "rounded inside"],
)
def test_results_are_compared_as_their_types_ask(kernel: Any, like: Any, alike: bool) -> None:
    kernel.__name__ = f"compared_{id(kernel)}"
    target, example = jax.jit(kernel), [jax.ShapeDtypeStruct((4, 6), jnp.float32)]
    if alike:
        shardplan.register(target, like=like, example=example)
        return
    with pytest.raises(shardplan.DescriptionError, match="like= computes something else"):
        shardplan.register(target, like=like, example=example)


def product_by_blocks(x: jax.Array, y: jax.Array) -> jax.Array:
    """A product whose terms are added in 128 blocks, one after another."""
    blocks = x.reshape(len(x), 128, -1).swapaxes(0, 1), y.reshape(128, -1, y.shape[1])
    return jax.lax.scan(lambda total, own: (total + own[0] @ own[1], None), jnp.zeros((len(x), y.shape[1])), blocks)[0]


def softmax_without_a_shift(x: jax.Array) -> jax.Array:
    return jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True)


def online_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention that reads one block of eight keys after another and rescales its sums with each new maximum."""

    def block(state: Any, own: Any) -> Any:
        (most, weight, total), (k, v) = state, own
        scores = jnp.einsum("bqd,bkd->bqk", q, k)
        new = jnp.maximum(most, scores.max(-1, keepdims=True))
        old, parts = jnp.exp(most - new), jnp.exp(scores - new)
        return (new, weight * old + parts.sum(-1, keepdims=True), total * old + parts @ v), None

    one = jnp.zeros((*q.shape[:2], 1))
    blocks = tuple(x.reshape(len(x), -1, 8, x.shape[2]).swapaxes(0, 1) for x in (k, v))
    (_, weight, total), _ = jax.lax.scan(block, (one - jnp.inf, one, jnp.zeros((*q.shape[:2], v.shape[2]))), blocks)
    return total / weight


@pytest.mark.parametrize(
    ("kernel", "like", "shapes"),
    [
        (product_by_blocks, jnp.matmul, [(8, 4096), (4096, 6)]),
        (softmax_without_a_shift, jax.nn.softmax, [(4, 4096)]),
        (online_attention, attention, [(2, 64, 8)] * 3),
    ],
)
def test_another_order_of_sums_is_alike(kernel: Any, like: Any, shapes: Any) -> None:
    example = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    with pytest.raises(shardplan.DescriptionError) as refused:
        shardplan.register(jax.jit(kernel), like=lambda *x: 1.0001 * like(*x), example=example)
    assert "is rounding" in str(refused.value)
    shardplan.register(jax.jit(kernel), like=like, example=example)


def test_a_function_that_counts_its_rows_is_cut_along_its_columns_alone() -> None:
    @jax.jit
    def averaged(x: jax.Array) -> jax.Array:
        return x.mean(0)

    shardplan.register(averaged, like=lambda x: x.mean(0), example=[jax.ShapeDtypeStruct((1, 6), jnp.float32)])
    description = describe(Call("jit:averaged", ((8, 6),), ((6,),), {}, ("float32",), ("float32",)))
    assert description is not None
    assert [str(cut.operands[0]) for cut in cuts(description, 2)] == ["Split(dim=1, halo=(0, 0))"]
