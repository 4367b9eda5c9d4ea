"""A step that can be cut into microbatches is cut: what a value is made of decides its layout, not its shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import shardplan
from models import rnnlm
from shardplan.verify.verify import verify

WIDTH, BATCH = 16, 48
State = dict[str, Any]
Loss = Callable[[State, State, jax.Array], jax.Array]

REAL = jax.random.normal(jax.random.key(1), (BATCH, WIDTH))


def state_of(depth: tuple[int, ...] = ()) -> State:
    """The weights of a discriminator and a generator, and a key."""
    first, second, third = jax.random.split(jax.random.key(0), 3)
    w = jax.random.normal(first, (*depth, WIDTH, WIDTH)) / 4
    v, g = jax.random.normal(second, (WIDTH, 1)) / 4, jax.random.normal(third, (WIDTH, WIDTH)) / 4
    return {"p": {"w": w, "b": jnp.zeros(WIDTH), "v": v, "g": g}, "key": jax.random.key(7)}


def step_of(loss: Loss) -> Any:
    """A step that trains the weights."""

    def step(state: State, real: jax.Array) -> tuple[State, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(state["p"], state, real)
        return {**state, "p": jax.tree.map(lambda p, g: p - 0.1 * g, state["p"], gradient)}, value

    return step


def noise(state: State, rows: int = BATCH, n: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.fold_in(state["key"], n), (rows, WIDTH))


def judged(p: State, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]


def squares(rows: int) -> Loss:
    def loss(p: State, state: State, real: jax.Array) -> jax.Array:
        return jnp.mean(judged(p, real) ** 2) + jnp.mean((judged(p, noise(state, rows)) - 1) ** 2)

    return loss


def made_of_noise(p: State, state: State, real: jax.Array) -> jax.Array:
    made = jax.lax.stop_gradient(jnp.tanh(noise(state) @ p["g"]))
    return jnp.mean(judged(p, real) ** 2) + jnp.mean((judged(p, made) - 1) ** 2)


def normalized(p: State, state: State, real: jax.Array) -> jax.Array:
    """The noise is normalized over all of its rows: no cut of them is legal."""
    z = noise(state)
    made = judged(p, (z - jnp.mean(z, 0)) / jnp.std(z, 0))
    return jnp.mean(judged(p, real) ** 2) + jnp.mean((made / jnp.linalg.norm(made) - 1) ** 2)


def three_kinds(p: State, state: State, real: jax.Array) -> jax.Array:
    """Enough uses of one weight to be taken for timesteps."""
    return sum((jnp.mean(judged(p, x) ** 2) for x in (real, noise(state), noise(state, n=1), -real)), jnp.float32(0))


def with_penalty(p: State, state: State, real: jax.Array) -> jax.Array:
    """WGAN-GP: the noise meets the batch inside of the step, too."""
    z = noise(state)
    share = jax.random.uniform(state["key"], (BATCH, 1))
    slopes = jax.vmap(jax.grad(lambda x: judged(p, x[None])[0, 0]))(share * real + (1 - share) * z)
    penalty = jnp.mean((jnp.linalg.norm(slopes, axis=1) - 1) ** 2)
    return jnp.mean(judged(p, z)) - jnp.mean(judged(p, real)) + penalty


def layers(p: State, state: State, real: jax.Array) -> jax.Array:
    def through(x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["w"])[0] ** 2)

    return through(real) + through(noise(state))


@pytest.mark.parametrize(
    ("loss", "depth"),
    [
        pytest.param(squares(BATCH), (), marks=pytest.mark.slow),
        pytest.param(squares(45), (), marks=pytest.mark.slow),
        pytest.param(made_of_noise, (), marks=pytest.mark.slow),
        pytest.param(normalized, (), marks=pytest.mark.slow),
        (three_kinds, ()),
        pytest.param(with_penalty, (), marks=pytest.mark.slow),
        (layers, (3,)),
    ],
    ids=["as many fakes", "fewer fakes", "generator", "normalized", "three kinds", "penalty", "layers"],
)
def test_noise_beside_the_batch_may_have_its_shape(loss: Loss, depth: tuple[int, ...]) -> None:
    step, args = step_of(loss), (state_of(depth), REAL)
    plan = shardplan.plan(step, *args, cluster="2", microbatches=4, batch_argnums=1, donate_argnums=0)
    assert plan.microbatches.count == 4
    found = verify(plan, step, args)
    assert found.passed, found


@pytest.mark.slow
def test_a_gan_in_stages_trains_as_on_one_device() -> None:
    step, args = step_of(squares(BATCH)), (state_of(), REAL)
    plan = shardplan.plan(step, *args, cluster="2", microbatches=4, axes={"stage": 2}, donate_argnums=0)
    found = verify(plan, step, args)
    assert found.passed, found


def of_a_sum(w: jax.Array, x: jax.Array) -> jax.Array:
    """Reads sums over the batch element by element; nothing replaces an argument."""
    return jnp.tanh(x.T @ jnp.tanh(x @ w))


def norm_of_noise(w: jax.Array, x: jax.Array) -> jax.Array:
    """The noise depends on no argument, and is read as a whole before it meets the batch."""
    z = jax.random.normal(jax.random.key(3), x.shape)
    return jnp.sum(x @ w * z) / jnp.linalg.norm(z)


@pytest.mark.parametrize("step", [of_a_sum, norm_of_noise])
def test_sums_and_noise_are_read_as_a_whole(step: Any) -> None:
    args = jnp.eye(WIDTH) / 2, REAL
    found = verify(shardplan.plan(step, *args, cluster="2", microbatches=4, batch_argnums=1), step, args)
    assert found.passed, found


@pytest.mark.slow
def test_a_recurrent_net_in_microbatches_trains_as_at_once() -> None:
    step, args = rnnlm.train_step(concrete=True)
    plan = shardplan.plan(step, *args, cluster="2", microbatches=2, donate_argnums=0)
    found = verify(plan, step, args)
    assert found.passed, found


def test_a_scan_over_the_rows_of_the_batch_is_refused_though_other_rows_go_with_its_slices() -> None:
    """The slices meet a carry that is split along its rows, which would split the columns of the scanned array."""

    def step(w: jax.Array, x: jax.Array, start: jax.Array, rows: jax.Array) -> Any:
        def loss(w: jax.Array) -> Any:
            kept = lax.scan(lambda c, u: (c * 3 + u, jnp.maximum(c, u)), start, rows)[1]
            return jnp.mean((x @ w) ** 2), kept

        (value, kept), gradient = jax.value_and_grad(loss, has_aux=True)(w)
        return w - 0.1 * gradient, value, kept

    args = jnp.ones((8, 8)), jnp.ones((24, 8)), jnp.ones(24, "int32"), jnp.ones((24, 24), "int32")
    with pytest.raises(shardplan.ShardplanError, match=r"cannot be cut into microbatches: at .*test_legal_cuts.py"):
        shardplan.plan(step, *args, cluster="2x4", microbatches=2)
