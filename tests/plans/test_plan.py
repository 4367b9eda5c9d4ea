"""Plans as a user holds them: specs, devices, pins, options, and what a user may get wrong."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec

import shardplan
from models import mlp
from shardplan.mesh import Cluster, Matrix, coordinates
from shardplan.report.plan_text import plan_text
from shardplan.sizes import parse_bytes
from tests.machines import machine

P = PartitionSpec


@pytest.fixture(scope="module")
def planned() -> tuple[shardplan.Plan, Any, Any]:
    step, args = mlp.train_step(batch=64, width=64)
    return shardplan.plan(step, *args, cluster="2x4", donate_argnums=0), step, args


def sized(plan: shardplan.Plan, spec: Any, shape: tuple[int, ...]) -> None:
    """The spec is one for this shape on the plan's axes: no axis twice, every dim divided."""
    seen: list[str] = []
    for entry, n in zip(spec, shape, strict=False):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        seen += axes
        assert n % int(np.prod([plan.axes[a] for a in axes], initial=1)) == 0
    assert len(spec) <= len(shape)
    assert len(seen) == len(set(seen))


def test_a_plan_has_a_spec_for_every_leaf(planned: tuple[shardplan.Plan, Any, Any]) -> None:
    plan, step, args = planned
    assert jax.tree.structure(plan.in_specs, is_leaf=lambda x: isinstance(x, P)) == jax.tree.structure(args)
    out = jax.eval_shape(step, *args)
    assert jax.tree.structure(plan.out_specs, is_leaf=lambda x: isinstance(x, P)) == jax.tree.structure(out)
    for spec, leaf in zip(plan.flat_in_specs, jax.tree.leaves(args), strict=True):
        sized(plan, spec, leaf.shape)


def test_state_comes_out_as_it_goes_in(planned: tuple[shardplan.Plan, Any, Any]) -> None:
    plan, _, _ = planned
    assert plan.out_specs[0] == plan.in_specs[0]


def test_the_figures_of_a_plan_agree(planned: tuple[shardplan.Plan, Any, Any]) -> None:
    plan, _, _ = planned
    assert plan.communication_bytes == pytest.approx(sum(c.wire_bytes * c.times for c in plan.collectives))
    assert 0 < plan.lower_bound_s <= plan.step_time_s * (1 + 1e-9)
    assert 0 < plan.peak_bytes <= plan.memory_limit
    assert plan.axes == {"node": 2, "gpu": 4}
    assert plan.matrix == {"axes": ["replica"], "levels": ["node", "gpu"], "factors": [[2, 4]]}, "too small to be cut"
    assert plan.time_model == "overlap"
    assert plan.hidden_s <= plan.step_time_s <= plan.serial_s
    assert 0 <= plan.exposed_s <= plan.communication_s
    assert plan.operators > 50
    assert min(plan.trace_s, plan.search_s) >= 0
    assert all(c.times >= 1 and c.seconds > 0 and c.wire_bytes > 0 for c in plan.collectives)
    assert {a for c in plan.collectives for a in c.axes} <= set(plan.axes)


def test_the_mesh_has_the_plans_axes(planned: tuple[shardplan.Plan, Any, Any], devices: list[Any]) -> None:
    plan, _, _ = planned
    mesh = plan.mesh(devices)
    assert dict(mesh.shape) == plan.axes
    with pytest.raises(shardplan.DeviceError, match="8"):
        plan.mesh(devices[:6])


def test_the_specs_carry_the_matrix_onto_the_devices() -> None:
    """Two interconnects, three levels, one of them split: every device holds the block that its place in the cluster says."""
    ring = Cluster.load("gcp-v100:2")
    node, gpu = ring.levels
    assert gpu.also is not None
    levels = (replace(node, name="rack"), node, replace(gpu, size=4, also=replace(gpu.also, domain=2)))
    slow = replace(
        ring.device, flops_per_s={"float32": 1e6}, launch_s=0.0, collective_launch_s=0.0
    )  # so that a small step is worth splitting
    cluster = Cluster("racks", levels, slow)

    def step(w: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w["up"]) @ w["down"]

    # four parts do not divide these dims, and padding them would waste too much: a level of four has to be split
    weights = {"up": jax.ShapeDtypeStruct((14, 10), jnp.float32), "down": jax.ShapeDtypeStruct((10, 14), jnp.float32)}
    x = jax.ShapeDtypeStruct((14, 14), jnp.float32)
    plan = shardplan.plan(step, weights, x, cluster=cluster)
    assert tuple(plan.axes) == ("rack", "node", "gpu0", "gpu1")
    matrix = Matrix(tuple(tuple(f.size if f.level == n else 1 for n in range(3)) for f in plan.factors))
    matrix.check(cluster, tuple(plan.axes.values()))
    mesh = plan.mesh(jax.devices())
    assert [d.id for d in mesh.devices.ravel()] == cluster.device_order(matrix).ravel().tolist()

    at = coordinates(cluster, plan.factors)  # of device i
    place = {name: i for i, name in enumerate(plan.axes)}
    used: set[str] = set()
    for spec, leaf in zip(plan.flat_in_specs, jax.tree.leaves((weights, x)), strict=True):
        for device, index in jax.NamedSharding(mesh, spec).devices_indices_map(leaf.shape).items():
            for dim, (n, rows) in enumerate(zip(leaf.shape, index, strict=True)):
                entry = spec[dim] if dim < len(spec) else None
                axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
                used |= set(axes)
                block = 0
                for axis in axes:
                    block = block * plan.axes[axis] + int(at[device.id, place[axis]])
                ways = int(np.prod([plan.axes[a] for a in axes], initial=1))
                assert rows.indices(n)[:2] == (block * n // ways, (block + 1) * n // ways)
    assert used & {"gpu0", "gpu1"}


def test_a_step_runs_as_planned_and_its_state_comes_back_as_it_went_in(devices: list[Any]) -> None:
    step, args = mlp.train_step(batch=64, width=64, concrete=True)
    plan = shardplan.plan(step, *args, cluster="2x4", pins={"state/params/layer_1/kernel": P(None, "gpu")})
    mesh = plan.mesh(devices)
    run, alone = plan.jit(step, devices), jax.jit(step)
    (state, batch), (own, same) = plan.put(args, mesh=mesh), args
    for x, s in zip(jax.tree.leaves((state, batch)), plan.flat_in_specs, strict=True):
        assert x.sharding.is_equivalent_to(jax.NamedSharding(mesh, s), x.ndim)
    for _ in range(3):
        (state, loss), (own, expected) = run(state, batch), alone(own, same)
        np.testing.assert_allclose(float(loss), float(expected), rtol=1e-4)
    for x, y, s in zip(jax.tree.leaves(state), jax.tree.leaves(own), plan.flat_in_specs, strict=False):
        assert x.sharding.is_equivalent_to(jax.NamedSharding(mesh, s), x.ndim)
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-3, atol=1e-5)


def test_another_step_is_not_run_under_a_plan(planned: tuple[shardplan.Plan, Any, Any]) -> None:
    plan, _, _ = planned
    with pytest.raises(shardplan.PlanFileError, match=r"not the one that was planned.*differ first at"):
        plan.jit(lambda state, batch: (state, batch["labels"].sum()))


def test_a_step_that_differs_in_a_parameter_or_a_constant_is_another_step() -> None:
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)

    def power(n: int, shift: float) -> Any:
        table = np.arange(8.0, dtype=np.float32) + shift
        return lambda x: jnp.sum(x**n + table)

    plan = shardplan.plan(power(2, 0.0), x, cluster="2")
    plan.check_step(power(2, 0.0))
    with pytest.raises(shardplan.PlanFileError, match=r"integer_pow at .*test_plan\.py"):
        plan.check_step(power(3, 0.0))
    with pytest.raises(shardplan.PlanFileError, match="an array that the step closes over"):
        plan.check_step(power(2, 1.0))


@pytest.mark.parametrize("donated", [7, 2, -3, (0, 5)])
def test_a_number_that_names_no_argument_is_refused(planned: tuple[shardplan.Plan, Any, Any], donated: Any) -> None:
    _, step, args = planned
    with pytest.raises(shardplan.ShardplanError, match=r"donate_argnums=(7|2|-3|5) names no argument: the step takes 2"):
        shardplan.plan(step, *args, cluster="2x4", donate_argnums=donated)


def test_a_negative_number_names_an_argument_from_the_end(planned: tuple[shardplan.Plan, Any, Any]) -> None:
    plan, step, args = planned
    same = shardplan.plan(step, *args, cluster="2x4", donate_argnums=-2)
    assert same.donate_argnums == plan.donate_argnums == (0,)
    assert same.donated_leaves == plan.donated_leaves == tuple(range(len(jax.tree.leaves(args[0]))))
    assert same.peak_bytes == plan.peak_bytes < shardplan.plan(step, *args, cluster="2x4").peak_bytes


def test_a_dtype_without_a_peak_is_said(caplog: pytest.LogCaptureFixture) -> None:
    x = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
    with caplog.at_level(logging.WARNING, logger="shardplan"):
        shardplan.plan(lambda x: x @ x, x, cluster="4")
        assert not caplog.records
        slow = shardplan.plan(lambda x: x @ x, x, cluster=machine("4:slow"))
    (said,) = [r.getMessage() for r in caplog.records]
    assert said == (
        f"device {slow.cluster.device.name!r} has no peak for bfloat16: its products are priced at that of float32; "
        "give flops_per_s.bfloat16 in the cluster's [device]"
    )


def test_a_loop_of_unknown_length_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: x.sum() < 10, lambda x: x @ x, x)

    with caplog.at_level(logging.WARNING, logger="shardplan"):
        plan = shardplan.plan(step, jax.ShapeDtypeStruct((8, 8), jnp.float32), cluster="2")
    (said,) = [r.getMessage() for r in caplog.records]
    assert "test_plan.py" in said
    assert "no known trip count" in said
    assert "a while loop of unknown trip count, priced as one iteration" in plan_text(plan.completed())


# -- pins --------------------------------------------------------------------------------------------------------------


def test_a_pin_is_kept(planned: tuple[shardplan.Plan, Any, Any]) -> None:
    free, step, args = planned
    path = "state/params/layer_1/kernel"
    for spec in (P("node", "gpu"), P(None, ("node", "gpu")), P()):
        plan = shardplan.plan(step, *args, cluster="2x4", donate_argnums=0, pins={path: spec, "batch/*": P("node")})
        assert tuple(plan.specs_by_path[path]) == tuple(spec)
        assert {p: s for p, s in plan.specs_by_path.items() if p.startswith("batch/")} == {
            "batch/inputs": P("node"),
            "batch/labels": P("node"),
        }
        assert plan.searched_s >= free.searched_s * (1 - 1e-9)


@pytest.mark.parametrize(
    ("pins", "says"),
    [
        ({"state/params/layer_9/kernel": P("gpu")}, "matches no argument.*nearest: state/params/layer_"),
        ({"state/params/layer_1/kernel": P("gpus")}, "axis 'gpus'.*node, gpu"),
        ({"state/params/layer_1/kernel": P("gpu", None, "node")}, "3 entries"),
        ({"state/params/layer_1/kernel": P("gpu", "gpu")}, "twice"),
        ({"batch/labels": P(("node", "gpu"), "gpu")}, "2 entries"),
        ({"state/optimizer/*/count": P("gpu")}, "entries|scalar"),
        ({"batch/labels": "gpu"}, "give a jax.sharding.PartitionSpec"),
        ({"batch/labels": P(P.UNCONSTRAINED)}, "UNCONSTRAINED: each entry is None"),
    ],
    ids=["path", "axis", "rank", "twice", "labels", "scalar", "text", "unconstrained"],
)
def test_a_pin_that_cannot_be_says_why(planned: tuple[shardplan.Plan, Any, Any], pins: dict[str, P], says: str) -> None:
    _, step, args = planned
    with pytest.raises(shardplan.PinError, match=says):
        shardplan.plan(step, *args, cluster="2x4", donate_argnums=0, pins=pins)


def test_a_pin_that_does_not_divide_names_a_size_that_would() -> None:
    step, args = mlp.train_step(batch=64, width=60)
    with pytest.raises(shardplan.PinError, match=r"does not divide 60; pad it to 64"):
        shardplan.plan(step, *args, cluster="2x4", pins={"state/params/layer_1/kernel": P(("node", "gpu"))})


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"time_budget_s": 0}, "positive number of seconds"),
        ({"objective": "beauty"}, "objective"),
        ({"cluster": "no-such-preset"}, "no-such-preset"),
        ({"cluster": "2xx"}, "2xx"),
    ],
)
def test_an_option_that_cannot_be_says_why(planned: tuple[shardplan.Plan, Any, Any], options: dict[str, Any], says: str) -> None:
    _, step, args = planned
    with pytest.raises(shardplan.ShardplanError, match=says):
        shardplan.plan(step, *args, **{"cluster": "2x4", **options})


@pytest.mark.parametrize(
    ("text", "nbytes"), [("70GiB", 70 * 2**30), ("80GB", 80 * 10**9), ("512 MiB", 2**29), (1024, 1024), ("64", 64)]
)
def test_a_size_is_a_number_and_a_unit(text: int | str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["70 gibs", "", "-1GiB", "0", "0GiB", "lots"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(shardplan.ShardplanError, match=r"memory limit .* is not (a size|positive)"):
        parse_bytes(text)


def test_a_limit_that_nothing_meets_names_the_pins_in_the_way(planned: tuple[shardplan.Plan, Any, Any]) -> None:
    _, step, args = planned
    pins = {"state/params/layer_1/kernel": P(), "state/params/layer_0/kernel": P(("node", "gpu"))}
    with pytest.raises(shardplan.MemoryLimitError, match=r"pins in the way: 'state/params/layer_1/kernel' = P\(\) \(") as told:
        shardplan.plan(step, *args, cluster="2x4", pins=pins, memory_limit=1000)
    width = 64 * 64 * 4
    assert list(told.value.pins.values()) == [width - width // 8], "the pin that splits it all is in nobody's way"
    with pytest.raises(shardplan.MemoryLimitError) as free:
        shardplan.plan(step, *args, cluster="2x4", memory_limit=1000)
    assert not free.value.pins
    assert "pins" not in str(free.value)


def test_a_primitive_without_description_is_named_with_its_line_and_may_be_replicated() -> None:
    unheard_of = Primitive("unheard_of")
    unheard_of.def_abstract_eval(lambda x: x)

    def step(x: jax.Array) -> jax.Array:
        return jnp.sum(unheard_of.bind(x) @ x)

    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    with pytest.raises(shardplan.UndescribedPrimitiveError, match=r"(?s)unheard_of.*test_plan\.py.*replicate="):
        shardplan.plan(step, x, cluster="2")
    assert shardplan.plan(step, x, cluster="2", replicate=("unheard_of",)).step_time_s > 0


def test_init_makes_an_argument_sharded_from_the_start(devices: list[Any]) -> None:
    def step(state: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, jax.grad(lambda s: jnp.mean((x @ s["w"]) ** 2))(state))

    def fresh(key: jax.Array) -> Any:
        return {"w": jax.random.normal(key, (64, 64))}

    args = jax.eval_shape(fresh, jax.random.key(0)), jax.ShapeDtypeStruct((16, 64), jnp.float32)
    plan = shardplan.plan(step, *args, cluster="2x4", pins={"state/w": P("node", "gpu")})
    made = plan.init(fresh, jax.random.key(0), devices=devices)
    assert {shard.data.shape for shard in made["w"].addressable_shards} == {(32, 16)}
    np.testing.assert_array_equal(made["w"], fresh(jax.random.key(0))["w"])
    assert plan.init(lambda: jnp.zeros((16, 64)), argument=1).shape == (16, 64)
    with pytest.raises(shardplan.ArgumentError, match="state/w"):
        plan.init(lambda: {"w": jnp.zeros((64, 32))})
    with pytest.raises(shardplan.ShardplanError, match="argument"):
        plan.init(lambda: {"w": jnp.zeros((64, 64))}, argument=2)
