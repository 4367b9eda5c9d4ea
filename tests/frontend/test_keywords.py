"""Arguments that a step takes by name alone: planned, run, compiled, saved and loaded like the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardplan

STATE, X, KEY = {"w": jnp.ones((32, 16))}, jnp.ones((64, 32)), jax.random.key(3)


def step(state: Any, x: Any, *, rng: Any, scale: Any) -> Any:
    noise = jax.random.normal(rng, x.shape)
    gradient = jax.grad(lambda w: jnp.mean(((x + scale * noise) @ w) ** 2))(state["w"])
    return {"w": state["w"] - 0.1 * gradient}


NAMED = {"scale": jnp.float32(0.5), "rng": KEY}


def expected() -> Any:
    return jax.jit(step)(STATE, X, **NAMED)["w"]


def test_a_step_is_planned_and_run_with_arguments_by_name(devices: list[Any], tmp_path: Path) -> None:
    plan = shardplan.plan(step, STATE, X, kwargs=NAMED, cluster="2x4")
    assert [path.partition("/")[0] for path in plan.specs_by_path] == ["state", "x", "rng", "scale"]
    run = plan.jit(step, devices)
    found = [run(STATE, X, **NAMED), run.lower(STATE, X, **NAMED).compile()(STATE, X, **NAMED)]
    placed, named = plan.put((STATE, X), kwargs=NAMED, mesh=plan.mesh(devices))
    found += [run(*placed, **named)]
    plan.save(tmp_path / "plan.json")
    found += [shardplan.load(tmp_path / "plan.json", step, STATE, X, kwargs=NAMED).jit(step, devices)(STATE, X, **NAMED)]
    for result in found:
        np.testing.assert_allclose(result["w"], expected(), rtol=1e-5)


def test_a_decorated_step_takes_arguments_by_name(devices: list[Any]) -> None:
    run = shardplan.parallelize("2x4", devices=devices)(step)
    np.testing.assert_allclose(run(STATE, X, **NAMED)["w"], expected(), rtol=1e-5)
    other = run(STATE, X, rng=jax.random.key(4), scale=jnp.float32(0.5))["w"]
    assert not np.allclose(other, expected()), "no argument is a constant"
    assert run.cache_size() == 1
    assert {"rng", "scale"} <= set(run.plan.specs_by_path)


def test_a_name_may_be_static_beside_others_that_are_not(devices: list[Any]) -> None:
    def scaled(x: Any, power: int, *, scale: Any, negative: bool) -> Any:
        return (x @ x) ** power * scale * (-1 if negative else 1)

    run = shardplan.parallelize("2x2", devices=devices[:4], static_argnums=1, static_argnames="negative")(scaled)
    x = jnp.linspace(0, 1, 64 * 64).reshape(64, 64)
    for negative in (False, True):
        found = run(x, 2, scale=3.0, negative=negative)
        np.testing.assert_allclose(
            found, jax.jit(scaled, static_argnums=1, static_argnames="negative")(x, 2, scale=3.0, negative=negative), rtol=1e-5
        )


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ({"rng": KEY}, "cannot be called with these arguments: missing a required argument: 'scale'"),
        ({**NAMED, "other": 1}, "unexpected keyword argument 'other'"),
        ([KEY], "give a dict of the arguments"),
    ],
)
def test_other_names_are_refused(named: Any, says: str) -> None:
    with pytest.raises(shardplan.ShardplanError, match=says):
        shardplan.plan(step, STATE, X, kwargs=named, cluster="2x4")


def test_a_planned_step_refuses_other_names(devices: list[Any]) -> None:
    plan = shardplan.plan(step, STATE, X, kwargs=NAMED, cluster="2x4")
    run = plan.jit(step, devices)
    with pytest.raises(shardplan.ShardplanError, match="takes 2 by position and rng, scale by name: missing a required argument"):
        run(STATE, X, rng=KEY)
    with pytest.raises(shardplan.ShardplanError, match="takes 2 by position and rng, scale by name: too many positional"):
        run(STATE, X, KEY, NAMED["scale"])
    with pytest.raises(shardplan.ShardplanError, match=r"plan.put\(args, kwargs="):
        plan.put((STATE, X, KEY, NAMED["scale"]))


def test_a_call_is_bound_as_python_binds_it(devices: list[Any]) -> None:
    """Arguments that were planned by name are not taken in the order of the names, whatever their shapes."""

    def masked(w: Any, x: Any, mask: Any) -> Any:
        return w * x - mask

    w, x, mask = (jnp.full((8,), float(n)) for n in (2, 3, 5))
    run = shardplan.plan(masked, w, cluster="2x4", kwargs={"x": x, "mask": mask}).jit(masked, devices)
    calls = [run(w, x=x, mask=mask), run(w, x, mask), run(w, x, mask=mask), run(mask=mask, x=x, w=w)]
    calls += [run.lower(w, x, mask).compile()(w, x, mask)]
    plain = shardplan.plan(masked, w, x, mask, cluster="2x4").jit(masked, devices)
    calls += [plain(w, x, mask), plain(w, mask=mask, x=x)]
    assert all(float(result[0]) == 1.0 for result in calls)
    with pytest.raises(shardplan.ShardplanError, match="missing a required argument: 'x'"):
        plain(w, mask=mask, other=x)


def test_an_argument_that_was_left_out_at_planning_takes_no_others_place(devices: list[Any]) -> None:
    def scaled(w: Any, x: Any = 1.0, y: Any = 2.0, *, z: Any = 3.0) -> Any:
        return w * x - y + z

    w, x, z = (jnp.full((8,), float(n)) for n in (2, 3, 5))
    plain = shardplan.plan(scaled, w, x, cluster="2x4").jit(scaled, devices)
    named = shardplan.plan(scaled, w, x, kwargs={"z": z}, cluster="2x4").jit(scaled, devices)
    assert float(plain(w, x=x)[0]) == 7.0
    assert float(named(w, z=z, x=x)[0]) == 9.0
    for run, given in ((plain, {"y": x}), (plain, {"x": x, "z": z}), (named, {"y": x, "z": z}), (named, {"x": x})):
        differs = f"this call gives w, {', '.join(given)};"
        with pytest.raises(shardplan.ShardplanError, match=f"the planned step takes .*{differs}"):
            run(w, **given)


def test_what_a_decorated_step_compiles_is_called_as_it_was_lowered(devices: list[Any]) -> None:
    def masked(w: Any, *, x: Any, mask: Any) -> Any:
        return w * x - mask

    w, x, mask = (jnp.full((8,), float(n)) for n in (2, 3, 5))
    compiled = shardplan.parallelize("2x4", devices=devices)(masked).lower(w, x=x, mask=mask).compile()
    assert float(compiled(w, x=x, mask=mask)[0]) == 1.0
    with pytest.raises(shardplan.ShardplanError, match="takes 1 by position and mask, x by name"):
        compiled(w, x, mask)
