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
from shardplan.ir import Microbatches
from shardplan.plans.data import PlanData
from shardplan.remat import RecomputedPart, Remat
from shardplan.report.diff_text import diff_text
from shardplan.report.plan_diff import plan_diff
from shardplan.report.tables import size
from shardplan.search.problem.solution import Tried
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
        "pins: none -> state/*=P('gpu'), x=P('gpu')",
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
    assert ("levels", "node=2 x gpu=4", "node=4 x gpu=2") in [(c.name, c.before, c.after) for c in found.reasons]


def test_options_and_ways_to_run_are_written_as_users_know_them(plain: PlanData) -> None:
    remat = Remat((RecomputedPart((), (1, 2), None, 64),), "light")
    other = replace(
        plain,
        remat=remat,
        microbatches=Microbatches(4, (3,)),
        donate_argnums=(0, 1),
        replicate=("mul",),
        fixed_axes={"data": 8},
        factors=plain.factors[::-1],
    )
    text = diff_text(plan_diff(plain, other), ("a", "b"))
    for part in (
        "fixed_axes: none -> data=8",
        "replicate: none -> mul",
        "axes: node=2 x gpu=4 -> gpu=4 x node=2",
        "microbatches: 1 -> 4 (of leaves 3)",
        "remat: nothing -> 0 loop bodies and 1 blocks (light)",
        "donate_argnums: none -> 0, 1",
    ):
        assert part in text


# -- why ---------------------------------------------------------------------------------------------------------------


def test_a_changed_layout_has_its_costs_and_what_the_files_say_of_it(plain: PlanData, pinned: PlanData) -> None:
    kernels = plan_diff(plain, pinned).layouts[0]
    before, after = kernels.costs
    assert (before.held_bytes, after.held_bytes) == (3 * 64 * 64 * 4, 3 * 16 * 64 * 4)
    moving = [c for c in pinned.collectives if any("kernel" in name for name in (c.tensor, *c.along))]
    assert after.communication_s == pytest.approx(sum(c.seconds * c.times for c in moving))
    assert 0 < after.exposed_s <= after.communication_s
    assert before.communication_s == before.exposed_s == 0
    assert after.why == "the pin 'state/*' = P('gpu') fixes it"
    assert before.why.startswith("runner-up ")
    text = diff_text(plan_diff(plain, pinned), ("a", "b"))
    assert (
        "\n    b: the pin 'state/*' = P('gpu') fixes it\n    a device holds 48.0 KiB -> 12.0 KiB; collectives that move " in text
    )


def reasons_of(a: PlanData, b: PlanData) -> dict[str, tuple[Any, Any]]:
    return {c.name: (c.before, c.after) for c in plan_diff(a, b).reasons}


def test_a_memory_limit_that_binds_is_a_reason(plain: PlanData) -> None:
    """Whether it makes the search's plan slower, or only lies below what the other plan needs."""
    binding = replace(plain, memory_limit=2**20, unlimited_s=plain.searched_s / 2)
    (before, after) = reasons_of(plain, binding)["memory limit"]
    assert before.endswith("GiB does not bind")
    assert after.startswith("1.00 MiB binds: it makes the search's best ")
    assert reasons_of(plain, replace(plain, memory_limit=16)) == {
        "memory limit": (before, f"16 B, less than the {size(plain.peak_bytes)} of the other plan")
    }
    assert reasons_of(plain, replace(plain, memory_limit=plain.memory_limit - 1)) == {}


def test_links_prices_factors_and_constants_are_reasons(pinned: PlanData) -> None:
    node, gpu = pinned.cluster.levels
    cluster = replace(pinned.cluster, levels=(replace(node, bandwidth_bytes_per_s=node.bandwidth_bytes_per_s / 2), gpu))
    dearer = tuple(replace(c, seconds=2 * c.seconds) for c in pinned.collectives)
    found = reasons_of(pinned, replace(pinned, cluster=cluster, collectives=dearer))
    assert found.pop("links of node, bandwidth_bytes_per_s") == ("200 GB/s", "100 GB/s")
    assert found
    assert all(name.startswith("price of ") and "over gpu 4" in name for name in found)

    other = (replace(pinned.factors[0], name="node0"), *pinned.factors[1:])
    tried = (Tried(other, 1e-3, True, None), *pinned.tried)
    before, after = reasons_of(replace(pinned, tried=tried), replace(pinned, factors=other))["factors"]
    assert before.endswith("searched node0=2 x gpu=4 too, at 1.00 ms")
    assert after.startswith("node0=2 x gpu=4 (")

    constants = {**pinned.constants, "model_error": "0.5"}
    assert reasons_of(pinned, replace(pinned, constants=constants)) == {
        "constant model_error": (pinned.constants["model_error"], "0.5")
    }


def test_where_the_files_hold_no_reason_the_text_says_so(pinned: PlanData) -> None:
    changed = replace(pinned, arguments=(replace(pinned.arguments[0], layout=None), *pinned.arguments[1:]))
    assert "The files hold no reason: " in diff_text(plan_diff(pinned, changed), ("a", "b"))


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
    first = content["layouts"][0]
    assert (first["name"], first["before"], first["after"]) == ("state/layers/{0..2}/kernel", "P()", "P('gpu')")
    assert {"group", "kind", "axes", "tensor", "count", "before", "after"} == set(content["collectives"][0])
    assert run("diff", "a.json", "b.json")[:2] == (1, diff_text(plan_diff(plain, pinned), ("a.json", "b.json")) + "\n")
    code, out, err = run("diff", "a.json", "c.json")
    assert (code, out, err.count("\n")) == (2, "", 1)
