"""Steps whose ops run on groups of devices compute what they compute on one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import shardplan
from models import gpt, lenet, two_tower
from shardplan.ir import Program
from shardplan.mesh import Cluster
from shardplan.regions.assignment import Assignment, on_devices
from shardplan.verify.verify import verify
from tests.placed import Halves, RandomGroups


@pytest.mark.parametrize("seed", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_a_network_with_each_op_on_random_devices_trains_as_on_one(seed: int) -> None:
    step, args = lenet.train_step()
    plan = shardplan.plan(step, *args, cluster="2x4", placement=RandomGroups(seed), donate_argnums=(0,))
    found = verify(plan, step, args)
    assert found.passed, found


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"dropout": 0.1}, {"scan": True}, {"remat": True}], ids=str)
def test_a_gpt_with_each_op_on_random_devices_trains_as_on_one(options: dict[str, Any]) -> None:
    step, args = gpt.train_step(layers=2, **options)
    plan = shardplan.plan(step, *args, cluster="2x4", placement=RandomGroups(1), donate_argnums=(0,))
    assert verify(plan, step, args).passed


@pytest.mark.slow
def test_groups_that_share_devices_do_not_take_each_other_s_buffers() -> None:
    step, args = two_tower.train_step()
    plan = shardplan.plan(step, *args, cluster="2x4", placement=Halves(shared=2), donate_argnums=(0,))
    assert not set(plan.devices[0]).isdisjoint(plan.devices[1])
    assert verify(plan, step, args).passed


@pytest.mark.slow
def test_a_value_that_is_several_results_can_be_donated_as_each_of_them(devices: list[Any]) -> None:
    """A weight, a number, which is weakly typed, and a random key."""

    def twins(state: Any, x: jax.Array) -> Any:
        w = state["w"] - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
        n, key = state["n"] + 1, jax.random.split(state["key"])[0]
        return {"w": w, "last": w, "n": n, "last_n": n, "key": key, "last_key": key}

    def state() -> dict[str, Any]:
        made = {"w": jnp.ones((4, 4)), "key": jax.random.key(0)}
        return {**made, "n": 0, "last": jnp.zeros((4, 4)), "last_n": 0, "last_key": jax.random.key(1)}

    x = jnp.arange(32.0).reshape(8, 4)
    plan = shardplan.plan(twins, state(), x, cluster="2", placement=Halves(), donate_argnums=(0,))
    assert verify(plan, twins, (state(), x)).passed
    made = plan.jit(twins, devices=devices[:2])(state(), x)
    assert made["last_n"].weak_type
    assert made["w"] is not made["last"]


class Everywhere:
    """All ops on all devices, as one group."""

    def assignment_of(self, program: Program, cluster: Cluster) -> Assignment:
        """Each op's group."""
        return on_devices(program, {op.id: tuple(range(cluster.size)) for op in program.ops})


class FirstOfTwo:
    """Ops that read the argument ``b`` on the first two devices, all others on all of them."""

    def assignment_of(self, program: Program, cluster: Cluster) -> Assignment:
        """Each op's group."""
        b = program.inputs[next(n for n, path in enumerate(program.input_paths) if path.endswith("/b"))]
        return on_devices(program, {op.id: (0, 1) if b in op.tensors else tuple(range(cluster.size)) for op in program.ops})


@pytest.mark.parametrize("read_first", ["a", "c"])
def test_an_argument_of_one_group_takes_the_place_of_two_of_another(read_first: str) -> None:
    """These two lie in different layouts, one of which is also that of no result of the ops there."""

    def step(w: Any, x: jax.Array) -> Any:
        other = "c" if read_first == "a" else "a"
        y = w[read_first] @ w[other]
        return {"a": w["b"], "b": jnp.tanh(w["b"]), "c": w["b"]}, w[other] + y.T

    args = {name: jnp.arange(256.0).reshape(16, 16) / 256 + n for n, name in enumerate("abc")}, jnp.ones((16, 16))
    plan = shardplan.plan(step, *args, cluster="2x4", placement=FirstOfTwo(), donate_argnums=(0,))
    held = {name: x.sharding for name, x in plan.put(args)[0].items()}
    said = plan.out_shardings(plan.mesh())[0]
    assert not held["a"].is_equivalent_to(held["c"], 2)
    assert all(said[name].is_equivalent_to(held[name], 2) for name in "abc")
    found = verify(plan, step, args)
    assert found.passed, found


def test_a_new_state_that_is_returned_twice_comes_back_where_it_was() -> None:
    def step(w: list[jax.Array], x: jax.Array) -> Any:
        new = [jnp.tanh(w[0]) * x, (w[1] @ x).T]
        return new, new

    args = [jnp.ones((16, 16)), jnp.eye(16)], jnp.ones((16, 16))
    plan = shardplan.plan(step, *args, cluster="2x4", placement=Everywhere(), donate_argnums=(0,))
    found = verify(plan, step, args)
    assert found.passed, found


def test_devices_of_several_groups_hold_what_all_of_them_hold_within_the_memory_limit() -> None:
    step, args = two_tower.train_step()
    options: dict[str, Any] = {"cluster": "4", "placement": Halves(shared=1), "donate_argnums": (0,)}
    plan = shardplan.plan(step, *args, **options)
    limit = plan.peak_bytes - 1
    assert max(group.peak_bytes for group in plan.groups) < limit, "each group fits alone"
    with pytest.raises(shardplan.MemoryLimitError) as caught:
        shardplan.plan(step, *args, **options, memory_limit=limit)
    assert (caught.value.limit_bytes, caught.value.smallest_bytes) == (limit, plan.peak_bytes)
    (point,) = shardplan.sweep(lambda: (step, args), vary={"memory": [limit]}, **options).points
    assert not point.fits
    assert point.peak_bytes == plan.peak_bytes


def test_the_result_of_place_and_its_file_are_placements(tmp_path: Any) -> None:
    step, args = two_tower.train_step()
    placement = shardplan.place(step, *args, cluster="2x2", budget_s=5, proposals=40, method="regions", start="dp")
    placement.save(tmp_path / "strategy.json")
    plan = shardplan.plan(step, *args, cluster="2x2", placement=placement)
    assert set(plan.devices) <= set(placement.groups)
    again = shardplan.plan(step, *args, cluster="2x2", placement=str(tmp_path / "strategy.json"))
    assert {d for group in again.devices for d in group} <= set(range(4))
    with pytest.raises(shardplan.PlacementError, match="for 2x2, not for 2x4"):
        shardplan.plan(step, *args, cluster="2x4", placement=placement)
    other, others = two_tower.train_step(batch=32)
    with pytest.raises(shardplan.PlacementError, match="another step, or for other shapes"):
        shardplan.plan(other, *others, cluster="2x2", placement=placement)


def test_an_nnx_step_on_groups_updates_its_objects_in_place() -> None:
    def step(model: nnx.Module, x: jax.Array) -> jax.Array:
        def loss(m: Any) -> jax.Array:
            return jnp.mean(m(x) ** 2)

        value, gradients = nnx.value_and_grad(loss)(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), gradients))
        return value

    def model() -> nnx.Module:
        return nnx.Sequential(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(16, 8, rngs=nnx.Rngs(1)))

    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32)
    own, other = model(), model()
    run = shardplan.plan(step, own, x, cluster="2x2", placement=Halves()).jit(step, jax.devices()[:4])
    for _ in range(3):
        np.testing.assert_allclose(run(own, x), nnx.jit(step)(other, x), rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), nnx.state(own), nnx.state(other))


def small() -> tuple[Any, tuple[Any, ...]]:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jnp.tanh(x @ w)
        return w - 0.1 * (x.T @ (y @ y.T) @ x) @ w, jnp.sum(y)

    return step, (jnp.ones((8, 8)), jnp.ones((4, 8)))


def test_the_step_is_lowered_and_compiled_as_programs_that_are_called_as_one() -> None:
    step, args = small()
    run = shardplan.plan(step, *args, cluster="4", placement=Halves()).jit(step, jax.devices()[:4])
    lowered = run.lower(*args)
    assert len(lowered.programs) >= 2
    assert {p.devices for p in lowered.programs} == {(0, 1), (2, 3)}
    assert "segment 0 of group 0 on devices 0, 1" in lowered.as_text()
    for a, b in zip(lowered.compile()(*args), step(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert [x.shape for x in jax.tree.leaves(run.eval_shape(*args))] == [(8, 8), ()]


def test_state_comes_back_to_the_devices_that_hold_it() -> None:
    step, args = small()
    plan = shardplan.plan(step, *args, cluster="4", placement=Halves())
    run, placed = plan.jit(step, jax.devices()[:4]), plan.put(args, mesh=plan.mesh(jax.devices()[:4]))
    w, _ = run(*placed)
    assert w.sharding.is_equivalent_to(placed[0].sharding, 2)
    assert len(w.sharding.device_set) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placement": "two"}, "unsupported placement 'two'"),
        ({"placement": Halves(), "pins": {"w": PartitionSpec()}}, "pins cannot be given where ops run on groups"),
        ({"placement": Halves(), "axes": {"data": 4}}, "axes cannot be given where ops run on groups"),
        ({"placement": Halves(), "backend": "specs"}, "backend cannot be given where ops run on groups"),
        ({"placement": "missing.json"}, "cannot read the strategy missing.json"),
    ],
    ids=str,
)
def test_a_placement_that_cannot_be_used_is_named(options: dict[str, Any], message: str) -> None:
    step, args = small()
    with pytest.raises(shardplan.ShardplanError, match=message):
        shardplan.plan(step, *args, cluster="4", **options)


def test_a_placed_step_is_not_one_program() -> None:
    step, args = small()
    run = shardplan.plan(step, *args, cluster="4", placement=Halves()).jit(step, jax.devices()[:4])
    with pytest.raises(shardplan.ShardplanError, match="several programs, so it cannot be called inside"):
        jax.jit(run)(*args)
    with pytest.raises(shardplan.ShardplanError, match="use lower"):
        run.trace(*args)


def test_a_step_that_names_mesh_axes_is_not_placed() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))

    def step(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x * 2, jax.sharding.NamedSharding(mesh, PartitionSpec("x")))

    with pytest.raises(shardplan.PlacementError, match="names mesh axes"):
        shardplan.plan(step, jnp.ones(8), cluster="4", placement=Halves())


def test_what_only_a_plan_on_all_devices_has_is_refused_by_name() -> None:
    step, args = small()
    plan = shardplan.plan(step, *args, cluster="4", placement=Halves())
    for name in ("axes", "matrix", "baselines", "lower_bound_s", "serial_s", "put_local"):
        with pytest.raises(shardplan.GroupsError, match=f"has no {name}: .*plan with placement='one'"):
            getattr(plan, name)
    assert not hasattr(plan, "gap")
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        getattr(plan, "nonsense")  # noqa: B009
    assert plan.trace_s + plan.search_s > 0
    assert (plan.time_model, plan.objective, plan.microbatches.count) == ("overlap", "time", 1)


def test_results_have_the_planned_shardings() -> None:
    step, args = small()
    plan = shardplan.plan(step, *args, cluster="4", placement=Halves())
    results = jax.tree.leaves(plan.jit(step, jax.devices()[:4])(*args))
    wanted = jax.tree.leaves(plan.out_shardings(plan.mesh(jax.devices()[:4])))
    specs = jax.tree.leaves(plan.out_specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
    assert [s.spec for s in wanted] == specs
    for result, sharding in zip(results, wanted, strict=True):
        assert result.sharding.is_equivalent_to(sharding, result.ndim)
