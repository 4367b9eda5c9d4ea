"""Gradients are transposed before they are reduced, and what is split on the way is the first dim in memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.ir import Collective
from shardplan.schedule import Bundle, Compute, Move, instructions_of
from shardplan.verify.verify import verify
from tests.machines import machine


def step(weight: Any, x: Any) -> Any:
    """A projection to heads, whose gradient JAX makes in another order than the weight's."""

    def loss(weight: Any) -> Any:
        heads = jnp.einsum("bsw,wkhd->bskhd", x, weight)
        return jnp.mean(jnp.tanh(heads) ** 2)

    value, gradient = jax.value_and_grad(loss)(weight)
    return weight - 0.1 * gradient, value


ARGS = jax.random.normal(jax.random.key(0), (32, 3, 8, 4)), jax.random.normal(jax.random.key(1), (16, 8, 32))


@pytest.mark.parametrize("cluster", ["8", "2x4:slow"])
@pytest.mark.parametrize("split", [P(), P("gpu"), P(None, None, "gpu")])
def test_a_gradient_is_transposed_before_it_is_reduced(devices: list[Any], cluster: str, split: P) -> None:
    pins = {"weight": split, "x": P("gpu")}
    plan = shardplan.plan(step, *ARGS, cluster=machine(cluster), pins=pins, donate_argnums=0, factors={})
    made: set[int] = set()
    transposed = 0
    for i in instructions_of(plan.schedule.body.instructions):
        match i:
            case Compute() if i.node.signature.contracts:
                made.update(i.results)
            case Compute() if i.node.signature.part == "transpose":
                transposed += not made.isdisjoint(v for v in i.inputs if isinstance(v, int))
            case Bundle() | Move():
                for move in i.moves if isinstance(i, Bundle) else (i,):
                    assert move.source not in made or len(move.shape) < 4, "reduced in the order of the product"
            case _:
                pass
    assert transposed
    found = verify(plan, step, ARGS, steps=2)
    assert found.passed, found


def test_what_is_split_on_the_way_is_first_in_memory(devices: list[Any]) -> None:
    """The gradient is made with a leading dim of 3, which no level divides; the weight has one that they do."""
    args = jax.random.normal(jax.random.key(0), (256, 3, 8, 4)), jax.random.normal(jax.random.key(1), (16, 8, 256))
    plan = shardplan.plan(step, *args, cluster=machine("2x2x2:slow"), donate_argnums=0, factors={}).as_baseline("data parallel")
    moves = [i for i in instructions_of(plan.schedule.body.instructions) if isinstance(i, Move) and len(i.shape) == 4]
    assert {s.kind for m in moves for s in m.steps} == {Collective.REDUCE_SCATTER, Collective.ALL_REDUCE, Collective.ALL_GATHER}
    assert {d for m in moves for s in m.steps for d, factors in enumerate(s.after.dims[:4]) if factors} == {0}
    found = verify(plan, step, args, steps=2)
    assert found.passed, found
