"""Loops under `vmap` run in a plan as they run in JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardplan

COUNTS = jnp.asarray([0, 3, 1, 5, 2, 2, 7, 4], jnp.int32)
X = jnp.asarray(np.random.default_rng(0).standard_normal((8, 16)), jnp.float32)


def counted(n: Any, x: Any) -> Any:
    """Each row doubles as often as its own count says."""
    return jax.vmap(lambda n, x: lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] * 2.0), (0, x)))(n, x)


def searched(n: Any, x: Any) -> Any:
    """A test on the rows themselves, and a product with what all rows share."""
    w = jnp.eye(16) * 1.5
    return jax.vmap(lambda n, x: lax.while_loop(lambda y: jnp.sum(y * y) < 200.0 * n, lambda y: y @ w, x))(n, x)


def twice_batched(n: Any, x: Any) -> Any:
    return jax.vmap(lambda x: counted(n, x))(x.T[:, :, None] * jnp.ones(4))


@pytest.mark.parametrize("step", [counted, searched, twice_batched])
@pytest.mark.parametrize(
    "pins", [{"x": P(("node", "gpu"))}, {"x": P(None, ("node", "gpu"))}, {"x": P("node", "gpu"), "n": P("node")}]
)
def test_a_loop_with_a_test_for_each_row_stops_each_row_in_its_time(step: Any, pins: Any, eager: Any) -> None:
    plan = shardplan.plan(step, COUNTS, X, cluster=eager, pins=pins)
    for found, want in zip(
        jax.tree.leaves(plan.jit(step, backend="specs")(*plan.put((COUNTS, X)))),
        jax.tree.leaves(jax.jit(step)(COUNTS, X)),
        strict=True,
    ):
        np.testing.assert_allclose(found, want, rtol=1e-5)


def test_specs_holds_what_an_op_reads_in_its_layout_inside_a_loop() -> None:
    """A weight from outside has no layout in a body: without a constraint there, XLA's partitioner may choose another."""

    def step(w: Any, x: Any) -> Any:
        return lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=3)[0]

    w = jnp.eye(16, dtype=jnp.float32)
    plan = shardplan.plan(step, w, X, cluster="4", pins={"w": P(None, "gpu")})
    (scan,) = (e for e in plan.jit(step, jax.devices()[:4], "specs").trace(w, X).jaxpr.eqns if e.primitive.name == "scan")
    body = scan.params["jaxpr"].jaxpr
    (product,) = (e for e in body.eqns if e.primitive.name == "dot_general")
    constrained = {v for e in body.eqns if e.primitive.name == "sharding_constraint" for v in e.outvars}
    assert constrained.issuperset(product.invars)
