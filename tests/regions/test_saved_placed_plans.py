"""A plan with groups of devices is saved, and comes back as it was: it runs and verifies without a search."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import shardplan
from models import mlp
from shardplan.planning import planner
from shardplan.plans.files import FORMAT, read, read_any
from shardplan.shell.cli import main
from shardplan.verify.verify import verify
from tests.placed import RandomGroups

PIPELINE: dict[str, Any] = {"cluster": "2x2", "axes": {"stage": 2, "data": 2}, "microbatches": 4}


@pytest.fixture(scope="module")
def step_of() -> tuple[Any, tuple[Any, ...]]:
    return mlp.train_step(layers=3, batch=16, width=16)


@pytest.fixture(scope="module")
def pipeline(step_of: tuple[Any, tuple[Any, ...]]) -> shardplan.PlacedPlan:
    step, args = step_of
    return shardplan.plan(step, *args, donate_argnums=(0,), **PIPELINE)


@pytest.fixture(scope="module")
def saved(pipeline: shardplan.PlacedPlan) -> dict[str, Any]:
    return pipeline.to_json()


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a search began")

    monkeypatch.setattr("shardplan.regions.group_plans.planned", refuse)
    monkeypatch.setattr(planner, "_searched", refuse)


@pytest.mark.usefixtures("no_search")
def test_a_pipeline_comes_back_whole_and_verifies_without_a_search(
    pipeline: shardplan.PlacedPlan, step_of: tuple[Any, tuple[Any, ...]], tmp_path: Path
) -> None:
    step, args = step_of
    pipeline.save(tmp_path / "plan.json")
    again = shardplan.load(tmp_path / "plan.json", step, *args)
    assert isinstance(again, shardplan.PlacedPlan)
    assert again.to_json() == pipeline.to_json()
    assert again.placed.dispatch == pipeline.placed.dispatch
    assert again.text() == pipeline.text()
    assert again.explain() == pipeline.explain()
    assert again.specs_by_path == pipeline.specs_by_path
    assert verify(again, step, args).passed


def test_ops_on_groups_come_back_and_run(tmp_path: Path) -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jnp.tanh(x @ w)
        return w - 0.1 * (x.T @ (y @ y.T) @ x) @ w, jnp.sum(y)

    args = (jnp.full((8, 8), 0.1), jnp.ones((4, 8)))
    plan = shardplan.plan(step, *args, cluster="4", placement=RandomGroups(2))
    assert len(plan.groups) > 1
    plan.save(tmp_path / "plan.json")
    again = shardplan.load(tmp_path / "plan.json", step, *args)
    assert again.to_json() == plan.to_json()
    for a, b in zip(again.jit(step, jax.devices()[:4])(*args), step(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_a_file_for_another_step_machine_or_use_is_refused(
    pipeline: shardplan.PlacedPlan, step_of: tuple[Any, tuple[Any, ...]], tmp_path: Path
) -> None:
    step, args = step_of
    file = tmp_path / "plan.json"
    pipeline.save(file)
    with pytest.raises(shardplan.PlanFileError, match=r"another model or other shapes: state/optimizer/0/mu/layer_0/bias was"):
        shardplan.load(file, *_flat(mlp.train_step(layers=3, batch=16, width=32)))
    with pytest.raises(shardplan.PlanFileError, match=r"is missing|is new"):
        shardplan.load(file, *_flat(mlp.train_step(layers=2, batch=16, width=16)))
    with pytest.raises(shardplan.PlanFileError, match="no warm start for other shapes"):
        shardplan.load(file, *_flat(mlp.train_step(layers=3, batch=32, width=16)), warm_start=True)
    with pytest.raises(
        shardplan.DeviceError, match=r"the 2 groups of this plan are parts of 4 devices \(2x2\), and the mesh has 2"
    ):
        shardplan.load(file, step, *args, mesh=Mesh(np.array(jax.devices()[:2]), ("gpu",)))
    with pytest.raises(shardplan.DeviceError, match="has 4 devices, and devices= gives 2"):
        shardplan.load(file, step, *args).jit(step, jax.devices()[:2])
    with pytest.raises(shardplan.PlanFileError, match="a plan on 2 groups of devices, and a plan on all devices is needed here"):
        read(file)


def _flat(made: tuple[Any, tuple[Any, ...]]) -> tuple[Any, ...]:
    return made[0], *made[1]


def _swap(content: dict[str, Any]) -> None:
    content["issues"] = content["issues"][::-1]


def _drop(content: dict[str, Any]) -> None:
    content["issues"].pop()


def _unknown(content: dict[str, Any]) -> None:
    content["issues"][-1]["number"] = 10**6


def _devices(content: dict[str, Any]) -> None:
    content["devices"][1] = [1, 2, 3]


def _absent(content: dict[str, Any]) -> None:
    content["devices"][1] = [2, 9]


def _strange(content: dict[str, Any]) -> None:
    content["inner"][0][1] = 7


def _ungrouped(content: dict[str, Any]) -> None:
    content["inner"].pop(0)


def _short(content: dict[str, Any]) -> None:
    content["groups"].pop()


def _lacking(content: dict[str, Any]) -> None:
    del content["groups"][1]["factors"]


def _wrong(content: dict[str, Any]) -> None:
    content["groups"][1]["step_time_s"] = "long"


def _whole(content: dict[str, Any]) -> None:
    del content["issues"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_swap, "comes before what it reads"),
        (_drop, "the order does not have each of"),
        (_unknown, "the order names (task|transfer) 1000000"),
        (_devices, r"groups\[1\] is a plan for 2x2\[2,3\], not for its devices"),
        (_absent, r"devices\[1\]: .* names a device that does not exist"),
        (_strange, "inner names the chunk 7, there are 2"),
        (_ungrouped, "there is no group for"),
        (_short, "devices has 2 groups, groups has 1"),
        (_lacking, r"incomplete plan: 'groups\[1\].factors' is missing"),
        (_wrong, r"groups\[1\]: step_time_s='long' is not a number"),
        (_whole, "incomplete plan: 'issues' is missing"),
    ],
    ids=lambda x: x.__name__ if callable(x) else "",
)
def test_a_file_that_contradicts_itself_is_refused(
    saved: dict[str, Any],
    step_of: tuple[Any, tuple[Any, ...]],
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
    message: str,
) -> None:
    step, args = step_of
    content = json.loads(json.dumps(saved))
    assert content["format"] == FORMAT
    change(content)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(content))
    with pytest.raises(shardplan.PlanFileError, match=message):
        shardplan.load(file, step, *args)


@pytest.mark.slow
def test_the_cache_of_plans_keeps_a_pipeline(
    step_of: tuple[Any, tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, _ = step_of
    _, args = mlp.train_step(layers=3, batch=16, width=16, concrete=True)

    def run() -> Any:
        return shardplan.parallelize(cache_dir=tmp_path, devices=jax.devices()[:4], **PIPELINE)(step)

    first = run()
    wanted = jax.tree.leaves(first(*args))
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr("shardplan.shell.parallel.make_plan", None)
    again = run()
    for a, b in zip(jax.tree.leaves(again(*args)), wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    assert again.plan.to_json() == first.plan.to_json()


def test_the_cache_tells_placements_apart_by_what_they_say(tmp_path: Path) -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ w) @ w)

    args = (jnp.ones((8, 8)), jnp.ones((4, 8)))
    for seed in (2, 2, 5):
        shardplan.parallelize("4", cache_dir=tmp_path, placement=RandomGroups(seed))(step).prepare(*args)
    assert len(list(tmp_path.iterdir())) == 2


def test_the_bubble_is_drawn_and_explained(pipeline: shardplan.PlacedPlan, tmp_path: Path) -> None:
    shown = pipeline.simulate()
    assert shown.rows[:2] == ("group 0 (0-1)", "group 1 (2-3)")
    assert shown.step_time_s == pipeline.step_time_s == shown.end_s.max()
    assert shown.bubble_s == pytest.approx(pipeline.idle_share * pipeline.step_time_s)
    busy = [pipeline.placed.dispatch.busy_s(pipeline.placed.graph, g) for g in range(2)]
    np.testing.assert_allclose(shown.busy_s()[:2], busy)
    assert {0, 1, 2, 3} == set(shown.kind.tolist()), "forward, backward, update and transfer"
    pipeline.draw(tmp_path / "gantt.svg", title="mlp")
    shown.save(tmp_path / "trace.json")
    names = [
        e["args"]["name"]
        for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if e["ph"] == "M" and e["name"] == "thread_name"
    ]
    assert names == list(shown.rows)
    with pytest.raises(shardplan.ShardplanError, match="overlap and contention"):
        pipeline.simulate(contention=1.5)
    text = pipeline.explain()
    assert "2 stages of 4 microbatches" in text
    assert "the bubble" in text
    assert "state/params/layer_0/kernel" in text
    assert "held by group 0 (devices 0-1)" in pipeline.explain("state/params/layer_0/kernel")
    with pytest.raises(shardplan.ShardplanError, match="no argument 'state/params/layer_9/kernel'"):
        pipeline.explain("state/params/layer_9/kernel")


@pytest.mark.slow
def test_the_commands_save_show_and_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, step = str(tmp_path / "plan.json"), ["models.mlp:train_step", "--set", "layers=3"]
    assert main(["plan", *step, "--cluster", "2x2", "--axes", "stage=2", "--microbatches", "4", "-o", file]) == 0
    assert isinstance(read_any(file).cluster, shardplan.Cluster)
    assert f"saved to {file}" in capsys.readouterr().out
    assert main(["explain", file]) == 0
    assert "2 stages of 4 microbatches" in capsys.readouterr().out
    assert main(["explain", file, "state/params/layer_0/kernel", "--json"]) == 0
    assert "held by group 0" in json.loads(capsys.readouterr().out)["explain"]["state/params/layer_0/kernel"]
    assert main(["simulate", *step, "--plan", file, "--png", str(tmp_path / "gantt.png"), "-o", str(tmp_path / "t.json")]) == 0
    assert "the bubble" in capsys.readouterr().out
    assert main(["verify", *step, "--plan", file, "--steps", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["equal"]
    assert main(["verify", *step, "--plan", file, "--cluster", "2x4"]) == 2
    assert "made for the cluster 2x2, not for 2x4" in capsys.readouterr().err
    assert main(["diff", file, file]) == 0
    assert main(["export", file, "-o", str(tmp_path / "specs.py")]) == 0
    capsys.readouterr()
    assert main(["export", file, "-o", str(tmp_path / "rules.yml")]) == 2
    assert "is of one mesh, and this plan has 2 groups of devices" in capsys.readouterr().err
