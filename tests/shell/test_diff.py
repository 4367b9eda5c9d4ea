"""`shardplan diff`: plans that plan alike, plans that differ, and plans of different programs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.plans.data import PlanData
from shardplan.report.plan_diff import diff_text, plan_diff
from shardplan.shell.cli import main


def step(state: Any, x: jax.Array) -> Any:
    def loss_of(state: Any) -> jax.Array:
        y = x
        for layer in state["layers"]:
            y = jnp.tanh(y @ layer["kernel"])
        return jnp.mean(y**2)

    loss, gradients = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), loss


def planned(layers: int = 3, batch: int = 64, **options: Any) -> PlanData:
    state = {"layers": [{"kernel": jax.ShapeDtypeStruct((64, 64), "float32")} for _ in range(layers)]}
    plan = shardplan.plan(step, state, jax.ShapeDtypeStruct((batch, 64), "float32"), **{"cluster": "2x4", **options})
    plan.to_json()
    return plan.data


@pytest.fixture(scope="module")
def plain() -> PlanData:
    return planned()


@pytest.fixture(scope="module")
def pinned() -> PlanData:
    return planned(pins={"state/*": P("gpu"), "x": P("gpu")})


def test_a_plan_is_like_itself_whatever_it_took_to_find(plain: PlanData) -> None:
    found = plan_diff(plain, replace(plain, trace_s=9.0, search_s=9.0, memory_limit=plain.memory_limit + 1))
    assert found.alike
    assert [change.name for change in found.asked] == ["memory_limit"]
    assert diff_text(found, ("a", "b")).startswith("a and b plan alike\n  asked for another memory_limit: ")


def test_layouts_figures_and_collectives_that_changed_are_named(plain: PlanData, pinned: PlanData) -> None:
    found = plan_diff(plain, pinned)
    assert not found.alike
    assert not found.other_program
    assert [(c.name, c.before, c.after) for c in found.layouts] == [
        ("state/layers/{0..2}/kernel", "P()", "P('gpu')"),
        ("x", "P()", "P('gpu')"),
    ]
    figures = {c.name: c.after - c.before for c in found.figures}
    more = sum(s.after[0] - s.before[0] for s in found.collectives)
    assert more == pytest.approx(figures["communication_s"])
    assert sum(s.after[1] - s.before[1] for s in found.collectives) == pytest.approx(figures["communication_bytes"])
    text = diff_text(found, ("a", "b"))
    for part in (
        "state/layers/{0..2}/kernel: P() -> P('gpu')",
        "step_time_s",
        "Collectives, by how much they change",
        "pins: {}",
    ):
        assert part in text
    back = plan_diff(pinned, plain)
    assert {c.name: c.after - c.before for c in back.figures} == {name: -more for name, more in figures.items()}


def test_another_program_is_named_first(plain: PlanData) -> None:
    found = plan_diff(plain, planned(layers=4, batch=32))
    assert found.other_program
    assert {(c.name, c.before, c.after) for c in found.program} >= {
        ("state/layers/3/kernel", None, "float32[64, 64]"),
        ("x", "float32[64, 64]", "float32[32, 64]"),
    }
    assert [c.name for c in found.program][-1] == "operators"
    text = diff_text(found, ("a", "b")).splitlines()
    assert text[2] == "They are plans of different programs:"
    assert "  state/layers/3/kernel float32[64, 64] is new" in text
    same = replace(plain, fingerprint="another")
    assert "the operators do not" in diff_text(plan_diff(plain, same), ("a", "b"))


def test_another_cluster_or_backend_is_named(plain: PlanData) -> None:
    found = plan_diff(plain, replace(planned(cluster="4x2"), backend="specs"))
    assert [c.name for c in found.machine] == ["cluster", "axes", "backend"]


def test_the_command_exits_with_one_where_plans_differ(
    plain: PlanData, pinned: PlanData, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardplan.plans.files import save

    monkeypatch.chdir(tmp_path)
    save(plain, "a.json")
    save(pinned, "b.json")

    def run(*argv: str) -> tuple[int, str, str]:
        code, said = main(argv), capsys.readouterr()
        return code, said.out, said.err

    assert run("diff", "a.json", "a.json") == (0, "a.json and a.json plan alike\n", "")
    code, out, _ = run("diff", "a.json", "b.json", "--json")
    assert code == 1
    content = json.loads(out)
    assert content["alike"] is False
    assert content["layouts"][0] == {"name": "state/layers/{0..2}/kernel", "before": "P()", "after": "P('gpu')"}
    assert {"kind", "axes", "tensor", "count", "before", "after"} == set(content["collectives"][0])
    assert run("diff", "a.json", "b.json")[:2] == (1, diff_text(plan_diff(plain, pinned), ("a.json", "b.json")) + "\n")
    code, out, err = run("diff", "a.json", "c.json")
    assert (code, out, err.count("\n")) == (2, "", 1)
