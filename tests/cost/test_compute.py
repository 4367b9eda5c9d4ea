"""Arithmetic is counted as XLA counts it; the roofline follows the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import gpt, gpt_linen, mlp, unet, vit, wresnet
from shardplan.cost import compute
from shardplan.frontend.nnx_state import trace_step
from shardplan.frontend.trace import trace
from shardplan.graph import Node, flatten
from shardplan.mesh import Cluster, Device
from shardplan.search.problem.compute_prices import least_compute_s
from tests.attention import needs_flash


def counted(step: Callable[..., Any], *args: Any) -> float:
    """The graph's flops."""
    return sum(_flops(n) * n.weight for n in flatten(trace(step, *args).program).nodes)


def _flops(node: Node) -> float:
    assert node.signature.description is not None
    return compute.flops(node.signature.description)


def compiled(step: Callable[..., Any], *args: Any) -> float:
    """XLA's count for the unsharded step."""
    analysis: Any = jax.jit(step).lower(*args).compile().cost_analysis()
    return float(analysis["flops"])


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


STEPS = {
    "gpt": gpt.train_step(),
    "gpt wide": gpt.train_step(layers=1, width=256, sequence=128, batch=4),
    "gpt_linen": gpt_linen.train_step(layers=1),
    "gpt remat": gpt.train_step(layers=1, remat=True),
    "mlp": mlp.train_step(),
    "wresnet": wresnet.train_step(batch=4),
    "vit": vit.train_step(),
    "unet": unet.train_step(),
}
SLOW = ("wresnet", "unet", "vit", "gpt remat", "gpt_linen", "gpt wide")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in STEPS])
def test_a_train_steps_flops_are_those_that_xla_counts(name: str) -> None:
    step, args = STEPS[name]
    assert counted(step, *args) == pytest.approx(compiled(step, *args), rel=0.05)


CONVOLUTIONS = {
    "plain": {"window_strides": (1, 1), "padding": "VALID"},
    "padded": {"window_strides": (1, 1), "padding": "SAME"},
    "strided": {"window_strides": (2, 2), "padding": "SAME"},
    "dilated kernel": {"window_strides": (1, 1), "padding": "SAME", "rhs_dilation": (2, 3)},
    "dilated input": {"window_strides": (1, 1), "padding": ((3, 3), (3, 3)), "lhs_dilation": (2, 2)},
    "groups": {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 2},
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("backward", [False, True])
def test_a_convolution_counts_no_padding(name: str, backward: bool) -> None:
    options = CONVOLUTIONS[name]
    groups = options.get("feature_group_count", 1)

    def convolve(x: jax.Array, k: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, k, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)

    def loss(x: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.sum(convolve(x, k))

    step = jax.grad(loss, argnums=(0, 1)) if backward else convolve
    args = array(2, 9, 11, 8), array(3, 3, 8 // groups, 6)
    assert counted(step, *args) == pytest.approx(compiled(step, *args), rel=0.05)


@given(m=st.integers(1, 40), k=st.integers(1, 40), n=st.integers(1, 40))
def test_a_product_counts_two_for_each_multiply_and_add(m: int, k: int, n: int) -> None:
    assert counted(jnp.dot, array(m, k), array(k, n)) == 2 * m * k * n


def test_a_lookup_and_its_gradient_count_the_rows_that_are_read() -> None:
    rows = jax.ShapeDtypeStruct((6,), jnp.int32)
    forward = counted(lambda t, r: t[r], array(1000, 8), rows)
    backward = counted(lambda t, r, g: t.at[r].add(g), array(1000, 8), rows, array(6, 8))
    assert forward <= 3 * 6 * 8 + 4 * 6
    assert backward <= 1000 * 8 + 3 * 6 * 8 + 4 * 6, "one pass over the table at most"


def test_a_loop_counts_once_for_each_trip() -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (c @ w, None), x, None, length=7)[0]

    assert counted(step, array(4, 8), array(8, 8)) == 7 * 2 * 4 * 8 * 8


H100 = Cluster.load("8").device


@given(flop=st.floats(1e6, 1e15), nbytes=st.floats(1e3, 1e12))
def test_the_roofline_is_the_slower_of_its_two_sides(flop: float, nbytes: float) -> None:
    device = replace(H100, launch_s=0.0)
    both = compute.seconds(device, flop, nbytes, "float32", matrix=True)
    arithmetic = flop / (device.flops_per_s["float32"] * device.flops_efficiency)
    traffic = nbytes / (device.memory_bytes_per_s * device.memory_efficiency)
    assert both == pytest.approx(max(arithmetic, traffic))
    assert compute.seconds(device, flop, nbytes, "float32", matrix=False) == pytest.approx(traffic)
    assert compute.seconds(H100, flop, nbytes, "float32", matrix=True) == pytest.approx(both + H100.launch_s)


def test_half_the_bytes_and_twice_the_peak_halve_the_time() -> None:
    slow = compute.seconds(H100, 1e15, 1.0, "float32", matrix=True) - H100.launch_s
    fast = compute.seconds(H100, 1e15, 1.0, "bfloat16", matrix=True) - H100.launch_s
    assert slow / fast == pytest.approx(H100.flops_per_s["bfloat16"] / H100.flops_per_s["float32"])


def test_fused_attention_runs_at_its_own_rate_and_products_at_theirs() -> None:
    slow = replace(H100, attention_efficiency=H100.attention_efficiency / 2)

    def working_s(device: Device, *, attention: bool) -> float:
        return compute.seconds(device, 1e15, 1.0, "bfloat16", matrix=True, attention=attention) - device.launch_s

    assert working_s(slow, attention=True) == pytest.approx(2 * working_s(H100, attention=True))
    assert working_s(slow, attention=False) == working_s(H100, attention=False)


@needs_flash
def test_a_slower_attention_rate_slows_the_attention_kernels_of_a_step_alone() -> None:
    step, args = gpt.train_step(layers=1, width=128, heads=2, sequence=128, batch=4, attention="flash", dtype="bfloat16")
    nodes = flatten(trace_step(step, args, (0,)).program).nodes
    fast = replace(H100, launch_s=0.0, memory_bytes_per_s=1e18)
    slow = replace(fast, attention_efficiency=fast.attention_efficiency / 4)

    def ratio(node: Node) -> float:
        return least_compute_s(node.signature, slow, 8) / least_compute_s(node.signature, fast, 8)

    products = [n for n in nodes if n.signature.multiplies]
    found = {n.signature.call.primitive: ratio(n) for n in products}
    kernels = [name for name in found if name.startswith("pallas_call:")]
    assert len(kernels) == 2
    assert [found[name] for name in kernels] == pytest.approx([4.0, 4.0])
    assert found["dot_general"] == 1.0


def test_products_and_convolutions_are_contractions_and_sums_are_not() -> None:
    def step(x: jax.Array, k: jax.Array) -> jax.Array:
        y = jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.max(jnp.tensordot(y, y, 4) + jnp.sum(y))

    graph = flatten(trace(step, array(2, 8, 8, 4), array(3, 3, 4, 4)).program)
    found = {
        n.signature.call.primitive: compute.is_contraction(n.signature.description)
        for n in graph.nodes
        if n.signature.description
    }
    assert {p for p, yes in found.items() if yes} == {"conv_general_dilated", "dot_general"}
    assert not found["reduce_sum"]


@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_multiplies_by_its_padding_and_not_by_gaps(stride: int) -> None:
    """A pass and its gradient for the image take the same products: one for each output and each place of the kernel."""

    def run(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def products(step: Callable[..., Any], *args: Any) -> float:
        nodes = flatten(trace(step, *args).program).nodes
        descriptions = [n.signature.description for n in nodes if n.signature.multiplies]
        assert len(descriptions) == 1
        assert descriptions[0] is not None
        return compute.flops(descriptions[0], padding=True)

    image, kernel = array(2, 8, 8, 16), array(3, 3, 16, 32)
    out = array(2, 8 // stride, 8 // stride, 32)
    expected = 2 * (2 * (8 // stride) ** 2 * 32) * (3 * 3 * 16)
    assert products(run, image, kernel) == expected
    backward = products(lambda w, g: jax.vjp(lambda x: run(x, w), jnp.zeros(image.shape))[1](g)[0], kernel, out)
    assert backward == pytest.approx(expected, rel=0.15)  # of a window over 8 places, some fall between the ends
    assert counted(run, image, kernel) < expected
