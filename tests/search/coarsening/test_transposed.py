"""What stands behind a transposition is laid out as its other end: nothing is lost by that, and less is tried."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardplan.mesh import Cluster
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.strategy import polish
from tests.search import steps

X = jax.ShapeDtypeStruct((64, 256), jnp.float32)
W = jax.ShapeDtypeStruct((256, 128), jnp.float32)


def turns(w: jax.Array, x: jax.Array) -> jax.Array:
    """Made by one op, read by one: the product before the transposition, and what it turns it into."""
    return jnp.tanh((x @ w).T) @ x


def twice(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The product is an output as well."""
    made = x @ w
    return made, made.T @ x


@pytest.mark.parametrize(("step", "turned"), [(turns, 1), (twice, 1)])
def test_ends_of_a_transposition_that_stand_alone(step: Callable[..., Any], turned: int) -> None:
    problem = steps.problem(step, W, X, on=Cluster.load("2x2x2"))
    assert len(problem.turned) == turned


def inside(w: jax.Array, x: jax.Array) -> jax.Array:
    """What is turned is computed further there."""
    return jnp.tanh((x @ jnp.tanh(x.T @ (x @ w))).T) @ x


def trained(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - 0.1 * jax.grad(lambda w: jnp.tanh(jnp.tanh(x @ w).T @ x).sum())(w)


def seldom(w: jax.Array, x: jax.Array) -> jax.Array:
    """What is made in any case is turned in one case."""
    made = x @ w
    return jax.lax.cond(
        x[0, 0] > 0, lambda: made.T @ x, lambda: jnp.ones((W.shape[1], X.shape[0])) @ x @ jnp.ones(X.shape[1:] * 2)
    )


MADE, TURNED = (X.shape[0], W.shape[1]), (W.shape[1], X.shape[0])


@pytest.mark.parametrize(("step", "turned"), [(turns, MADE), (seldom, TURNED)])
def test_what_is_computed_there_or_made_more_often_keeps_all_layouts(step: Callable[..., Any], turned: tuple[int, ...]) -> None:
    problem = steps.problem(step, W, X, on=Cluster.load("2x2x2"))
    assert {problem.coarse.variables[v].shape for v in problem.turned} == {turned}


@pytest.mark.parametrize("step", [trained, turns, inside])
@pytest.mark.parametrize("shape", ["2x2x2", "2x4"])
def test_nothing_is_lost_by_it(shape: str, step: Callable[..., Any]) -> None:
    problem = steps.problem(step, W, X, on=Cluster.load(shape))
    assert problem.turned
    solver = Solver(problem, memory.liveness(problem))
    start, _ = solver.minimum("first", [(s,) for s in problem.narrowest(problem.domains)])
    for v, (_, other) in problem.turned.items():
        # the other end stays as it is: one layout is left here, beside that of the start
        every = [d if u != other else (start.states[other],) for u, d in enumerate(problem.domains)]
        fewer = polish.near(problem, every, start, every)
        assert len(fewer[v]) <= 2 < len(every[v])
        alone = [fewer[v] if u == v else d for u, d in enumerate(every)]
        least, same = (solver.minimum("x", domains)[1] for domains in (every, alone))
        assert math.isfinite(least)
        assert same == pytest.approx(least, rel=1e-9)
