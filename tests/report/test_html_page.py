"""The HTML page of a plan: one file that needs no network, whose numbers are the plan's, and in which no name is markup."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from models import gpt, llama
from shardplan.errors import ShardplanError
from shardplan.ir import spec_text
from shardplan.mesh import Cluster
from shardplan.report.html_collectives import folded_collectives
from shardplan.report.html_seconds import BACKWARD, FORWARD, layer_of, parts_of
from shardplan.report.html_timeline import bars_of, columns_of
from shardplan.report.plan_text import best_baseline
from shardplan.search.memory.liveness import whole_bytes
from shardplan.shell.plan_of_step import Plan
from tests.machines import machine
from tests.report.pages import Parsed, assert_needs_no_network

HOSTILE = "<script>document.title='changed'</script>&<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def plan() -> Plan:
    step, args = gpt.train_step(layers=3, width=64, batch=16)
    return shardplan.plan(step, *args, cluster=machine("2x2:slow"), donate_argnums=0)


@pytest.fixture(scope="module")
def text(plan: Plan) -> str:
    return plan.html(title="gpt")


@pytest.fixture(scope="module")
def data(text: str) -> dict[str, Any]:
    return Parsed(text).data


# -- one file ----------------------------------------------------------------------------------------------------------


def test_a_page_is_one_file_that_needs_no_network(text: str) -> None:
    assert_needs_no_network(text)
    assert len(Parsed(text).scripts) == 2
    assert text.startswith("<!DOCTYPE html>")
    assert "<!--" not in text  # every mark is replaced


def test_readers_without_javascript_get_the_plan_as_text(plan: Plan, text: str) -> None:
    words = "".join(Parsed(text).noscript)
    assert "Parallelism matrix" in words
    assert all(name in words for name in plan.axes)


def test_names_are_never_markup() -> None:
    def step(weights: dict[str, Any], x: Any) -> Any:
        return {name: w - x.sum() for name, w in weights.items()}

    args = ({HOSTILE: jax.ShapeDtypeStruct((64, 64), jnp.float32)}, jax.ShapeDtypeStruct((64,), jnp.float32))
    plan = shardplan.plan(step, *args, cluster=replace(Cluster.load("2"), name=HOSTILE))
    text = plan.html(title=HOSTILE)
    page = Parsed(text)
    assert_needs_no_network(text)
    assert len(page.scripts) == 2
    assert "<script>document" not in text
    assert "<img" not in text
    assert page.data["title"] == HOSTILE
    assert any(HOSTILE in row["pattern"] for row in page.data["arrays"])
    assert "<script>document" not in plan._repr_html_()
    assert "<img" not in plan._repr_html_()


def test_marks_in_names_are_left_alone() -> None:
    plan = shardplan.plan(lambda x: x * 2, jax.ShapeDtypeStruct((64,), jnp.float32), cluster="2")
    text = plan.html(title="<!--SCRIPT--> <!--DATA-->")
    page = Parsed(text)
    assert len(page.scripts) == 2
    assert page.data["title"] == "<!--SCRIPT--> <!--DATA-->"


def test_a_page_is_written_whole_or_refused(plan: Plan, text: str, tmp_path: Path) -> None:
    assert plan.html(tmp_path / "plan.html", title="gpt") == text
    assert (tmp_path / "plan.html").read_text(encoding="utf-8") == text
    with pytest.raises(ShardplanError, match="it is a folder"):
        plan.html(tmp_path)
    with pytest.raises(ShardplanError, match="there is no folder"):
        plan.html(tmp_path / "gone" / "plan.html")


def test_a_loaded_plan_has_the_same_arrays_and_seconds(plan: Plan, data: dict[str, Any], tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    step, args = gpt.train_step(layers=3, width=64, batch=16)
    loaded = Parsed(shardplan.load(tmp_path / "plan.json", step, *args).html(title="gpt")).data
    for part in ("figures", "arrays", "parts", "memory", "collectives", "baselines", "timeline"):
        assert loaded[part] == data[part], part


# -- the plan's numbers ------------------------------------------------------------------------------------------------


def test_the_head_has_the_plans_figures(plan: Plan, data: dict[str, Any]) -> None:
    figures, best = data["figures"], best_baseline(plan.completed())
    for name in ("step_time_s", "compute_s", "communication_s", "exposed_s", "communication_bytes", "peak_bytes", "memory_limit"):
        assert figures[name] == getattr(plan, name)
    assert best is not None
    assert figures["best_baseline"] == {"name": best.name, "step_time_s": best.step_time_s}
    assert {axis["name"]: axis["size"] for axis in data["axes"]} == plan.axes
    assert data["matrix"]["factors"] == plan.matrix["factors"]
    assert data["cluster"]["devices"] == 4


def test_every_array_is_in_one_row_with_its_cuts(plan: Plan, data: dict[str, Any]) -> None:
    rows = data["arrays"]
    assert sum(row["count"] for row in rows) == len(plan.arguments)
    assert sum(row["nbytes"] for row in rows) == sum(a.nbytes for a in plan.arguments)
    assert any("{0..2}" in row["pattern"] for row in rows)  # layers are folded
    arguments = {a.path: a for a in plan.arguments}
    for row in rows:
        one = arguments[row["first"]]
        assert row["spec"] == spec_text(plan.specs_by_path[row["first"]])
        assert tuple(map(tuple, row["cuts"])) == (one.layout.dims if one.layout else ((),) * len(one.shape))
        ways = math.prod(plan.factors[f].size for dim in row["cuts"] for f in dim)
        assert row["device_bytes"] * ways == pytest.approx(row["nbytes"])


def test_the_next_best_layout_costs_what_the_search_says(plan: Plan, data: dict[str, Any]) -> None:
    paths, names = plan.program.input_paths, tuple(plan.axes)
    compared = 0
    for row in data["arrays"]:
        v = plan.session.variable(paths.index(row["first"]))
        if v < 0:
            assert row["others"] == []
            continue
        expected = [(spec_text(a.layout.entries(names)), a.more_s) for a in plan.session.alternatives(v)[:3]]
        assert [(o["spec"], o["more_s"]) for o in row["others"]] == expected
        assert row["why"].startswith(row["pattern"])
        compared += len(expected)
    assert compared > 10


def test_the_seconds_add_up_to_compute_and_communication(plan: Plan, data: dict[str, Any]) -> None:
    parts = data["parts"]
    assert plan.communication_s > 0
    compute_s = sum(p["seconds"] for p in parts if p["kind"] in (FORWARD, BACKWARD))
    assert compute_s == pytest.approx(plan.compute_s)
    assert sum(p["seconds"] for p in parts) == pytest.approx(plan.serial_s)
    for kind in {c.kind for c in plan.collectives}:
        sent_s = sum(c.seconds * c.times for c in plan.collectives if c.kind == kind)
        assert sum(p["seconds"] for p in parts if p["kind"] == kind.value) == pytest.approx(sent_s)
    assert any(p["layer"] == "block_*/mlp" and p["layers"] == 3 for p in parts)


def test_small_parts_are_joined_without_a_loss(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardplan.report.html_seconds._MOST", 5)
    parts = parts_of(plan.planned, plan.collectives)
    assert sum(p.seconds for p in parts) == pytest.approx(plan.serial_s)
    assert {p.layer for p in parts[5:]} == {"all other lines"}


def test_collectives_are_folded_without_a_loss(plan: Plan, data: dict[str, Any]) -> None:
    rows = data["collectives"]
    assert 0 < len(rows) < len(plan.collectives)
    assert sum(r["wire_bytes"] for r in rows) == pytest.approx(plan.communication_bytes)
    assert sum(r["seconds"] for r in rows) == pytest.approx(plan.communication_s)
    assert sum(r["exposed_s"] for r in rows) == pytest.approx(plan.exposed_s)
    assert sum(r["times"] for r in rows) == sum(c.times for c in plan.collectives)
    assert rows == sorted(rows, key=lambda r: -r["seconds"])
    assert {r["source"] for r in rows} == {c.source for c in plan.collectives}
    assert len(folded_collectives(plan.collectives * 2)) == len(rows)


def test_the_memory_curve_has_the_plans_peak(plan: Plan, data: dict[str, Any]) -> None:
    memory = data["memory"]
    assert whole_bytes(max(memory["held"])) == plan.peak_bytes
    at = max(i for i, op in enumerate(memory["ops"]) if op <= memory["peak_op"])
    assert memory["held"][at] == max(memory["held"])
    assert len(memory["ops"]) == len(memory["held"]) == len(memory["lines"]) <= 600
    assert "\n".join(memory["peak"]) in plan.explain()
    assert 0 < memory["backward"] < memory["length"]


def test_baselines_stand_beside_the_plan(plan: Plan, data: dict[str, Any]) -> None:
    first, *others = data["baselines"]
    assert (first["name"], first["step_time_s"]) == ("this plan", plan.step_time_s)
    assert {(b["name"], b["step_time_s"], b["fits"]) for b in others} == {(b.name, b.step_time_s, b.fits) for b in plan.baselines}
    assert data["own"] is None


def test_a_score_puts_the_users_sharding_beside_the_plan() -> None:
    def step(w: dict[str, Any], x: Any) -> Any:
        loss = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w["up"]) @ w["down"]))
        return jax.tree.map(lambda p, g: p - g, w, loss(w))

    shapes = {"up": (512, 2048), "down": (2048, 512)}
    args = ({n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}, jax.ShapeDtypeStruct((4096, 512), jnp.float32))
    score = shardplan.score(step, *args, cluster="2x4", rules={"w/up": P("gpu")})
    own = Parsed(shardplan.plan(step, *args, cluster="2x4").html(score=score)).data["own"]
    assert (own["step_time_s"], own["fits"]) == (score.step_time_s, score.fits)
    assert own["specs"]["w/up"] == "P('gpu')"
    assert [loss["seconds"] for loss in own["losses"]] == [loss.seconds for loss in score.losses]
    assert len(own["unasked"]) == len(score.unasked)


# -- the timeline ------------------------------------------------------------------------------------------------------


def test_bars_of_tasks_and_of_columns_are_busy_as_long_as_the_streams(plan: Plan, data: dict[str, Any]) -> None:
    shown = plan.simulate()
    assert data["timeline"]["step_time_s"] == shown.step_time_s
    assert data["timeline"]["whole"]
    for bars in (bars_of(shown).streams, columns_of(shown)):
        for stream in bars:
            busy_s = sum(s * b for s, b in zip(stream.seconds, stream.busy, strict=True))
            assert busy_s == pytest.approx(shown.busy_s[stream.name], rel=0.01)
            assert all(0 <= e <= b + 1e-9 for e, b in zip(stream.exposed, stream.busy, strict=True))
    names = data["timeline"]["labels"]
    assert all(0 <= n < len(names) for s in data["timeline"]["streams"] for n in s["label"])
    assert any("gpt.py" in name for name in names)


def test_a_column_is_named_by_the_task_that_takes_most_of_it(plan: Plan) -> None:
    shown = plan.simulate()
    (compute, *_) = columns_of(shown)
    for start, length, label in list(zip(compute.start_s, compute.seconds, compute.label, strict=True))[::40]:
        spent: dict[int, float] = {}
        for n in (shown.stream == 0).nonzero()[0].tolist():
            inside = min(shown.end_s[n], start + length) - max(shown.start_s[n], start)
            spent[int(shown.label[n])] = spent.get(int(shown.label[n]), 0.0) + max(0.0, float(inside))
        assert spent[label] >= max(spent.values()) - 1e-3 * length


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "layer"),
    [
        ("jvp(block_0)/attention", "block_0/attention"),
        ("transpose(jvp(block_0))/mlp", "block_0/mlp"),
        ("transpose(jvp())", ""),
        ("rematted_computation/attention/bqkgh,bskh->bkgqs", "attention"),
        ("jit(step)/while/body/checkpoint/mlp", "mlp"),
        ("", ""),
    ],
)
def test_a_layer_is_a_scope_without_transformations(scope: str, layer: str) -> None:
    assert layer_of(scope) == layer


# -- size --------------------------------------------------------------------------------------------------------------

MOST = 2_000_000
"""The most bytes of a page."""


@pytest.mark.slow
def test_llama_70b_stays_small() -> None:
    step, args = llama.train_step(size="70b", sequence=4096, batch=64, dtype="bfloat16", scan=True, remat=True)
    plan = shardplan.plan(step, *args, cluster="8x8", donate_argnums=0)
    text = plan.html()
    assert len(text.encode()) < MOST / 4
    timeline = Parsed(text).data["timeline"]
    assert not timeline["whole"]
    assert sum(p["seconds"] for p in Parsed(text).data["parts"]) == pytest.approx(plan.serial_s)  # loops count
    assert all(len(s["start_s"]) <= 600 for s in timeline["streams"])


@pytest.mark.slow
def test_layers_that_are_unrolled_are_folded_in_the_page() -> None:
    sizes: list[int] = []
    for layers in (2, 6):
        step, args = llama.train_step(size="70b", layers=layers, sequence=4096, batch=64, dtype="bfloat16", remat=True)
        sizes.append(len(shardplan.plan(step, *args, cluster="8x8", donate_argnums=0).html().encode()))
    assert (sizes[1] - sizes[0]) / 4 * 80 + sizes[0] < MOST
