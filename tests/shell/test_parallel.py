"""The decorator: it runs as the plain step does, counts arguments as the user does, and keeps its plans."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardplan
from models import gpt, mlp
from shardplan import _jax
from shardplan.shell.parallel import Parallel
from tests.nnx_training import train


def _trained(step: Any, state: Any, batch: Any, count: int) -> list[float]:
    losses: list[float] = []
    for _ in range(count):
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses


def test_a_decorated_step_trains_as_the_plain_one_and_compiles_once(caplog: pytest.LogCaptureFixture) -> None:
    step, (state, batch) = mlp.train_step(batch=64, concrete=True)
    parallel = shardplan.parallelize(cluster="2x4", devices=jax.devices()[:8])(step)
    with pytest.raises(shardplan.ShardplanError, match="planned at its first call"):
        _ = parallel.plan
    with caplog.at_level(logging.INFO, logger="shardplan"):
        got = _trained(parallel, state, batch, 4)
    assert got == pytest.approx(_trained(jax.jit(step), state, batch, 4), rel=1e-3)
    assert got[-1] < got[0]
    said = [r.message for r in caplog.records if "mesh" in r.message]
    assert len(said) == 1
    assert "node=2" in said[0]
    assert parallel.cache_size() == 1


def test_the_decorator_updates_nnx_objects_in_place_and_compiles_once(devices: list[Any]) -> None:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up = nnx.Linear(64, 256, rngs=rngs)
            self.down = nnx.Linear(256, 64, rngs=rngs)
            self.drop = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.down(self.drop(nnx.gelu(self.up(x))))

    def losses(run: Any) -> list[float]:
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
        x = jax.random.normal(jax.random.key(1), (32, 64))
        first = float(run(model, optimizer, x))
        before = _jax.programs_compiled()
        later = [float(run(model, optimizer, x)) for _ in range(3)]
        assert _jax.programs_compiled() == before
        return [first, *later]

    sharded = shardplan.parallelize("2x4", devices=devices)(train)
    np.testing.assert_allclose(losses(sharded), losses(nnx.jit(train)), rtol=1e-4)
    assert any(p.startswith("model/up") for p in sharded.plan.specs_by_path)


def test_a_module_whose_static_part_changes_is_another_program(devices: list[Any]) -> None:
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    sharded = shardplan.parallelize("4", devices=devices[:4])(lambda model, x: model(x))
    x = jnp.ones((8, 8))
    assert float(sharded(model, x).min()) == 0.0
    model.eval()
    np.testing.assert_array_equal(sharded(model, x), x)


def test_static_arguments_choose_a_plan_each() -> None:
    def step(x: jax.Array, power: int, *, flip: bool) -> jax.Array:
        return jnp.sum(x**power) * (-1.0 if flip else 1.0)

    parallel = shardplan.parallelize(cluster="4", devices=jax.devices()[:4], static_argnums=1, static_argnames="flip")(step)
    x = jnp.arange(8.0)
    assert float(parallel(x, 2, flip=False)) == pytest.approx(140.0)
    assert float(parallel(x, 3, flip=True)) == pytest.approx(-784.0)


def scaled(n: int, w: jax.Array, b: jax.Array) -> jax.Array:
    return w * n + b


def test_donation_counts_the_arguments_as_the_step_has_them(devices: list[Any]) -> None:
    """The static argument in front does not move the donation to its neighbour."""
    pairs: list[dict[str, Any]] = [{"static_argnums": 0, "donate_argnums": 1}, {"static_argnums": -3, "donate_argnums": -2}]
    for numbers in pairs:
        w, b = jnp.ones((8, 8)), jnp.ones((8, 8))
        run = shardplan.parallelize("4", devices=devices[:4], **numbers)(scaled)
        w, b = run.prepare(3, w, b).put((w, b), mesh=run.plan.mesh(devices[:4]))
        assert run.plan.donate_argnums == (0,)
        assert float(run(3, w, b)[0, 0]) == 4.0
        assert (w.is_deleted(), b.is_deleted()) == (True, False)


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ({"donate_argnums": 7}, "donate_argnums=7 names no argument: the step takes 3"),
        ({"static_argnums": -4}, "static_argnums=-4 names no argument"),
        ({"static_argnums": 0, "donate_argnums": (1, -3)}, "argument 0 of scaled is in static_argnums and in donate_argnums"),
    ],
)
def test_a_number_that_cannot_be_is_refused(numbers: dict[str, Any], says: str) -> None:
    with pytest.raises(shardplan.ShardplanError, match=says):
        shardplan.parallelize("4", **numbers)(scaled).prepare(3, jnp.ones(8), jnp.ones(8))


def test_init_counts_the_arguments_as_the_step_has_them(devices: list[Any]) -> None:
    pins = {"w": P("gpu"), "b": P(None, "gpu")}
    run = shardplan.parallelize("4", devices=devices[:4], static_argnums=0, pins=pins)(lambda n, w, b: n * (w @ b))
    run.prepare(3, jnp.ones((8, 8)), jnp.ones((8, 8)))
    assert run.init(lambda: jnp.ones((8, 8)), argument=1).sharding.spec == P("gpu")
    assert run.init(lambda: jnp.ones((8, 8)), argument=-1).sharding.spec == P(None, "gpu")
    for argument, says in ((0, "argument=0 of <lambda> is static"), (3, "argument=3 names no argument")):
        with pytest.raises(shardplan.ShardplanError, match=says):
            run.init(lambda: 1, argument=argument)


# -- plans that are kept -----------------------------------------------------------------------------------------------


def _kept(folder: Path, step: Any = scaled, **options: Any) -> Parallel:
    given = {"cluster": "4", "static_argnums": 0, "cache_dir": folder, **options}
    run = shardplan.parallelize(**given)(step)
    run.prepare(3, jnp.ones((8, 8)), jnp.ones((8, 8)))
    return run


def test_a_kept_plan_is_the_plan_again(tmp_path: Path) -> None:
    first = _kept(tmp_path, pins={"w": P("gpu")}, memory_limit="1GiB").plan
    again = _kept(tmp_path, pins={"w": P("gpu")}, memory_limit=2**30, observer=lambda *_: None).plan
    assert len(list(tmp_path.glob("*.plan.json"))) == 1
    assert again.specs_by_path == first.specs_by_path
    assert again.search_s == first.search_s, "it was read, not searched for"


def test_a_default_that_is_spelled_out_makes_no_other_plan(tmp_path: Path) -> None:
    for options in ({}, {"placement": "one"}, {"remat": "none", "pins": {}, "replicate": []}):
        _kept(tmp_path, **options)
    assert len(list(tmp_path.glob("*.plan.json"))) == 1


def test_a_trace_is_no_option_of_the_decorator() -> None:
    """It would hold for one call's arguments alone, and its text differs between processes."""
    with pytest.raises(shardplan.ShardplanError, match="parallelize has no option 'traced'"):
        shardplan.parallelize("4", traced=None)


def test_a_plan_is_kept_for_each_step_cluster_and_choice(tmp_path: Path) -> None:
    other: list[dict[str, Any]] = [{}, {"cluster": "2"}, {"donate_argnums": 1}, {"donate_argnums": 2}, {"pins": {"w": P("gpu")}}]
    other += [{"step": lambda n, w, b: w - n * b}]
    for options in other:
        _kept(tmp_path, **options)
    assert len(list(tmp_path.glob("*.plan.json"))) == len(other)


def test_a_kept_plan_stays_on_the_users_mesh(tmp_path: Path, devices: list[Any]) -> None:
    mesh = Mesh(np.array(devices[::-1]), ("rows",))
    for _ in range(2):
        plan = _kept(tmp_path, cluster=mesh).plan
        assert plan.mesh().devices.tolist() == devices[::-1]


PROCESS = """
import sys, jax, jax.numpy as jnp, optax
from flax.training.train_state import TrainState
import shardplan

jax.config.update("jax_num_cpu_devices", 4)
state = TrainState.create(apply_fn=lambda p, x: x @ p["w"], params={"w": jnp.ones((8, 8))}, tx=optax.sgd(0.1))
step = lambda state, x: state.apply_gradients(grads=jax.grad(lambda p: state.apply_fn(p, x).sum())(state.params))
shardplan.parallelize("4", cache_dir=sys.argv[1], observer=lambda *_: None)(step).prepare(state, jnp.ones((8, 8)))
"""


@pytest.mark.slow
def test_another_process_finds_the_kept_plan(tmp_path: Path, environment: dict[str, str]) -> None:
    """The static parts of a TrainState are functions, and an observer is one: their addresses are no part of the key."""
    for _ in range(2):
        subprocess.run([sys.executable, "-c", PROCESS, str(tmp_path)], check=True, timeout=300, env=environment)
    assert len(list(tmp_path.glob("*.plan.json"))) == 1


def test_init_makes_the_state_sharded() -> None:
    step, (state, batch) = gpt.train_step(layers=1, batch=16)
    parallel = shardplan.parallelize(cluster="2x4", devices=jax.devices()[:8])(step)
    plan = parallel.prepare(state, batch)
    made = parallel.init(lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), state))
    mesh = plan.mesh(jax.devices()[:8])
    specs = jax.tree.leaves(plan.in_specs[0], is_leaf=lambda s: isinstance(s, P))
    for x, s in zip(jax.tree.leaves(made), specs, strict=True):
        assert x.sharding.is_equivalent_to(jax.NamedSharding(mesh, s), x.ndim)
