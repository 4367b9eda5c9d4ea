"""What makes two steps the same: what they compute, not where they were written or when they were traced."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardplan.frontend.trace import trace
from shardplan.plans.fingerprint import difference, fingerprint, first_difference, marks

X = jax.ShapeDtypeStruct((8, 8), jnp.float32)

Step = Callable[[Any], Any]


def power(n: int) -> Step:
    return lambda x: x**n


def folded(scale: float) -> Step:
    return lambda x: jax.lax.reduce(x, jnp.float32(0), lambda a, b: a + scale * b, (0,))


def looped(scale: float) -> Step:
    return lambda x: jax.lax.scan(lambda c, row: (c + scale * row, None), x[0], x)[0]


def cut(at: int) -> Step:
    return lambda x: jax.lax.slice(x, (at, 0), (at + 2, 8))


STEPS: list[Callable[[Any], Step]] = [power, folded, looped, cut]


@pytest.mark.parametrize("make", STEPS, ids=[m.__name__ for m in STEPS])
def test_a_step_made_twice_is_one_step_and_another_parameter_is_another(make: Callable[[Any], Step]) -> None:
    one, same, other = (trace(make(n), X) for n in (2, 2, 3))
    assert fingerprint(one) == fingerprint(same)
    assert difference(one, same) == ""
    assert fingerprint(one) != fingerprint(other)
    assert "test_fingerprint.py" in difference(one, other)


def test_steps_differ_first_in_their_arguments() -> None:
    wide = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    assert difference(trace(power(2), X), trace(power(2), wide)) == "x was float32[8, 8] and is float32[8, 16]"
    assert difference(trace(power(2), X), trace(lambda y: y**2, X)) == "x, float32[8, 8], is missing"


def trained(rate: float, floor: float = 0.0) -> Step:
    """A step whose learning rate and floor are single floats of the program."""
    return lambda x: jnp.maximum(x - rate * jax.grad(lambda x: jnp.sum(jnp.tanh(x) ** 2))(x), floor)


def test_a_learning_rate_is_a_number_that_no_plan_depends_on() -> None:
    one, other = trace(trained(1e-3), X), trace(trained(3e-4), X)
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one, numbers=False) == fingerprint(other, numbers=False)
    assert marks(one) == marks(other)
    assert first_difference(marks(one), other) == ""


@pytest.mark.parametrize("special", [0.0, 1.0, -1.0, float("inf"), float("nan")])
def test_numbers_that_ops_treat_in_a_way_of_their_own_change_a_plan(special: float) -> None:
    one, other = trace(trained(1e-3, 0.5), X), trace(trained(1e-3, special), X)
    assert fingerprint(one, numbers=False) != fingerprint(other, numbers=False)
    assert re.fullmatch(r"max at .*test_fingerprint\.py.* is another one than was planned", first_difference(marks(one), other))


def test_numbers_of_integers_and_arrays_change_a_plan() -> None:
    for one, other in ((cut(2), cut(3)), (lambda x: x * jnp.array([0.5] * 8), lambda x: x * jnp.array([0.25] * 8))):
        assert fingerprint(trace(one, X), numbers=False) != fingerprint(trace(other, X), numbers=False)


def test_the_first_op_that_differs_is_named() -> None:
    planned = marks(trace(lambda x: jnp.sin(x) + 0.5, X))
    assert first_difference(planned, trace(lambda x: jnp.cos(x) + 0.5, X)).endswith("is where sin was")
    assert first_difference(planned, trace(lambda x: jnp.sin(x), X)) == "the planned add and all after it are gone"
    assert first_difference(planned, trace(lambda x: jnp.sin(x) + 0.5 - x, X)).endswith("is new")
