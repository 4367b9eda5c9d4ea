"""Steps that XLA's partitioner gets wrong, or does not compile, when it is left to cut them: here they are right.

Each was wrong with plain `jax.jit` under the same shardings, or under constraints inside the step, in the release that is tested
(`shardplan.tdl.xla_quirks`): gradients of convolutions added up over axes that cut nothing, halos misplaced under strides and
dilations, padding of updates written into row 0, NaN lost, lookups of terms with the whole table's indices, programs that its own
verifier refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.verify.mutate import DroppingEmitter
from shardplan.verify.verify import verify
from tests.machines import launchless, machine

IMAGES = ("NHWC", "HWIO", "NHWC")
Step = tuple[Callable[..., Any], tuple[Any, ...]]


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def integers(seed: int, high: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, high, shape), jnp.int32)


def two_convolutions() -> Step:
    def conv(x: jax.Array, k: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=IMAGES)

    def step(kernels: tuple[jax.Array, jax.Array], x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(lambda k: jnp.mean(conv(jax.nn.relu(conv(x, k[0])), k[1]) ** 2))(kernels)
        return jax.tree.map(lambda k, g: k - 0.1 * g, kernels, grads), value

    return step, ((normal(1, 3, 3, 4, 64) * 0.2, normal(2, 3, 3, 64, 128) * 0.05), normal(0, 1, 128, 128, 4))


def patches() -> Step:
    def step(k: jax.Array, w: jax.Array, x: jax.Array) -> Any:
        def loss(k: jax.Array, w: jax.Array) -> jax.Array:
            h = lax.conv_general_dilated(x, k, (8, 8), "VALID", dimension_numbers=IMAGES)
            return jnp.mean(jnp.tanh(h.reshape(h.shape[0], -1, h.shape[-1]) @ w) ** 2)

        return jax.grad(loss, argnums=(0, 1))(k, w)

    return step, (normal(1, 8, 8, 3, 64) * 0.1, normal(2, 64, 128) * 0.1, normal(0, 8, 32, 32, 3))


def convolved() -> Step:
    def step(a: jax.Array, k: jax.Array) -> jax.Array:
        return jax.grad(lambda k: (jnp.convolve(a, k, mode="same") ** 2).mean())(k)

    return step, (normal(0, 8), normal(1, 4))


def dilated_kernel() -> Step:
    numbers = ("HNC", "OIH", "HCN")

    def step(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(a, b, (1,), "SAME", rhs_dilation=(3,), dimension_numbers=numbers)[:, :, :1]

    return step, (normal(0, 4, 2, 5), normal(1, 6, 5, 1))


def dilated_image() -> Step:
    numbers = ("NHWC", "OIHW", "NCHW")

    def step(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(a, b, (2, 2), [(1, 0), (0, 1)], lhs_dilation=(2, 1), dimension_numbers=numbers)

    return step, (normal(0, 4, 8, 16, 4), normal(1, 6, 4, 1, 3))


def two_lookups() -> Step:
    def step(p: dict[str, jax.Array], x: jax.Array, key: jax.Array) -> Any:
        def loss(p: dict[str, jax.Array]) -> jax.Array:
            places = jnp.broadcast_to(jnp.arange(16), x.shape)
            h = jnp.take(p["tokens"], x, axis=0) + jnp.take(p["places"], places, axis=0)
            h = jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h / 0.9, 0.0)
            h = jnp.tanh((h - h.mean(-1, keepdims=True)) @ p["up"]) @ p["down"]
            return jnp.mean((h @ p["tokens"].T) ** 2)

        value, grads = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), value

    shapes = {"tokens": (256, 64), "places": (64, 64), "up": (64, 256), "down": (256, 64)}
    params = {name: 0.1 * normal(n, *shape) for n, (name, shape) in enumerate(shapes.items())}
    return step, (params, integers(3, 30, 8, 16), jax.random.key(3))


def odd_lookup() -> Step:
    def step(table: jax.Array, w: jax.Array, tokens: jax.Array) -> Any:
        return jax.grad(lambda p: (jnp.tanh(p[0][tokens] @ p[1]) ** 2).mean())((table, w))

    return step, (normal(0, 96, 64), normal(1, 64, 256), integers(2, 96, 4095))


def largest_by_row() -> Step:
    return lambda t, i: t.at[i].max(jnp.arange(i.size) * 0.1 - 3.0), (normal(0, 12) - 5, integers(1, 12, 16))


def unique_of_nine() -> Step:
    return lambda x: jnp.unique(x, size=6, fill_value=0), (jnp.floor(normal(0, 9) * 2),)


def running_maximum() -> Step:
    return lambda c: jax.grad(lambda c: (lax.cummax(c, axis=0) ** 2).sum())(c), (normal(0, 16),)


def bits() -> Step:
    return lambda x: (lax.reduce_or(x, (0,)), lax.reduce_and(x | 7, (0,))), (integers(0, 200, 8, 17),)


def loop_without_ops() -> Step:
    return lambda x, xs: lax.scan(lambda c, y: (c, c), x, xs), (normal(0, 8, 4), normal(1, 3, 8, 4))


def extremes() -> Step:
    x = normal(0, 8, 12).at[5, 7].set(jnp.nan).at[2, 3].set(jnp.inf).at[1, 3].set(-jnp.inf)

    def step(x: jax.Array) -> Any:
        return jnp.max(x), jnp.min(x, 0), jnp.argmax(x), jnp.max(x.astype(jnp.bfloat16), 0), jax.nn.softmax(x, 0)

    return step, (x,)


def clipped_lookups() -> Step:
    at = np.arange(64)[::-1].copy()

    def step(x: jax.Array, w: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.take(x @ w, at, axis=0, mode="clip") + jnp.take(y @ v, at, axis=0, mode="clip")

    return step, (normal(0, 64, 512), normal(1, 512, 64), normal(2, 64, 512), normal(3, 512, 64))


SUMS = P(None, ("node", "gpu"))
CASES: dict[str, tuple[Callable[[], Step], str, dict[str, P]]] = {
    "a large image on H100s": (two_convolutions, "2x4", {}),
    "patches of images cut in space": (patches, "2x4:slow", {"x": P(None, None, "gpu")}),
    "a convolution of two vectors": (convolved, "2x2x2:eager", {}),
    "a dilated kernel of one place": (dilated_kernel, "2x2", {"a": P("gpu"), "b": P()}),
    "a dilated image": (dilated_image, "8", {"a": P(None, "gpu"), "b": P()}),
    "two lookups added before they are reduced": (two_lookups, "2x4:slow", {"*tokens": P("node"), "*places": P("node")}),
    "the gradient of a lookup of 4,095 tokens": (odd_lookup, "2x2x2", {}),
    "updates that divide by no axis": (largest_by_row, "3x2:eager", {}),
    "unique numbers": (unique_of_nine, "2x4:crawl", {}),
    "the gradient of a running maximum": (running_maximum, "2x4:crawl", {}),
    "lookups in products that wait": (clipped_lookups, "2x4", {"x": SUMS, "y": SUMS}),
    "extremes among which is no number": (extremes, "8:eager", {"x": P("gpu")}),
    "bits of integers": (bits, "8", {"x": P("gpu")}),
    "a loop without ops": (loop_without_ops, "2x4", {}),
}


UNCUT = ("a loop without ops", "the gradient of a lookup of 4,095 tokens")
"""Where there is nothing to cut, or nothing that divides."""


@pytest.mark.parametrize("name", CASES)
def test_the_step_is_right_however_it_is_cut(name: str) -> None:
    make, cluster, pins = CASES[name]
    step, args = make()
    plan = shardplan.plan(step, *args, cluster=launchless(machine(cluster)), pins=pins, backend="specs")
    assert name in UNCUT or any(loop != -1 for use in plan.session.decisions.uses.values() for loop in use.loops)
    got = plan.jit(step, backend="specs")(*plan.put(args))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        scale = float(np.abs(np.asarray(b, float), where=np.isfinite(b), out=np.zeros(np.shape(b))).max(initial=0.0)) or 1.0
        np.testing.assert_allclose(np.asarray(a, float), np.asarray(b, float), rtol=0, atol=1e-5 * scale)


def test_lookups_wait_for_each_other() -> None:
    """The two lookups' sums are reduced once, added up: their terms are looked up with indices of their own rows."""
    make, cluster, pins = CASES["two lookups added before they are reduced"]
    step, args = make()
    plan = shardplan.plan(step, *args, cluster=launchless(machine(cluster)), pins=pins, backend="specs")
    late = [t.partial for t in plan.session.decisions.layouts if t is not None and t.partial]
    assert late, "no value stays partial"


@pytest.mark.slow
def test_leaving_out_any_one_exchange_of_shares_is_noticed() -> None:
    """Halos and sums of convolutions cut in space."""

    def step(k: jax.Array, x: jax.Array) -> Any:
        loss = lambda k: jnp.mean(lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=IMAGES) ** 2)  # noqa: E731
        return k - 0.1 * jax.grad(loss)(k)

    args = normal(1, 3, 3, 4, 8), normal(0, 2, 8, 16, 4)
    plan = shardplan.plan(step, *args, cluster=machine("2x4:slow"), pins={"x": P(None, None, "gpu")})
    emitter = DroppingEmitter(plan.planned, plan.mesh(), dropped=-1)
    jax.eval_shape(emitter, *args)
    halos = [n for n, what in enumerate(emitter.exchanges) if "halo" in what]
    assert len(halos) >= 2
    caught = [not verify(plan, step, args, backend="specs", drop=n, steps=1).equal for n in range(len(emitter.exchanges))]
    assert all(caught), [what for what, seen in zip(emitter.exchanges, caught, strict=True) if not seen]
