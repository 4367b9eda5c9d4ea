"""Windows that reach over a block's edge, through a plan: XLA runs there what the proof of a description does not."""

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

X = -1.0 - np.random.default_rng(0).permutation(2 * 16 * 16).reshape(2, 16, 16).astype(np.float32) / 8
CUT = P(None, "node", "gpu")


def window(start: float, reducer: Any, padding: Any = "SAME", stride: int = 1, **dilation: Any) -> Callable[[Any], Any]:
    return lambda x: lax.reduce_window(x, start, reducer, (1, 3, 3), (1, stride, stride), padding, **dilation)


def gradient(pool: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: jax.grad(lambda x: jnp.sum(pool(x) ** 2))(x)


def tangent(pool: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: jax.jvp(pool, (x,), (x * x,))[1]


def convolved(stride: int = 1, padding: Any = "SAME", **dilation: Any) -> Callable[[Any], Any]:
    kernel = jax.random.normal(jax.random.key(1), (1, 1, 3, 3))
    return lambda x: lax.conv_general_dilated(x[:, None], kernel, (stride, stride), padding, **dilation)


def grouped(x: jax.Array) -> jax.Array:
    """Two groups of two channels."""
    kernel = jax.random.normal(jax.random.key(1), (4, 2, 3, 3))
    return lax.conv_general_dilated(jnp.stack([x, 2 * x, x + 1, -x], 1), kernel, (1, 1), "SAME", feature_group_count=2)


NAME = "select_and_scatter_add"
UNEVEN = ((0, 0), (2, 1), (1, 2))
HIGHEST, LOWEST = (jnp.inf, lax.min), (-jnp.inf, lax.max)
STEPS = {
    "max": window(*LOWEST),
    "min": window(*HIGHEST),
    "max, stride 2": window(*LOWEST, stride=2),
    "max, dilated": window(*LOWEST, padding=((0, 0), (2, 2), (2, 2)), window_dilation=(1, 2, 2)),
    "max of a dilated operand": window(*LOWEST, padding=((0, 0), (1, 2), (1, 2)), stride=2, base_dilation=(1, 2, 2)),
    "sum": window(0.0, lax.add),
    "sum, padded unevenly": window(0.0, lax.add, UNEVEN),
    "sum from 5": window(5.0, lax.add),
    "sum from 5, stride 2": window(5.0, lax.add, stride=2),
    "sum from 5, no padding": window(5.0, lax.add, "VALID"),
    "product": window(1.0, lax.mul),
    "by a function": window(0.5, lambda a, b: 1.5 * jnp.minimum(a, b)),
    "gradient of max": gradient(window(*LOWEST)),
    "gradient of max, stride 2": gradient(window(*LOWEST, stride=2)),
    "gradient of max, padded unevenly": gradient(window(*LOWEST, UNEVEN)),
    "gradient of max, in a row": gradient(lambda x: lax.reduce_window(x, *LOWEST, (1, 1, 3), (1, 1, 1), "SAME")),
    "gradient of max, no padding": gradient(window(*LOWEST, "VALID")),
    "gradient of min": gradient(lambda x: window(*HIGHEST)(-x)),
    "tangent of max": tangent(window(*LOWEST)),
    "tangent of min": tangent(lambda x: window(*HIGHEST)(-x)),
    "tangent of the gradient of max": tangent(gradient(window(*LOWEST))),
    "convolution": convolved(),
    "convolution, stride 2": convolved(2),
    "convolution, dilated": convolved(padding=((2, 2), (2, 2)), rhs_dilation=(2, 2)),
    "convolution of a dilated operand": convolved(padding=((1, 2), (1, 2)), lhs_dilation=(2, 2)),
    "gradient of a convolution": gradient(convolved()),
    "convolution in groups": grouped,
    "gradient of a convolution in groups": gradient(grouped),
    **{f.__name__: lambda x, f=f: f(x / 200.0, axis=2) for f in (lax.cumsum, lax.cumprod, lax.cummax, lax.cumlogsumexp)},
    "cumsum from the end": lambda x: lax.cumsum(x, axis=1, reverse=True),
    "padding": lambda x: lax.pad(x, jnp.float32(7.0), ((0, 0, 0), (1, -1, 0), (2, 1, 1))),
    "slices": lambda x: x[:, 1:15] + x[:, 2:],
    "differences": lambda x: jnp.diff(x, axis=1, prepend=2.0) + jnp.roll(x, 3, 2),
}


@pytest.mark.parametrize("name", STEPS)
def test_what_reaches_over_a_blocks_edge_is_what_it_is_whole(name: str, eager: Any) -> None:
    step = STEPS[name]
    plan = shardplan.plan(step, X, cluster=eager, pins={"x": CUT})
    found = plan.jit(step, backend="specs")(*plan.put((X,)))
    np.testing.assert_allclose(found, jax.jit(step)(X), rtol=1e-5, atol=1e-4)


def test_max_poolings_gradient_is_cut_along_its_windows(eager: Any) -> None:
    plan = shardplan.plan(STEPS["gradient of max"], X, cluster=eager, pins={"x": CUT})
    use = plan.session.decisions.uses[next(n.id for n in plan.session.problem.graph.nodes if n.op.primitive == NAME)]
    assert use is not None
    assert set(use.loops) & {1, 2}  # of its own dims, of which the first is the batch
