"""A planned step and its arguments: it takes what was planned, says what is not, and costs and compiles nothing twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import shardplan


def step(state: Any, batch: Any) -> Any:
    return {"w": state["w"] - 0.1 * batch["x"].mean()}, (batch["x"] @ state["w"]).mean()


STATE, BATCH = {"w": jnp.ones((64, 32))}, {"x": jnp.ones((128, 64))}


@pytest.fixture(scope="module")
def plan() -> shardplan.Plan:
    return shardplan.plan(step, STATE, BATCH, cluster="2x4", donate_argnums=0)


WRONG: dict[str, tuple[tuple[Any, ...], str]] = {
    "a smaller batch": ((STATE, {"x": jnp.ones((64, 64))}), r"batch/x is float32\[64, 64\].*for float32\[128, 64\]"),
    "another dtype": (({"w": jnp.ones((64, 32), jnp.bfloat16)}, BATCH), r"state/w is bfloat16\[64, 32\].*for float32\[64, 32\]"),
    "no array": (({"w": "w"}, BATCH), r"state/w is str"),
    "another key": ((STATE, {"y": jnp.ones((128, 64))}), "batch/y stands in place of batch/x"),
    "one more": ((STATE, {"x": BATCH["x"], "z": 1}), "batch/z is not in the plan"),
    "one less": ((STATE,), "batch/x is missing"),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_were_not_planned_are_refused_by_name(plan: shardplan.Plan, name: str, devices: list[Any]) -> None:
    args, says = WRONG[name]
    with pytest.raises(shardplan.ShardplanError, match=says):
        plan.jit(step, devices)(*args)
    with pytest.raises(shardplan.ShardplanError, match=says):
        plan.jit(step, devices).lower(*args)
    with pytest.raises(shardplan.ShardplanError, match=says):
        plan.put(args, mesh=plan.mesh(devices))


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (
            {"x": np.ones((100, 64), np.float32)},
            r"batch/x is given as float32\[100, 64\].* for float32\[128, 64\]: the one process .*: pass float32\[128, 64\]$",
        ),
        ({"x": np.ones((256, 64), np.float32)}, r"batch/x is.*float32\[256, 64\]"),
        ({"x": np.ones((128, 64), np.int32)}, r"batch/x is given as int32"),
        ({"y": np.ones((128, 64), np.float32)}, "batch/y stands in place of batch/x"),
    ],
)
def test_a_process_gives_the_part_that_was_planned(plan: shardplan.Plan, batch: Any, says: str, devices: list[Any]) -> None:
    with pytest.raises(shardplan.ShardplanError, match=says):
        plan.put_local(batch, mesh=plan.mesh(devices))
    placed = plan.put_local({"x": np.ones((128, 64))}, mesh=plan.mesh(devices))
    assert placed["x"].dtype == jnp.float32


def test_a_donated_array_is_not_taken_again(plan: shardplan.Plan, devices: list[Any]) -> None:
    run, mesh = plan.jit(step, devices), plan.mesh(devices)
    state, batch = plan.put(({"w": jnp.ones((64, 32))}, BATCH), mesh=mesh)
    run(state, batch)
    for again in (lambda: run(state, batch), lambda: plan.put((state, batch), mesh=mesh)):
        with pytest.raises(shardplan.ShardplanError, match="state/w was donated to an earlier call"):
            again()


def test_a_donated_array_that_is_given_twice_is_refused(plan: shardplan.Plan, devices: list[Any]) -> None:
    twice = jnp.ones((8, 8))

    def ema(state: Any, rate: Any) -> Any:
        return {"ema": state["ema"] * rate, "w": state["w"] - rate}, rate

    planned = shardplan.plan(ema, {"ema": twice, "w": twice}, 0.5, cluster="8", donate_argnums=0)
    run = planned.jit(ema, devices)
    with pytest.raises(shardplan.ShardplanError, match=r"state/ema and state/w are the same array, which is donated"):
        run({"ema": twice, "w": twice}, 0.5)
    state, _ = run({"ema": twice, "w": jnp.copy(twice)}, 0.5)
    assert float(state["ema"][0, 0]) == float(state["w"][0, 0]) == 0.5
    x = jnp.ones((64, 64))
    same = shardplan.plan(lambda a, b: a + b, x, x, cluster="8")
    assert float(same.jit(same.step, devices)(x, x)[0, 0]) == 2.0  # nothing is donated


def test_a_planned_step_has_the_names_of_a_wrapped_function(plan: shardplan.Plan, devices: list[Any]) -> None:
    run = plan.jit(step, devices)
    assert (run.__name__, run.__wrapped__, repr(run)) == ("step", step, "<step, planned for 8 devices>")


def test_a_static_part_that_does_the_same_is_taken_and_comes_back(devices: list[Any]) -> None:
    def make(rate: float) -> TrainState:
        return TrainState.create(apply_fn=lambda p, x: x @ p["w"], params={"w": jnp.ones((64, 32))}, tx=optax.sgd(rate))

    def trains(state: TrainState, x: jax.Array) -> TrainState:
        return state.apply_gradients(grads=jax.grad(lambda p: (state.apply_fn(p, x) ** 2).mean())(state.params))

    x = jnp.ones((16, 64))
    run = shardplan.plan(trains, make(0.1), x, cluster="2x4").jit(trains, devices)
    other = make(0.1)
    assert run(other, x).tx is other.tx
    with pytest.raises(shardplan.ShardplanError, match="static parts of these arguments"):
        run(make(0.2), x)


def test_numbers_of_python_are_planned_once(devices: list[Any]) -> None:
    """A train state counts its steps from a Python 0; the count that comes back is as weakly typed as under jit."""

    def counts(state: Any, x: Any) -> Any:
        return {"step": state["step"] + 1, "w": state["w"] * x.mean()}

    run = shardplan.parallelize("2x4", devices=devices)(counts)
    state, plain = ({"step": 0, "w": np.ones((8, 8))} for _ in range(2))
    plans: set[int] = set()
    for _ in range(3):
        state, plain = run(state, jnp.ones(8)), jax.jit(counts)(plain, jnp.ones(8))
        plans.add(id(run.plan))
        assert state["step"].weak_type == plain["step"].weak_type
    assert len(plans) == 1
    assert run.cache_size() == 1


def test_weak_and_strong_numbers_are_told_apart(devices: list[Any]) -> None:
    run = shardplan.parallelize("4", devices=devices[:4])(lambda x, rate: x * rate)
    x = jnp.ones(8, jnp.bfloat16)
    for rate in (0.5, np.float32(0.5), 0.25, True):
        want, got = jax.jit(lambda x, rate: x * rate)(x, rate), run(x, rate)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_shapes_that_alternate_keep_their_plans(devices: list[Any]) -> None:
    run = shardplan.parallelize("4", devices=devices[:4])(lambda x: x.mean())
    for n in (8, 16, 8, 16, 3):
        assert float(run(jnp.arange(float(n)))) == pytest.approx((n - 1) / 2)
    assert run.cache_size() == 3


@pytest.mark.parametrize(
    ("around", "want"),
    [
        (lambda f, x: jax.jit(f)(x), lambda x: (x**2).sum()),
        (lambda f, x: jax.grad(f)(x), lambda x: 2 * x),
        (lambda f, x: jax.vmap(f)(x[None])[0], lambda x: (x**2).sum()),
    ],
    ids=["jit", "grad", "vmap"],
)
def test_a_decorated_step_is_traced_like_any_function(around: Callable[..., Any], want: Any, devices: list[Any]) -> None:
    x = jnp.arange(8.0)
    run = shardplan.parallelize("4", devices=devices[:4])(lambda x: (x**2).sum())
    np.testing.assert_allclose(around(run, x), want(x))
    assert jax.eval_shape(run, x).shape == ()


def test_a_decorated_method_has_its_object(devices: list[Any]) -> None:
    class Trainer:
        scale = 3.0

        @shardplan.parallelize("4", devices=devices[:4], static_argnums=0)
        def step(self, x: jax.Array) -> jax.Array:
            return self.scale * x

    trainer = Trainer()
    np.testing.assert_array_equal(trainer.step(jnp.ones(8)), 3.0)
    assert trainer.step.plan is Trainer.step.plan


class Named:
    """Printed alike, compared by what it holds."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __repr__(self) -> str:
        return "Named()"

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named) and other.factor == self.factor


def test_static_arguments_are_told_apart_by_value(devices: list[Any]) -> None:
    run = shardplan.parallelize("4", devices=devices[:4], static_argnums=1)(lambda x, named: x * named.factor)
    for factor in (2.0, 3.0, 2.0):
        assert float(run(jnp.ones(8), Named(factor))[0]) == factor
    assert run.cache_size() == 2
    with pytest.raises(shardplan.ShardplanError, match=r"static argument 1 .* has no hash"):
        run(jnp.ones(8), [2.0])


def test_what_init_makes_is_what_was_planned(devices: list[Any]) -> None:
    run = shardplan.parallelize("2x4", devices=devices, pins={"state/w": P("node")})(step)
    run.prepare(STATE, BATCH)
    with pytest.raises(shardplan.ShardplanError, match=r"state/w is float32\[64, 31\]"):
        run.init(lambda: {"w": jnp.ones((64, 31))})
    with pytest.raises(shardplan.ShardplanError, match="state/v stands in place of state/w"):
        run.init(lambda: {"v": jnp.ones((64, 32))})
    assert run.init(lambda: {"w": jnp.ones((64, 32))})["w"].sharding.spec == P("node")


def test_static_arguments_may_come_by_position_or_by_name(devices: list[Any]) -> None:
    def step(x: jax.Array, n: int = 2, scale: float = 1.0) -> jax.Array:
        return x * len(range(n)) * scale

    ways: list[dict[str, Any]] = [{"static_argnames": ("n", "scale")}, {"static_argnums": (1, 2)}]
    for given in ways:
        run = shardplan.parallelize("4", devices=devices[:4], **given)(step)
        calls: list[tuple[tuple[Any, ...], dict[str, Any], float]] = [
            ((), {}, 2.0), ((), {"scale": 2.0}, 4.0), ((3,), {}, 3.0), ((), {"n": 3}, 3.0),
            ((3, 4.0), {}, 12.0), ((3,), {"scale": 4.0}, 12.0),
        ]  # fmt: skip
        for args, named, want in calls:
            assert float(run(jnp.ones(8), *args, **named)[0]) == want
        assert run.cache_size() == 4, "the same values are the same plan, however they come"
    with pytest.raises(shardplan.ShardplanError, match="with these arguments: got an unexpected keyword argument 'm'"):
        run(jnp.ones(8), m=3)


def test_a_misspelt_static_argument_is_refused(devices: list[Any]) -> None:
    def scaled(x: Any, n: int) -> Any:
        return x * n

    with pytest.raises(shardplan.ShardplanError, match="static_argnames names 'nn', which is no argument of scaled"):
        shardplan.parallelize(cluster="8", static_argnames="nn")(scaled)(jnp.ones(8), 3)
