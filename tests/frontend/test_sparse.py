"""Arrays of `jax.experimental.sparse` inside a step: seen through to the dense ops that JAX lowers them to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

import shardplan

DENSE = np.where(np.random.default_rng(0).random((32, 48)) < 0.1, 1.5, 0.0).astype(np.float32)
X = jnp.linspace(-1, 1, 48 * 16).reshape(48, 16)
KINDS: Any = sparse
BCOO, BCSR, COO, CSR = (kind.fromdense(DENSE) for kind in (KINDS.BCOO, KINDS.BCSR, KINDS.COO, KINDS.CSR))

STEPS: dict[str, tuple[Callable[..., Any], Any]] = {
    "bcoo": (lambda data, x: KINDS.BCOO((data, BCOO.indices), shape=DENSE.shape) @ x, BCOO.data),
    "bcoo transposed": (lambda data, x: KINDS.BCOO((data, BCOO.indices), shape=DENSE.shape).T @ (x[:32] * 2), BCOO.data),
    "bcsr": (lambda data, x: KINDS.BCSR((data, BCSR.indices, BCSR.indptr), shape=DENSE.shape) @ x, BCSR.data),
    "coo": (lambda data, x: KINDS.COO((data, COO.row, COO.col), shape=DENSE.shape) @ x, COO.data),
    "csr": (lambda data, x: KINDS.CSR((data, CSR.indices, CSR.indptr), shape=DENSE.shape) @ x, CSR.data),
    "todense": (lambda data, x: KINDS.BCOO((data, BCOO.indices), shape=DENSE.shape).todense() @ x, BCOO.data),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_with_sparse_arrays_is_planned_and_right(name: str, devices: list[Any]) -> None:
    product, data = STEPS[name]

    def step(data: Any, x: Any) -> Any:
        value, gradient = jax.value_and_grad(lambda d, x: jnp.mean(jnp.tanh(product(d, x)) ** 2))(data, x)
        return data - 0.1 * gradient, value

    plan = shardplan.plan(step, data, X, cluster="2x4")
    for ours, theirs in zip(plan.jit(step, devices)(data, X), jax.jit(step)(data, X), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
