"""Equal instructions are run once, and what adds zeros is not run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.planning.scheduled import scheduled
from shardplan.schedule.instructions import Compute
from shardplan.verify.verify import verify


def primitives(step: Any, *args: Any, cluster: Any) -> list[str]:
    """The primitives of the ops that a device runs, and the step proven equal."""
    plan = shardplan.plan(step, *args, cluster=cluster)
    assert verify(plan, step, args, steps=1, backend="explicit").passed
    body = scheduled(plan.session).schedule.body
    return [i.node.op.primitive for i in body.instructions if isinstance(i, Compute)]


X = jnp.arange(64.0).reshape(8, 8)


@pytest.mark.parametrize(
    ("step", "left"),
    [
        (lambda x: jnp.sin(x - jnp.zeros((8, 1))), False),
        (lambda x: jnp.sin(x + jnp.zeros((8, 8))), False),
        (lambda x: jnp.sin(x - jnp.ones((8, 1))), True),
        (lambda x: jnp.sin(jnp.zeros((8, 8)) - x), True),
        (lambda x: jnp.sin(x - jax.lax.broadcasted_iota("float32", (8, 8), 0)), True),
    ],
    ids=["less zeros", "plus zeros", "less ones", "from zeros", "less numbers"],
)
def test_what_adds_zeros_is_its_operand(step: Any, left: bool, eager: Any) -> None:
    found = primitives(step, X, cluster=eager)
    assert ("sub" in found or "add" in found) == left


def test_equal_ops_are_run_once(eager: Any) -> None:
    assert primitives(lambda x: jnp.sin(x) + jnp.sin(x), X, cluster=eager).count("sin") == 1
