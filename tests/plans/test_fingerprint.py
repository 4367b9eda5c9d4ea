"""What makes two steps the same: what they compute, not where they were written or when they were traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardplan.frontend.trace import trace
from shardplan.plans.fingerprint import difference, fingerprint

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
