"""A planned step is traced, lowered and compiled as a function of `jax.jit` is: in the step's own trees."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import shardplan
from shardplan import _jax

W, X, Y = jnp.linspace(-1, 1, 32 * 16).reshape(32, 16), jnp.ones((64, 32)), jnp.ones((64, 16))


def loss(w: Any, x: Any, y: Any) -> Any:
    return jnp.mean((x @ w - y) ** 2)


def of_trees(state: Any, batch: Any) -> Any:
    value, grad = jax.value_and_grad(loss)(state["w"], batch["x"], batch["y"])
    return {"w": state["w"] - 0.1 * grad, "n": state["n"] + 1}, {"loss": value}


def of_tuples(w: Any, data: Any) -> Any:
    value, grad = jax.value_and_grad(loss)(w, *data)
    return w - 0.1 * grad, (value,)


def of_one(w: Any, x: Any, y: Any) -> Any:
    return w - 0.1 * jax.grad(loss)(w, x, y)


STEPS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "trees": (of_trees, ({"w": W, "n": jnp.zeros((), jnp.int32)}, {"x": X, "y": Y})),
    "tuples": (of_tuples, (W, (X, Y))),
    "one": (of_one, (W, X, Y)),
}


@pytest.mark.parametrize("backend", ["explicit", "specs"])
@pytest.mark.parametrize("name", STEPS)
def test_every_stage_has_the_trees_of_jax_jit(name: str, backend: str, devices: list[Any]) -> None:
    step, args = STEPS[name]
    plan = shardplan.plan(step, *args, cluster="2x4")
    ours: Any = plan.jit(step, devices, backend).trace(*args)
    theirs: Any = jax.jit(step).trace(*args)
    last: tuple[Any, Any] = ours, theirs
    assert jax.tree.map(_shape, jax.eval_shape(step, *args)) == jax.tree.map(_shape, plan.jit(step, devices).eval_shape(*args))
    for _ in range(3):
        assert (ours.in_tree, ours.out_tree) == (theirs.in_tree, theirs.out_tree)
        assert jax.tree.map(_shape, ours.in_avals) == jax.tree.map(_shape, theirs.in_avals)
        assert jax.tree.map(_shape, ours.out_info) == jax.tree.map(_shape, theirs.out_info)
        last, (ours, theirs) = (ours, theirs), (_next(ours), _next(theirs))
    ours, theirs = last
    result = ours(*args)
    assert jax.tree.structure(result) == ours.out_tree
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), result, theirs(*args))
    alike = jax.tree.map(lambda x, sharding: x.sharding.is_equivalent_to(sharding, x.ndim), result, ours.output_shardings)
    assert all(jax.tree.leaves(alike))
    assert jax.tree.structure(ours.input_shardings) == ours.in_tree
    assert "HloModule" in ours.as_text()
    assert ours.cost_analysis()["flops"] > 0
    assert ours.memory_analysis().argument_size_in_bytes > 0
    with pytest.raises(AttributeError, match="missing"):
        ours.missing  # noqa: B018


@pytest.mark.parametrize("backend", ["explicit", "specs"])
def test_what_is_compiled_ahead_of_time_is_what_a_call_runs(backend: Any, devices: list[Any]) -> None:
    step, args = STEPS["trees"]
    plan = shardplan.plan(step, *args, cluster="2x4")
    placed = plan.put(args, mesh=plan.mesh(devices))
    for first, then in ((args, placed), (placed, args)):
        run = plan.jit(step, devices, backend)
        before = _jax.programs_compiled()
        run.lower(*first).compile()
        run(*placed)
        run.lower(*then).compile()
        assert _jax.programs_compiled() - before == 1


def _next(stage: Any) -> Any:
    return stage.lower() if hasattr(stage, "lower") else stage.compile() if hasattr(stage, "compile") else stage


def _shape(info: Any) -> tuple[Any, Any]:
    return tuple(info.shape), info.dtype


def test_a_compiled_step_moves_arguments_and_refuses_others(devices: list[Any]) -> None:
    step, args = STEPS["trees"]
    compiled = shardplan.plan(step, *args, cluster="2x4").jit(step, devices).lower(*args).compile()
    first = compiled(*args)
    assert int(compiled(first[0], args[1])[0]["n"]) == 2
    with pytest.raises(shardplan.ShardplanError, match=r"batch/x is float32\[2, 32\]"):
        compiled(args[0], {"x": X[:2], "y": Y})


def test_a_compiled_step_updates_nnx_objects_in_place(devices: list[Any]) -> None:
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        value, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return value

    def objects() -> tuple[Any, Any]:
        model = nnx.Linear(32, 16, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    ours, theirs = objects(), objects()
    plan = shardplan.plan(step, *ours, X, Y, cluster="2x4")
    compiled = plan.jit(step, devices).lower(*ours, X, Y).compile()
    assert compiled.out_tree == jax.tree.structure(0)
    assert compiled.in_tree == jax.tree.structure((plan.in_specs, {}))
    for _ in range(2):
        np.testing.assert_allclose(compiled(*ours, X, Y), nnx.jit(step)(*theirs, X, Y), rtol=1e-5)
    np.testing.assert_allclose(ours[0].kernel[...], theirs[0].kernel[...], rtol=1e-4, atol=1e-6)
    assert int(ours[1].step[...]) == 2


def test_a_decorated_step_has_the_stages_too(devices: list[Any]) -> None:
    step, args = STEPS["trees"]
    decorated = shardplan.parallelize("2x4", devices=devices)(step)
    compiled = decorated.lower(*args).compile()
    assert (compiled.in_tree, compiled.out_tree) == (decorated.trace(*args).in_tree, jax.tree.structure(step(*args)))
    np.testing.assert_allclose(compiled(*args)[1]["loss"], decorated(*args)[1]["loss"])


def test_a_planned_step_runs_inside_another_jitted_function(devices: list[Any]) -> None:
    """Compiler options are for the outermost function alone: inside another, JAX refuses them."""
    step, args = STEPS["tuples"]
    run = shardplan.plan(step, *args, cluster="2x4").jit(step, devices, xla_flags={"xla_cpu_enable_fast_math": False})

    def many(w: Any, data: Any) -> Any:
        return jax.lax.scan(lambda w, _: (run(w, data)[0], None), w, length=3)[0]

    expected = args[0]
    for _ in range(3):
        expected = run(expected, args[1])[0]
    np.testing.assert_allclose(jax.jit(many)(*args), expected, rtol=1e-5)
    np.testing.assert_allclose(many(*args), expected, rtol=1e-5)
    assert run.cache_size() == 1


def test_arrays_that_lie_elsewhere_are_lowered_for_and_moved(devices: list[Any]) -> None:
    """Sharded by hand, or on one device: the compiled step takes them as the jitted one does."""
    mesh = jax.make_mesh((8,), ("data",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), jnp.sum(x)

    w, x = jax.random.normal(jax.random.key(0), (32, 16)), jax.random.normal(jax.random.key(1), (64, 32))
    plan = shardplan.plan(step, w, x, cluster="2x4")
    run, expected = plan.jit(step, devices), jax.jit(step)(w, x)
    by_hand = NamedSharding(mesh, PartitionSpec("data"))
    for place in (by_hand, devices[3]):
        args = jax.device_put((w, x), place)
        for found in (run(*args), run.lower(*args).compile()(*args)):
            np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)


def test_arguments_of_another_structure_are_named(devices: list[Any]) -> None:
    state, batch = {"w": W, "n": jnp.zeros((), jnp.int32)}, {"x": X, "y": Y}
    run = shardplan.plan(of_trees, state, batch, cluster="2x4").jit(of_trees, devices)
    for given, says in (
        (({"w": W}, batch), "state/n is missing"),
        (({**state, "q": W}, batch), "state/q is not in the plan"),
        (({"v": W, "n": state["n"]}, batch), "state/v stands in place of state/w"),
    ):
        with pytest.raises(shardplan.ShardplanError, match=says):
            run(*given)


@pytest.mark.parametrize(("given", "says"), [(4, "4 is no device"), ("twice", "twice"), ("cpu", "'cpu' is no device")])
def test_what_are_no_devices_is_refused(devices: list[Any], given: Any, says: str) -> None:
    plan = shardplan.plan(loss, W, X, Y, cluster="2x2")
    with pytest.raises(shardplan.DeviceError, match=says):
        plan.jit(loss, devices[:1] * 4 if given == "twice" else given)


def test_a_decorated_step_tells_its_shapes(devices: list[Any]) -> None:
    run = shardplan.parallelize("2x4", devices=devices)(of_tuples)
    shapes = run.eval_shape(W, (X, Y))
    assert jax.tree.map(lambda s: s.shape, shapes) == ((32, 16), ((),))
