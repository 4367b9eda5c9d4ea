"""What stands behind a transposition is laid out as its other end: nothing is lost by that, and less is tried."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardplan.mesh import Cluster
from shardplan.search import memory, polish
from shardplan.search.solver import Solver

from . import steps

X = jax.ShapeDtypeStruct((64, 256), jnp.float32)
W = jax.ShapeDtypeStruct((256, 128), jnp.float32)


def turns(w: jax.Array, x: jax.Array) -> jax.Array:
    """Made by one op, read by one: the product before the transposition, and what it turns it into."""
    return jnp.tanh((x @ w).T) @ x


def twice(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The product is an output as well."""
    made = x @ w
    return made, made.T @ x


@pytest.mark.parametrize(("step", "turned"), [(turns, 2), (twice, 1)])
def test_ends_of_a_transposition_that_stand_alone(step: Callable[..., Any], turned: int) -> None:
    problem = steps.problem(step, W, X, on=Cluster.load("2x2x2"))
    assert len(problem.ops.turned) == turned


@pytest.mark.parametrize("shape", ["2x2x2", "2x4"])
def test_nothing_is_lost_by_it(shape: str) -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: jnp.tanh(jnp.tanh(x @ w).T @ x).sum())(w)

    problem = steps.problem(step, W, X, on=Cluster.load(shape))
    assert problem.ops.turned
    solver = Solver(problem, memory.liveness(problem))
    start, _ = solver.minimum("first", [(s,) for s in problem.narrowest(problem.domains)])
    for v, (_, other) in problem.ops.turned.items():
        # the other end stays as it is: one layout is left here, beside that of the start
        every = [d if u != other else (start.states[other],) for u, d in enumerate(problem.domains)]
        fewer = polish.near(problem, every, start, every)
        assert len(fewer[v]) <= 2 < len(every[v])
        alone = [fewer[v] if u == v else d for u, d in enumerate(every)]
        least, same = (solver.minimum("x", domains)[1] for domains in (every, alone))
        assert math.isfinite(least)
        assert same == pytest.approx(least, rel=1e-9)
