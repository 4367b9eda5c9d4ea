"""`jax.lax.platform_dependent`: one of its branches is for the devices that run the step, and the same for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan import tdl
from shardplan.tdl.coverage import sort_one
from shardplan.tdl.describe import forget
from shardplan.verify.verify import verify

X = np.arange(64.0, dtype=np.float32).reshape(8, 8) - 20


@pytest.fixture
def on_tpu() -> Iterator[Primitive]:
    """An op that nothing but a TPU can be lowered for."""
    made = Primitive("only_on_tpu")
    made.def_abstract_eval(lambda x: x)
    mlir.register_lowering(made, mlir.lower_fun(lambda x: 2 * x, multiple_results=False), platform="tpu")
    tdl.rule("only_on_tpu")(lambda _, x: lambda i, j: tdl.apply("tpu", x[i, j]))
    yield made
    forget("only_on_tpu")


def test_the_branch_of_another_platform_is_not_even_lowered(on_tpu: Primitive, eager: Any) -> None:
    def step(x: Any) -> Any:
        return jax.lax.platform_dependent(x, tpu=on_tpu.bind, default=lambda x: 3 * x) + 1

    plan = shardplan.plan(step, X, cluster=eager, pins={"x": P("node", "gpu")})
    assert np.array_equal(plan.jit(step)(*plan.put((X,))), 3 * X + 1)


@pytest.mark.parametrize("objective", ["time", "bytes"])
@pytest.mark.parametrize("vmapped", [False, True])
def test_a_diagonal_runs_as_planned(vmapped: bool, objective: str, eager: Any) -> None:
    """What is predicted is what is sent: the price is that of the branch which runs, not of the one for kernels' insides."""
    step, x = (jax.vmap(jnp.diag), np.stack([X, X + 1])) if vmapped else (jnp.diag, X)
    plan = shardplan.plan(step, x, cluster=eager, objective=objective)
    found = verify(plan, step, (x,))
    assert found.passed
    assert found.measured_bytes == pytest.approx(found.predicted_bytes, rel=0.01)


def test_the_number_of_a_branch_is_not_said_to_have_a_body() -> None:
    found = sort_one("platform_index")
    assert found is not None
    assert (found.kind, "body" in found.reason) == ("structural", False)
