"""Slices and scatters that a partitioned program cuts once more: the same numbers wherever their starts lie.

XLA joins nested dynamic slices without clamping the inner one; each of these steps was wrong on some number of devices before its
starts were clamped and its operands fenced.
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
from shardplan.emit.backends import BACKENDS
from shardplan.tdl import rewrite
from shardplan.tdl.rewrite import cuttable
from shardplan.tdl.xla_quirks import merges_slices

ROW = jnp.arange(1.0, 25.0)
ROWS = jnp.arange(96.0).reshape(4, 24)


def rolled(x: jax.Array) -> jax.Array:
    return jnp.roll(x, 1)


def windows(x: jax.Array, starts: jax.Array) -> jax.Array:
    return jax.vmap(lambda s: lax.dynamic_slice(x, (s,), (12,)))(starts)


def repeated(x: jax.Array) -> jax.Array:
    return jnp.repeat(x, jnp.array([0, 2, 1] * 8), axis=0, total_repeat_length=30)


def shifted_labels(w: jax.Array, tokens: jax.Array) -> jax.Array:
    labels = jnp.roll(tokens, -1).at[-1].set(0)
    loss = jax.value_and_grad(lambda w: -jax.nn.log_softmax(w[tokens] @ w.T)[jnp.arange(24), labels].mean())
    return loss(w)[1]


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, P]]] = {
    "set after roll": (lambda x: rolled(x).at[0].set(0.0), (ROW,), {"x": P("gpu")}),
    "add after roll": (lambda x: rolled(x).at[0].add(5.0), (ROW,), {"x": P("gpu")}),
    "set after concatenation": (lambda x: jnp.concatenate([x[3:], x[:3]]).at[5].set(0.0), (ROW,), {"x": P("gpu")}),
    "set after pad": (lambda x: jnp.pad(x[:-1], (1, 0)).at[3].set(0.0), (ROW,), {"x": P("gpu")}),
    "set a column": (lambda x: jnp.roll(x, 1, 1).at[:, 0].set(5.0), (ROWS,), {"x": P(None, "gpu")}),
    "repeat": (repeated, (ROW,), {}),
    "slice beyond the end": (lambda x, i: lax.dynamic_slice(x, (i,), (12,)) * 2, (ROW, jnp.int32(21)), {"x": P("gpu")}),
    "slice before the start": (lambda x, i: lax.dynamic_slice(x, (i,), (12,)) * 2, (ROW, jnp.int32(-90)), {"x": P("gpu")}),
    "short index": (lambda x, i: lax.dynamic_slice(x, (i,), (12,)) * 2, (ROW, jnp.uint8(200)), {"x": P("gpu")}),
    "update beyond the end": (
        lambda x, u, i: lax.dynamic_update_slice(rolled(x), u, (i,)) * 2,
        (ROW, -jnp.ones(12), jnp.int32(22)),
        {"x": P("gpu"), "u": P("gpu")},
    ),
    "windows beyond the end": (windows, (ROW, jnp.array([0, 5, 20, 13, 30, -30] * 2)), {"x": P("gpu")}),
    "a window beyond the end": (windows, (ROW, jnp.array([20])), {"x": P("gpu")}),
    "labels of a language model": (shifted_labels, (jnp.sin(jnp.arange(512.0)).reshape(32, 16), jnp.arange(24) * 7 % 32), {}),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ways", [3, 4])
@pytest.mark.parametrize("name", CASES)
def test_a_step_that_slices_or_scatters_has_the_same_numbers(
    name: str, ways: int, backend: str, slow_devices: Callable[..., Any]
) -> None:
    step, args, pins = CASES[name]
    plan = shardplan.plan(step, *args, cluster=slow_devices(ways), pins=pins, backend=backend)
    found = plan.jit(step)(*plan.put(args))
    np.testing.assert_allclose(np.asarray(found), np.asarray(jax.jit(step)(*args)), rtol=1e-5, atol=1e-6)


def apart(x: jax.Array, starts: jax.Array) -> jax.Array:
    """Each device slices its own columns; the rows of what it finds are cut once more."""
    return lax.map(lambda s: lax.dynamic_slice(x, (s, 0), (12, 48)) * 2, starts)


@pytest.mark.parametrize("cluster", ["2x4", "2x2x2"])
def test_a_slice_that_each_device_makes_of_its_own_share_has_the_same_numbers(cluster: str) -> None:
    x, starts = jnp.arange(24.0 * 48).reshape(24, 48), jnp.array([0, 5, 12, 13, 40, -3])
    plan = shardplan.plan(apart, x, starts, cluster=cluster, pins={"x": P("node", "gpu")})
    found = plan.jit(apart)(*plan.put((x, starts)))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(jax.jit(apart)(x, starts)))


def test_what_has_no_elements_is_not_split(slow_devices: Callable[..., Any]) -> None:
    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.concatenate([x[:0] @ y.T, jnp.zeros((0, 24))])

    args = jnp.ones((24, 48)), jnp.ones((24, 48))
    plan = shardplan.plan(step, *args, cluster=slow_devices(4))
    assert np.asarray(plan.jit(step)(*plan.put(args))).shape == (0, 24)


NESTED: dict[str, Callable[[Any, Any], Any]] = {
    "a slice of a slice": lambda x, i: lax.dynamic_slice(lax.dynamic_slice(x, (i,), (6,)), (i % 3,), (2,)),
    "a row of a slice": lambda x, i: lax.dynamic_slice(x, (i - 6,), (6,)).at[i].set(0.0, mode="drop"),
}


@pytest.mark.parametrize("name", NESTED)
def test_the_compiler_merges_slices_in_the_releases_that_are_said_to(name: str) -> None:
    function, merged = NESTED[name], False
    for i in (7, 12, 21, 30):
        with jax.disable_jit():
            expected = function(ROW, jnp.int32(i))
        merged |= not np.array_equal(jax.jit(function)(ROW, jnp.int32(i)), expected)
    assert merged == merges_slices()


def test_starts_of_windows_are_clamped_where_the_op_clamps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    jaxpr = jax.make_jaxpr(windows)(ROW, jnp.array([20, -3, 4])).jaxpr
    (gather,) = [e for e in jaxpr.eqns if e.primitive.name == "gather"]
    starts = jnp.array([[20], [-3], [4]], jnp.int32)
    monkeypatch.setattr(rewrite, "merges_slices", lambda: True)
    assert cuttable("gather", [ROW, starts], gather.params)[1].tolist() == [[12], [0], [4]]
    other = gather.params | {"mode": lax.GatherScatterMode.FILL_OR_DROP}
    assert cuttable("gather", [ROW, starts], other)[1] is starts
