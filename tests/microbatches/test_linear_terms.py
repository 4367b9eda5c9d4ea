"""Gradients of one layer's weights that are made of several terms, inside of a loop over layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.errors import MicrobatchError
from shardplan.verify.verify import verify

WIDTH = 8
Layer = Callable[[jax.Array, jax.Array], jax.Array]


def changed(change: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """The identity, whose gradient is changed, given the weight."""

    @jax.custom_vjp
    def same(w: jax.Array) -> jax.Array:
        return w

    same.defvjp(lambda w: (w, w), lambda w, gradient: (change(gradient, w),))
    return same


def step_of(layer: Layer) -> tuple[Any, tuple[jax.Array, jax.Array]]:
    """A step over four layers of two matrices each."""

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(w: jax.Array) -> jax.Array:
            return jnp.mean(jax.lax.scan(lambda h, own: (layer(h, own), None), x, w)[0] ** 2)

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * gradient, value

    keys = jax.random.split(jax.random.key(0))
    return step, (jax.random.normal(keys[0], (4, 2, WIDTH, WIDTH)) / 3, jax.random.normal(keys[1], (8, WIDTH)))


def _in_turn(h: jax.Array, w: jax.Array) -> jax.Array:
    return h + jnp.tanh(jnp.tanh(h @ w[0]) @ w[1])


def _split(h: jax.Array, w: jax.Array) -> jax.Array:
    a, b = jnp.split(w.reshape(WIDTH, 2 * WIDTH), 2, axis=1)
    return h + jnp.tanh(h @ a) @ b


def _twice(h: jax.Array, w: jax.Array) -> jax.Array:
    return h * w[0, 0] + jnp.tanh(jnp.tanh(h @ w[1]) @ w[1].T)


def _scaled(h: jax.Array, w: jax.Array) -> jax.Array:
    return h + jnp.tanh(h @ changed(lambda g, _: 0.5 * g)(w[0]))


@pytest.mark.parametrize("layer", [_in_turn, _split, _twice, _scaled])
@pytest.mark.parametrize(
    "options", [{"cluster": "2x2"}, pytest.param({"cluster": "4", "axes": {"stage": 2}}, marks=pytest.mark.slow)], ids=str
)
def test_gradients_of_several_terms_are_added_up_after_the_loop(layer: Layer, options: dict[str, Any]) -> None:
    step, args = step_of(layer)
    found = verify(shardplan.plan(step, *args, microbatches=2, **options), step, args)
    assert found.passed, found


@pytest.mark.parametrize(
    "change",
    [
        lambda g, _: g / jnp.maximum(1.0, jnp.linalg.norm(g)),
        lambda g, _: jnp.where(g > 0, g, 0.1 * g),
        lambda g, w: g + 0.1 * w,
        lambda g, _: g * jnp.mean(g),
    ],
    ids=["clipped", "by sign", "with decay", "squared"],
)
def test_what_is_not_linear_in_a_gradient_needs_all_of_it(change: Callable[[jax.Array, jax.Array], jax.Array]) -> None:
    step, args = step_of(lambda h, w: h + jnp.tanh(h @ changed(change)(w[0])))
    with pytest.raises(MicrobatchError, match=r"test_linear_terms.py:\d+ .*inside a loop, its sum over all microbatches is read"):
        shardplan.plan(step, *args, cluster="2x2", microbatches=2)
