"""Plans as a user holds them: made, saved, loaded, pinned, run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.api import parse_bytes


def init() -> dict[str, jax.Array]:
    up, down = jax.random.split(jax.random.key(0))
    return {"up": jax.random.normal(up, (512, 2048)) * 0.02, "down": jax.random.normal(down, (2048, 512)) * 0.02}


def step(params: Any, batch: Any) -> Any:
    def loss(p: Any) -> Any:
        return ((jnp.tanh(batch["x"] @ p["up"]) @ p["down"] - batch["y"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


SHAPES = (jax.eval_shape(init), {k: jax.ShapeDtypeStruct((4096, 512), jnp.float32) for k in "xy"})


@pytest.fixture(scope="module")
def made() -> shardplan.Plan:
    return shardplan.plan(step, *SHAPES, cluster="2x4")


def _batch() -> dict[str, jax.Array]:
    return {"x": jnp.ones((4096, 512)), "y": jnp.ones((4096, 512))}


def test_a_plan_runs_and_state_comes_back_as_it_went_in(made: shardplan.Plan, devices: list[Any]) -> None:
    run = made.jit(step, devices=devices)
    mesh = made.mesh(devices)
    params, batch = made.put((init(), _batch()), mesh=mesh)
    alone = init()
    for _ in range(3):
        params, loss = run(params, batch)
        alone, expected = jax.jit(step)(alone, _batch())
        np.testing.assert_allclose(float(loss), float(expected), rtol=1e-5)
    assert all(x.sharding.spec == s for x, s in zip(jax.tree.leaves(params), jax.tree.leaves(made.in_specs[0]), strict=True))


def test_a_saved_plan_is_the_same_plan(made: shardplan.Plan, tmp_path: Path) -> None:
    made.save(tmp_path / "plan.json")
    again = shardplan.load(tmp_path / "plan.json", step, *SHAPES)
    assert again.in_specs == made.in_specs
    assert again.out_specs == made.out_specs
    assert (again.step_time_s, again.communication_bytes, again.peak_bytes) == (
        made.step_time_s,
        made.communication_bytes,
        made.peak_bytes,
    )
    assert again.baselines == made.baselines


def test_a_plan_for_other_shapes_is_refused(made: shardplan.Plan, tmp_path: Path) -> None:
    made.save(tmp_path / "plan.json")
    fewer = {k: jax.ShapeDtypeStruct((8, 512), jnp.float32) for k in "xy"}
    with pytest.raises(shardplan.ShardplanError, match="another model or other shapes"):
        shardplan.load(tmp_path / "plan.json", step, SHAPES[0], fewer)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 99}', '{"format": 1}'])
def test_a_malformed_plan_file_is_refused_and_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(shardplan.ShardplanError, match=r"bad\.json"):
        shardplan.load(file, step, *SHAPES)


def test_a_plan_with_a_layout_that_does_not_divide_is_refused(made: shardplan.Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    made.save(file)
    content = json.loads(file.read_text())
    content["variables"] = content["variables"][:-1]
    file.write_text(json.dumps(content))
    with pytest.raises(shardplan.ShardplanError, match="does not fit this step"):
        shardplan.load(file, step, *SHAPES)


def test_another_step_does_not_run_under_a_plan(made: shardplan.Plan, devices: list[Any]) -> None:
    def other(params: Any, batch: Any) -> Any:
        return jax.tree.map(lambda p: p * 2, params), batch["x"].sum()

    with pytest.raises(shardplan.ShardplanError, match="not the one that was planned"):
        made.jit(other, devices=devices)


def test_a_pin_is_kept() -> None:
    pinned = shardplan.plan(step, *SHAPES, cluster="2x4", pins={"params/up": P("node", "gpu"), "batch/*": P(("node", "gpu"))})
    assert pinned.in_specs[0]["up"] == P("node", "gpu")
    assert pinned.in_specs[1] == {"x": P(("node", "gpu")), "y": P(("node", "gpu"))}


@pytest.mark.parametrize(
    ("pins", "says"),
    [
        ({"params/upp": P()}, "nearest: params/up"),
        ({"params/up": P("rack")}, "the plan's axes are node, gpu"),
        ({"params/up": P("gpu", "gpu")}, "uses an axis twice"),
        ({"params/up": P(None, None, "gpu")}, "rank 2"),
    ],
)
def test_a_pin_that_cannot_be_says_why(pins: dict[str, P], says: str) -> None:
    with pytest.raises(shardplan.ShardplanError, match=says):
        shardplan.plan(step, *SHAPES, cluster="2x4", pins=pins)


def test_a_pin_that_does_not_divide_names_the_size_that_would() -> None:
    odd = (jax.ShapeDtypeStruct((30, 6), jnp.float32), jax.ShapeDtypeStruct((8, 30), jnp.float32))
    with pytest.raises(shardplan.ShardplanError, match="does not divide 30; 32 would"):
        shardplan.plan(lambda w, x: (w - 0.1, (x @ w).sum()), *odd, cluster="2x4", pins={"w": P("gpu")})


def test_a_primitive_without_description_is_named_with_its_line_and_the_remedy() -> None:
    def calls_back(x: Any) -> Any:
        return jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct((), jnp.float32), x.sum())

    with pytest.raises(shardplan.ShardplanError, match=r"pure_callback.*test_api\.py.*replicate="):
        shardplan.plan(calls_back, jax.ShapeDtypeStruct((8,), jnp.float32), cluster="2x4")


def test_fewer_devices_than_the_cluster_says_both_numbers() -> None:
    with pytest.raises(shardplan.ShardplanError, match="64 devices, 16 are present"):
        shardplan.plan(step, *SHAPES, cluster="16x4").mesh()


def test_a_mesh_of_the_users_keeps_its_axis_names(devices: list[Any]) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), devices=devices)
    own = shardplan.plan(step, *SHAPES, cluster=mesh)
    assert own.mesh().axis_names == ("data", "model")
    assert own.axes == {"data": 2, "model": 4}


def test_a_padded_vocabulary_is_split_inside_the_step() -> None:
    def lookup(params: Any, tokens: Any) -> Any:
        def loss(p: Any) -> Any:
            hidden = p["table"][tokens]
            return jax.nn.logsumexp(hidden @ p["head"], axis=-1).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    params = {"table": jax.ShapeDtypeStruct((50257, 512), jnp.float32), "head": jax.ShapeDtypeStruct((512, 50257), jnp.float32)}
    uneven = shardplan.plan(lookup, params, jax.ShapeDtypeStruct((4, 2048), jnp.int32), cluster="8")
    split = {
        layout.dims
        for t, layout in zip(uneven.extractor.problem.graph.tensors, uneven.decisions.layouts, strict=True)
        if layout is not None and t.shape == (4, 2048, 50257)
    }
    assert split == {((), (), (0,))}
    assert uneven.in_specs[0]["head"] in (P("gpu"), P())


@pytest.mark.parametrize(
    ("text", "nbytes"), [("70GiB", 70 * 2**30), ("80GB", 80 * 10**9), ("512 MiB", 2**29), (1024, 1024), ("64", 64)]
)
def test_sizes_are_read(text: int | str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["70 gibs", "", "-1GiB", "0", "lots"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(shardplan.ShardplanError, match="memory limit"):
        parse_bytes(text)


def test_the_decorator_updates_nnx_objects_in_place_and_compiles_once(devices: list[Any]) -> None:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up = nnx.Linear(64, 256, rngs=rngs)
            self.down = nnx.Linear(256, 64, rngs=rngs)
            self.drop = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.down(self.drop(nnx.gelu(self.up(x))))

    def train(model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        value, grads = nnx.value_and_grad(lambda m: ((m(x) - x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return value

    def losses(run: Any) -> list[float]:
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
        x = jax.random.normal(jax.random.key(1), (32, 64))
        return [float(run(model, optimizer, x)) for _ in range(4)]

    sharded = shardplan.parallelize("2x4", devices=devices)(train)
    np.testing.assert_allclose(losses(sharded), losses(nnx.jit(train)), rtol=1e-4)
    assert any(p.startswith("model/up") for p in sharded.plan.specs_by_path)


def test_init_is_made_sharded(devices: list[Any]) -> None:
    sharded = shardplan.parallelize("2x4", devices=devices, pins={"params/up": P(None, "gpu")})(step)
    with pytest.raises(shardplan.ShardplanError, match="planned at its first call"):
        _ = sharded.plan
    sharded.prepare(*SHAPES)
    params = sharded.init(init)
    assert params["up"].sharding.spec == P(None, "gpu")


def test_plans_are_kept_in_a_folder(tmp_path: Path, devices: list[Any]) -> None:
    first = shardplan.parallelize("2x4", cache_dir=tmp_path, devices=devices)(step)
    planned = first.prepare(*SHAPES)
    assert len(list(tmp_path.glob("*.plan.json"))) == 1
    again = shardplan.parallelize("2x4", cache_dir=tmp_path, devices=devices)(step).prepare(*SHAPES)
    assert again.in_specs == planned.in_specs
    assert again.search_s == planned.search_s
