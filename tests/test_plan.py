"""Plans and their life: specs, pins, files, the decorator, and what a user may get wrong."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import shardplan
from models import gpt, mlp
from shardplan.mesh import Cluster, Matrix, coordinates

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
    assert plan.step_time_s == pytest.approx(plan.compute_s + plan.communication_s, rel=1e-4)
    assert plan.communication_bytes == pytest.approx(sum(c.wire_bytes * c.times for c in plan.collectives))
    assert 0 < plan.lower_bound_s <= plan.step_time_s * (1 + 1e-9)
    assert 0 < plan.peak_bytes <= plan.memory_limit
    assert plan.axes == {"node": 2, "gpu": 4}
    assert plan.matrix == {"axes": ["node", "gpu"], "levels": ["node", "gpu"], "factors": [[2, 1], [1, 4]]}
    assert plan.time_model == "sum"
    assert plan.operators > 50
    assert plan.trace_s > 0
    assert plan.search_s > 0
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
    slow = replace(ring.device, flops_per_s={"float32": 1e6}, launch_s=0.0)  # so that a small step is worth splitting
    cluster = Cluster("racks", levels, slow)

    def step(w: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w["up"]) @ w["down"]

    # four parts do not divide these dims, and padding them would waste too much: a level of four has to be split
    weights = {"up": jax.ShapeDtypeStruct((14, 10), jnp.float32), "down": jax.ShapeDtypeStruct((10, 14), jnp.float32)}
    x = jax.ShapeDtypeStruct((14, 14), jnp.float32)
    plan = shardplan.plan(step, weights, x, cluster=cluster)
    assert tuple(plan.axes) == ("rack", "node", "gpu0", "gpu1")
    matrix = Matrix(tuple(map(tuple, plan.matrix["factors"])))
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


def test_a_step_runs_as_planned(planned: tuple[shardplan.Plan, Any, Any], devices: list[Any]) -> None:
    _, step, _ = planned
    _, args = mlp.train_step(batch=64, width=64, concrete=True)
    plan = shardplan.plan(step, *args, cluster="2x4")
    mesh = plan.mesh(devices)
    run = plan.jit(step, devices)
    placed = plan.put(args, mesh=mesh)
    for x, s in zip(jax.tree.leaves(placed), plan.flat_in_specs, strict=True):
        assert x.sharding.is_equivalent_to(jax.NamedSharding(mesh, s), x.ndim)
    got, want = run(*placed), jax.jit(step)(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-3, atol=1e-5)


# -- pins --------------------------------------------------------------------------------------------------------------


def test_a_pin_is_kept(planned: tuple[shardplan.Plan, Any, Any]) -> None:
    free, step, args = planned
    path = "state/params/layer_1/kernel"
    for spec in (P("node", "gpu"), P(None, ("node", "gpu")), P()):
        plan = shardplan.plan(step, *args, cluster="2x4", donate_argnums=0, pins={path: spec})
        assert tuple(plan.specs_by_path[path]) + (None,) * (2 - len(plan.specs_by_path[path])) == tuple(spec) + (None,) * (
            2 - len(spec)
        )
        assert plan.step_time_s >= free.step_time_s * (1 - 1e-9)


@pytest.mark.parametrize(
    ("pins", "says"),
    [
        ({"state/params/layer_9/kernel": P("gpu")}, "matches no argument.*layer_"),
        ({"state/params/layer_1/kernel": P("gpus")}, "axis 'gpus'.*node, gpu"),
        ({"state/params/layer_1/kernel": P("gpu", None, "node")}, "3 entries"),
        ({"state/params/layer_1/kernel": P("gpu", "gpu")}, "twice"),
        ({"batch/labels": P(("node", "gpu"), "gpu")}, "2 entries"),
        ({"state/optimizer/*/count": P("gpu")}, "entries|scalar"),
    ],
    ids=["path", "axis", "rank", "twice", "labels", "scalar"],
)
def test_a_pin_that_cannot_be_says_why(planned: tuple[shardplan.Plan, Any, Any], pins: dict[str, P], says: str) -> None:
    _, step, args = planned
    with pytest.raises(shardplan.PinError, match=says):
        shardplan.plan(step, *args, cluster="2x4", donate_argnums=0, pins=pins)


def test_a_pin_that_does_not_divide_names_a_size_that_would() -> None:
    step, args = mlp.train_step(batch=64, width=60)
    with pytest.raises(shardplan.PinError, match=r"does not divide 60; 64 would"):
        shardplan.plan(step, *args, cluster="2x4", pins={"state/params/layer_1/kernel": P(("node", "gpu"))})


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_saved_plan_is_read_back_whole(planned: tuple[shardplan.Plan, Any, Any], tmp_path: Path) -> None:
    plan, step, args = planned
    file = tmp_path / "plan.json"
    plan.save(file)
    again = shardplan.load(file, step, *args)
    assert again.to_json() == plan.to_json()
    assert again.specs_by_path == plan.specs_by_path
    assert again.baselines == plan.baselines
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"], "nothing is left beside the file"


def test_a_plan_of_another_model_is_refused(planned: tuple[shardplan.Plan, Any, Any], tmp_path: Path) -> None:
    plan, _, _ = planned
    file = tmp_path / "plan.json"
    plan.save(file)
    for options in ({"layers": 3}, {"batch": 32}, {"dtype": "bfloat16"}, {"optimizer": "sgd"}):
        other, args = mlp.train_step(**{"batch": 64, "width": 64, **options})
        with pytest.raises(shardplan.PlanFileError, match="another model or other shapes"):
            shardplan.load(file, other, *args)


def test_another_step_is_not_run_under_a_plan(planned: tuple[shardplan.Plan, Any, Any]) -> None:
    plan, _, _ = planned
    with pytest.raises(shardplan.PlanFileError, match="not the one that was planned"):
        plan.jit(lambda state, batch: (state, batch["labels"].sum()))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not a plan file"),
        ("[]", "plan format"),
        ('{"format": 999}', "plan format 999"),
        ('{"format": 1}', "not a plan|another"),
    ],
)
def test_a_file_that_is_no_plan_says_so(planned: tuple[shardplan.Plan, Any, Any], tmp_path: Path, text: str, says: str) -> None:
    _, step, args = planned
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(shardplan.ShardplanError, match=says):
        shardplan.load(file, step, *args)


def test_a_file_that_is_not_there_says_so(planned: tuple[shardplan.Plan, Any, Any], tmp_path: Path) -> None:
    _, step, args = planned
    with pytest.raises(shardplan.PlanFileError, match="No such file"):
        shardplan.load(tmp_path / "nowhere.json", step, *args)


def test_a_tampered_plan_is_refused(planned: tuple[shardplan.Plan, Any, Any], tmp_path: Path) -> None:
    plan, step, args = planned
    file = tmp_path / "plan.json"
    for change in ({"variables": []}, {"factors": [["node", 3, 0, 1]]}, {"cluster": "name = 3"}):
        file.write_text(json.dumps({**plan.to_json(), **change}))
        with pytest.raises(shardplan.ShardplanError):
            shardplan.load(file, step, *args)


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"memory_limit": "lots"}, "not a size"),
        ({"memory_limit": "0GiB"}, "not positive"),
        ({"time_budget_s": 0}, "positive number of seconds"),
        ({"objective": "beauty"}, "objective"),
        ({"search": "magic"}, "search"),
        ({"cluster": "no-such-preset"}, "no-such-preset"),
        ({"cluster": "2xx"}, "2xx"),
    ],
)
def test_an_option_that_cannot_be_says_why(planned: tuple[shardplan.Plan, Any, Any], options: dict[str, Any], says: str) -> None:
    _, step, args = planned
    with pytest.raises(shardplan.ShardplanError, match=says):
        shardplan.plan(step, *args, **{"cluster": "2x4", **options})


@pytest.mark.parametrize(("text", "n"), [("1GiB", 2**30), ("80GB", 80 * 10**9), ("512 MiB", 2**29), (2**30, 2**30)])
def test_memory_limits_are_read(planned: tuple[shardplan.Plan, Any, Any], text: Any, n: int) -> None:
    _, step, args = planned
    assert shardplan.plan(step, *args, cluster="4", memory_limit=text).memory_limit == n


def test_a_primitive_without_description_is_named_with_its_line_and_may_be_replicated() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jnp.sum(jax.pure_callback(np.sin, x, x) @ x)

    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    with pytest.raises(shardplan.UndescribedPrimitiveError, match=r"pure_callback.*test_plan.py"):
        shardplan.plan(step, x, cluster="2")
    assert shardplan.plan(step, x, cluster="2", replicate=("pure_callback",)).step_time_s > 0


def test_a_mesh_of_ones_own_keeps_its_names(devices: list[Any]) -> None:
    mesh = Mesh(np.array(devices).reshape(2, 4), ("rows", "columns"))
    step, args = mlp.train_step(batch=64)
    plan = shardplan.plan(step, *args, cluster=mesh)
    assert list(plan.axes) == ["rows", "columns"]
    assert plan.mesh().axis_names == ("rows", "columns")


# -- the decorator -----------------------------------------------------------------------------------------------------


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
    ((_, run, _),) = parallel._ready.values()
    assert run._cache_size() == 1  # type: ignore[attr-defined]


def test_an_nnx_step_changes_its_model_in_place() -> None:
    def make() -> tuple[nnx.Linear, nnx.Optimizer]:
        model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(model: nnx.Linear, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, gradients)
        return loss

    x = jax.random.normal(jax.random.key(1), (32, 16))
    model, optimizer = make()
    parallel = shardplan.parallelize(cluster="2x4", devices=jax.devices()[:8])(step)
    got = [float(parallel(model, optimizer, x)) for _ in range(3)]
    other, own = make()
    want = [float(nnx.jit(step)(other, own, x)) for _ in range(3)]
    assert got == pytest.approx(want, rel=1e-4)
    assert got[2] < got[0]


def test_static_arguments_choose_a_plan_each() -> None:
    def step(x: jax.Array, power: int, *, flip: bool) -> jax.Array:
        return jnp.sum(x**power) * (-1.0 if flip else 1.0)

    parallel = shardplan.parallelize(cluster="4", devices=jax.devices()[:4], static_argnums=1, static_argnames="flip")(step)
    x = jnp.arange(8.0)
    assert float(parallel(x, 2, flip=False)) == pytest.approx(140.0)
    assert float(parallel(x, 3, flip=True)) == pytest.approx(-784.0)


def test_plans_are_kept_in_a_directory(tmp_path: Path) -> None:
    step, (state, batch) = mlp.train_step(batch=64)
    for _ in range(2):
        plan = shardplan.parallelize(cluster="2x4", cache_dir=tmp_path)(step).prepare(state, batch)
    assert len(list(tmp_path.glob("*.plan.json"))) == 1
    fresh = shardplan.plan(step, state, batch, cluster="2x4")
    assert plan.specs_by_path == fresh.specs_by_path
    shardplan.parallelize(cluster="4", cache_dir=tmp_path)(step).prepare(state, batch)
    assert len(list(tmp_path.glob("*.plan.json"))) == 2


def test_init_makes_the_state_sharded() -> None:
    step, (state, batch) = gpt.train_step(layers=1, batch=16)
    parallel = shardplan.parallelize(cluster="2x4", devices=jax.devices()[:8])(step)
    plan = parallel.prepare(state, batch)
    made = parallel.init(lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), state))
    mesh = plan.mesh(jax.devices()[:8])
    specs = jax.tree.leaves(plan.in_specs[0], is_leaf=lambda s: isinstance(s, P))
    for x, s in zip(jax.tree.leaves(made), specs, strict=True):
        assert x.sharding.is_equivalent_to(jax.NamedSharding(mesh, s), x.ndim)
