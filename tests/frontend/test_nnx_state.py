"""nnx objects among the arguments: a planned step does to them, and returns, what it does under `nnx.jit`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.verify.verify import verify

X = jax.random.normal(jax.random.key(1), (64, 32))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(32, 128, rngs=rngs)
        self.down = nnx.Linear(128, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.down(self.drop(jnp.tanh(self.up(x)))))


class Holder(nnx.Module):
    def __init__(self, model: Model) -> None:
        self.model = model


def loss_of(model: Model, x: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - x) ** 2)


def train(model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(loss_of)(model, x)
    optimizer.update(model, gradients)
    return loss


def made(rate: float = 0.1) -> tuple[Model, nnx.Optimizer]:
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(rate), wrt=nnx.Param)


def _in_containers() -> tuple[Any, ...]:
    model, optimizer = made()
    return ({"model": model, "rest": [optimizer]},)


def _shared() -> tuple[Any, ...]:
    model, optimizer = made()
    return Holder(model), model, optimizer


def _spec(variable: nnx.Variable) -> P:
    sharding = variable.get_value().sharding
    assert isinstance(sharding, NamedSharding)
    return sharding.spec


def same(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)


def in_dict(parts: dict[str, Any], x: jax.Array) -> jax.Array:
    return train(parts["model"], parts["rest"][0], x)


def through_another(holder: Holder, model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    loss = train(model, optimizer, x)
    return loss + loss_of(holder.model, x)


def with_streams(model: Model, rngs: nnx.Rngs, x: jax.Array) -> jax.Array:
    return loss_of(model, x + jax.random.normal(rngs(), x.shape))


def to_eval(model: Model, x: jax.Array) -> tuple[jax.Array, Model]:
    loss = loss_of(model, x)
    model.eval()
    setattr(model, "seen", nnx.Variable(loss))  # noqa: B010 - a variable that the class does not know
    return loss, model


def alone(variable: nnx.Variable, x: jax.Array) -> jax.Array:
    variable[...] += x.sum(0)
    return variable[...].sum()


def measured(metric: nnx.Metric, x: jax.Array) -> jax.Array:
    metric.update(values=x)
    return metric.compute()


CASES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "in place": (train, made),
    "in containers": (in_dict, _in_containers),
    "shared by arguments": (through_another, _shared),
    "random streams": (with_streams, lambda: (Model(nnx.Rngs(0)), nnx.Rngs(3))),
    "static state and new variables": (to_eval, lambda: (Model(nnx.Rngs(0)),)),
    "a variable by itself": (alone, lambda: (nnx.Param(jnp.ones(32)),)),
    "a metric": (measured, lambda: (nnx.metrics.Average(),)),
}


def _results(run: Callable[..., Any], make: Callable[[], tuple[Any, ...]]) -> tuple[list[Any], tuple[Any, ...]]:
    args = make()
    outs = [run(*args, X) for _ in range(3)]
    return [float(jax.tree.leaves(out[0] if isinstance(out, tuple) else out)[0]) for out in outs], args


@pytest.mark.parametrize("name", CASES)
def test_objects_are_changed_as_under_nnx_jit(name: str, devices: list[Any]) -> None:
    step, make = CASES[name]
    want, own = _results(nnx.jit(step), make)
    got, args = _results(shardplan.parallelize("2x4", devices=devices)(step), make)
    assert got == pytest.approx(want, rel=1e-3)
    same(args, own)


@pytest.mark.parametrize(
    "name",
    ["in place", *(pytest.param(n, marks=pytest.mark.slow) for n in ("random streams", "in containers", "shared by arguments"))],
)
def test_a_plan_of_a_step_in_place_is_verified_and_runs_in_place(name: str, devices: list[Any]) -> None:
    step, make = CASES[name]
    plan = shardplan.plan(step, *make(), X, cluster="2x4")
    found = verify(plan, step, (*make(), X), devices=devices)
    assert found.passed
    want, own = _results(nnx.jit(step), make)
    got, args = _results(plan.jit(step, devices), make)
    assert got == pytest.approx(want, rel=1e-3)
    same(args, own)


def test_state_in_place_keeps_its_layout_and_compiles_once(devices: list[Any]) -> None:
    plan = shardplan.plan(train, *made(), X, cluster="2x4", pins={"model/up/kernel": P(None, "gpu")})
    assert plan.operators > 50, "the update is part of the plan"
    assert plan.in_specs[0]["up"]["kernel"].get_value() == P(None, "gpu")
    assert plan.out_specs == P()
    run = plan.jit(train, devices)
    model, optimizer = made()
    for _ in range(3):
        run(model, optimizer, X)
    assert _spec(model.up.kernel) == P(None, "gpu")
    assert run.cache_size() == 1


def test_a_module_that_the_step_leaves_as_it_was_is_not_computed_again(devices: list[Any]) -> None:
    model = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
    step = shardplan.parallelize("2x4", devices=devices)(lambda model, x: model(x).sum())
    step(model, X)
    kernel = model.kernel[...]
    assert len(step.plan.traced.out_shapes) == 1
    step(model, X)
    assert model.kernel[...] is kernel, "sharded by the first call, and not moved again"


def test_a_donated_module_is_whole_after_the_step(devices: list[Any]) -> None:
    model = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
    step = shardplan.parallelize("2x4", devices=devices, donate_argnums=0)(lambda model, x: model(x).sum())
    want = float(model(X).sum())
    for _ in range(3):
        assert float(step(model, X)) == pytest.approx(want, rel=1e-4)


def test_two_modules_alike_keep_each_its_own_state(devices: list[Any]) -> None:
    """The states have equal paths, shapes and dtypes: only their places in the arguments tell them apart."""

    def step(average: nnx.Linear, model: nnx.Linear, x: jax.Array) -> jax.Array:
        model.kernel[...] -= 0.1 * nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model).kernel[...]
        average.kernel[...] = 0.9 * average.kernel[...] + 0.1 * model.kernel[...]
        return jnp.mean(model(x) ** 2)

    plan = shardplan.plan(step, *(nnx.Linear(32, 32, rngs=nnx.Rngs(n)) for n in (0, 1)), X, cluster="2x4")
    paths = plan.traced.program.input_paths
    back = [i if i is None else paths[i] for i in plan.traced.program.feedback]
    assert back == [None, "average/kernel", "model/kernel"]


@pytest.mark.slow
def test_what_is_static_is_part_of_the_plan(devices: list[Any]) -> None:
    step = shardplan.parallelize("2x4", devices=devices)(train)
    for rate in (0.0, 1.0):
        model, optimizer = made(rate)
        before = model.up.kernel[...]
        step(model, optimizer, X)
        assert bool(jnp.array_equal(model.up.kernel[...], before)) == (rate == 0.0)


def test_a_plan_refuses_arguments_whose_static_part_is_another_program(devices: list[Any]) -> None:
    run = shardplan.plan(train, *made(0.1), X, cluster="2x4").jit(train, devices)
    run(*made(0.1), X)  # another optimizer object that does the same
    with pytest.raises(shardplan.ShardplanError, match="static parts of these arguments"):
        run(*made(0.5), X)
    model, optimizer = made(0.1)
    model.eval()
    with pytest.raises(shardplan.ShardplanError, match="static parts of these arguments"):
        run(model, optimizer, X)


def test_put_and_init_make_whole_objects(devices: list[Any]) -> None:
    plan = shardplan.plan(train, *made(), X, cluster="2x4", pins={"model/up/kernel": P(None, "gpu")})
    model, optimizer, _ = plan.put((*made(), X), mesh=plan.mesh(devices))
    assert isinstance(model, Model)
    assert isinstance(optimizer, nnx.Optimizer)
    assert _spec(model.up.kernel) == P(None, "gpu")
    step = shardplan.parallelize("2x4", devices=devices, pins={"model/up/kernel": P(None, "gpu")})(train)
    step.prepare(*made(), X)
    model = step.init(lambda: Model(nnx.Rngs(0)))
    assert _spec(model.up.kernel) == P(None, "gpu")
    same(model, made()[0])


def test_init_says_that_it_makes_one_argument(devices: list[Any]) -> None:
    plan = shardplan.plan(train, *made(), X, cluster="2x4")
    with pytest.raises(shardplan.ShardplanError, match=r"return model alone.*\(model, optimizer, x\): .*once for each argument"):
        plan.init(made, devices=devices)
    with pytest.raises(shardplan.ShardplanError, match="return optimizer alone"):
        plan.init(lambda: made()[0], argument=1, devices=devices)
    assert isinstance(plan.init(lambda: made()[1], argument=1, devices=devices), nnx.Optimizer)


@pytest.mark.slow
def test_a_plan_of_objects_is_saved_and_loaded(tmp_path: Path, devices: list[Any]) -> None:
    plan = shardplan.plan(train, *made(), X, cluster="2x4")
    plan.save(tmp_path / "plan.json")
    again = shardplan.load(tmp_path / "plan.json", train, *made(), X)
    assert again.specs_by_path == plan.specs_by_path
    got, _ = _results(again.jit(train, devices), made)
    assert got == pytest.approx(_results(nnx.jit(train), made)[0], rel=1e-3)


def test_abstract_objects_are_planned(devices: list[Any]) -> None:
    shapes = nnx.eval_shape(made)
    plan = shardplan.plan(train, *shapes, jax.ShapeDtypeStruct(X.shape, X.dtype), cluster="2x4")
    assert plan.specs_by_path == shardplan.plan(train, *made(), X, cluster="2x4").specs_by_path
