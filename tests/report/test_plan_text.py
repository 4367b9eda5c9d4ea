"""Reports as a person reads them, held to golden text; and what `explain` says about pins, memory and dims that do not divide."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from models import mlp
from shardplan.errors import MemoryLimitError, ShardplanError
from shardplan.remat import RecomputedPart, Remat, Without
from shardplan.report.json import comparison_rows, plan_json
from shardplan.report.padding import uneven
from shardplan.report.parallelism import tried_text
from shardplan.report.peak_range import likely_peak, peak_range_text
from shardplan.report.plan_text import bound_text, comparison_text, measured_order, plan_text, remat_text
from shardplan.report.tables import size
from shardplan.report.verified_text import verified_text
from shardplan.search.problem.solution import Tried

Golden = Callable[[str, str], None]


def small(width: int = 64, layers: int = 3) -> tuple[Any, tuple[Any, ...]]:
    def loss_of(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for layer in params["layers"]:
            x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
        return jnp.mean((x @ params["out"]) ** 2)

    def step(params: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, "float32")

    layer = {"kernel": array(64, 64), "bias": array(64)}
    return step, ({"layers": [layer] * layers, "out": array(64, width)}, {"x": array(4096, 64)})


@pytest.fixture(scope="module")
def pinned() -> Any:
    step, args = small()
    return shardplan.plan(step, *args, cluster="2x4", pins={"batch/x": P(("node", "gpu"))})


def _steady(text: str) -> str:
    """What the report is about, without the figures of the cost model, the widths that follow from them, and directories.

    Lines of this file are counted from `small`, so that an import added above it changes no golden file.
    """
    first = small.__code__.co_firstlineno
    text = re.sub(r"(test_plan_text\.py):(\d+)", lambda at: f"{at[1]}:{int(at[2]) - first}", text)
    text = re.sub(r"\d[\d.]* (ns|us|ms|s|B|KiB|MiB|GiB|GB/s)\b", "#", text)
    text = re.sub(r"\d[\d.]*(%|x\b| operators)", r"#\1", text)  # releases of JAX differ in the number of operators
    text = re.sub(r"(?<!\S)\S*/(\w+\.py)", r"\1", text)
    return re.sub(r"(?<=\S) {2,}(?=\S)", "  ", re.sub(r"-{2,}", "--", text))


def test_the_text_of_a_plan_is_the_golden_one(pinned: Any, golden: Golden) -> None:
    whole, baselines = _steady(plan_text(pinned.completed(), title="a small step")).split("\n\nBaselines")
    golden("report/plan.txt", whole + "\n")
    assert {"this plan", "data parallel", "FSDP"} <= {line.strip().split("  ")[0] for line in baselines.splitlines()}


@pytest.mark.parametrize(
    ("fits", "says"),
    [
        (True, "; without, 3.00 GiB a device and 20.0 ms a step"),
        (False, "; without, nothing fits (the smallest found 3.00 GiB a"),
    ],
)
def test_recomputation_has_the_bytes_of_a_device(pinned: Any, fits: bool, says: str) -> None:
    remat = Remat((RecomputedPart((), (1, 2), None, saved_bytes=2**40),), without=Without(0.02, 3 * 2**30, fits))
    text = remat_text(replace(pinned.data, remat=remat, peak_bytes=2**30))
    assert text.startswith(f"1 block computed again in the backward pass (2 operators): 1.00 GiB a device{says}")


def test_the_words_of_a_plan_are_the_golden_ones(pinned: Any, golden: Golden) -> None:
    whole = pinned.explain()
    parts = [whole, pinned.explain("params/layers/1/kernel"), pinned.explain("params/*"), pinned.explain("batch/x")]
    golden("report/explain.txt", _steady("\n\n".join(parts)) + "\n")


VERIFIED = {
    "equal": False,
    "compared": 1000,
    "numbers": 1000,
    "max_error": 0.0213,
    "steps": 3,
    "largest": {"path": "0/params/bias", "step": 3, "error": 0.0213, "noise": 0.0011, "inexact": True},
    "worst": {"path": "0/params/kernel", "step": 2, "error": 0.00123, "tolerance": 0.0001},
    "unequal": ["0/params/kernel", "0/params/bias", "1", "0/a", "0/b"],
    "recompiles": 1,
    "single_recompiles": 0,
    "retyped": [],
    "moved": ["0/params/bias"],
    "zeros": ["batch/tokens"],
    "stand_ins": ["dot_product_attention_fwd"],
    "devices": 8,
    "uncut": False,
    "reference": None,
    "predicted_bytes": 1.5e6,
    "measured_bytes": 1.6e6,
    "raw_measured_bytes": 3.2e6,
    "predicted_peak_bytes": 2**30,
    "measured_peak_bytes": 2**29,
    "collectives": {
        "all-reduce": {"predicted": 1.5e6, "measured": 1.5e6, "predicted_count": 12.0, "measured_count": 2.0},
        "all-to-all": {"predicted": 0.0, "measured": 1e5, "predicted_count": 0.0, "measured_count": 1.0},
    },
}


def test_the_text_of_a_verification_is_the_golden_one(golden: Golden) -> None:
    golden("report/verified.txt", verified_text(VERIFIED) + "\n")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"max_error": 0.0, "largest": {"path": "", "step": 0, "error": 0.0, "noise": 0.0, "inexact": True}},
            "  no number differs\n",
        ),
        ({"largest": {"path": "n", "step": 1, "error": 0.5, "noise": 0.0, "inexact": False}}, "in n, in step 1, which is exact"),
        ({"recompiles": 2}, "  2 compilations after the first step; "),
        ({"recompiles": 1, "single_recompiles": 1}, "  1 compilation after the first step, as without a plan; "),
        ({"recompiles": 3, "single_recompiles": 1}, "  3 compilations after the first step, 1 without a plan; "),
        ({"recompiles": 0, "single_recompiles": 1}, "  0 compilations after the first step; "),
        ({"retyped": ["lr (weak to strong)"]}, "  compiled again because of lr (weak to strong): Python numbers"),
        ({"equal": True, "unequal": [], "compared": 0, "numbers": 0}, "equal (every array is empty) to the single"),
        ({"unequal": [], "compared": 0}, "NOT COMPARED (no number is finite) to the single"),
        ({"stand_ins": ["pallas_call:flash"]}, "  note: these devices cannot run pallas_call:flash; Pallas's interpreter ran"),
        ({"uncut": True}, "  note: the plan cuts no array, so every device ran the whole step, and the comparison proves little"),
        ({"uncut": True}, "give --axes data=8 "),
        ({"zeros": list("abcdef")}, "6 integer arguments were only shapes, so all zero (a, b, c, d and 2 more): "),
    ],
)
def test_a_verification_says_why(given: dict[str, Any], says: str) -> None:
    assert says in "\n" + verified_text(VERIFIED | given)


def test_the_text_of_a_comparison_is_the_golden_one(golden: Golden) -> None:
    rows = [
        {"name": "this plan", "step_time_s": 0.01, "communication_bytes": 1e6, "peak_bytes": 2**30, "fits": True},
        {"name": "FSDP", "step_time_s": 0.0125, "communication_bytes": 3e6, "peak_bytes": 2**29, "fits": True},
        {"name": "data parallel", "step_time_s": 0.009, "communication_bytes": 2e6, "peak_bytes": 2**33, "fits": False},
    ]
    measured = [{**r, "measured_bytes": r["communication_bytes"] * 1.1, "measured_peak_bytes": r["peak_bytes"]} for r in rows[:2]]
    golden("report/comparison.txt", comparison_text(rows) + "\n\n" + comparison_text([*measured, rows[2]]) + "\n")
    timed = [{**r, "measured_step_s": s, "measured_spread": 0.05} for r, s in zip(measured, (0.02, 0.011), strict=True)]
    said = "\n".join([comparison_text([*timed, rows[2]]), "", *measured_order([*timed, rows[2]])])
    golden("report/comparison-timed.txt", said + "\n")
    assert measured_order(rows) == measured_order([timed[0], *rows[1:]]) == []


def test_the_likely_peak_holds_the_arguments_and_names_a_limit_that_leaves_room(pinned: Any) -> None:
    plan = pinned.completed()
    least, most = likely_peak(plan)
    assert least == max(plan.argument_bytes("device"), int(0.71 * plan.peak_bytes))
    assert plan.peak_bytes < most
    assert "leaves room" not in peak_range_text(plan)
    tight = replace(plan, memory_limit=plan.peak_bytes)
    assert f"a memory limit of {size(plan.peak_bytes / 1.18)} leaves room for that" in peak_range_text(tight)
    held = replace(plan, peak_bytes=plan.argument_bytes("device"))
    assert likely_peak(held)[0] == plan.argument_bytes("device")


def test_what_baselines_do_not_keep_is_said(pinned: Any) -> None:
    assert "these keep no pins" in plan_text(pinned.completed())
    x = jnp.ones((64, 64))
    for objective, said in (("time", False), ("bytes", True)):
        free = plan_text(shardplan.plan(lambda x: x @ x, x, cluster="2x2", objective=objective).completed())
        assert ("may leave whole what the objective splits" in free) == said
        assert "keep no pins" not in free


def test_json_and_text_agree(pinned: Any) -> None:
    made = plan_json(pinned.completed())
    assert made["collectives"]
    assert sum(c["wire_bytes"] for c in made["collectives"]) == pytest.approx(pinned.communication_bytes)
    assert sum(c["seconds"] for c in made["collectives"]) == pytest.approx(pinned.communication_s)
    rows = comparison_rows(pinned.completed(), {"this plan": (1.0, 2.0, 3)}, {"this plan": (4.0, 0.5)})
    assert (rows[0]["measured_step_s"], rows[0]["measured_spread"], rows[1]["measured_step_s"]) == (4.0, 0.5, None)
    assert (rows[0]["measured_bytes"], rows[0]["raw_measured_bytes"], rows[0]["measured_peak_bytes"]) == (1.0, 2.0, 3)
    assert all(r["measured_bytes"] is None for r in rows[1:])


def test_the_runner_up_costs_what_the_whole_problem_says(pinned: Any) -> None:
    """The terms around one variable change by what all terms change by."""
    problem, solution = pinned.session.problem, pinned.session.solution
    kept = {v: float("inf") for v in problem.backward_views if v not in solution.keep}
    whole = problem.seconds(solution.states, kept)
    for v, domain in enumerate(problem.domains):
        for state in domain[:3]:
            states = list(solution.states)
            states[v] = state
            change = _around(problem, v, states, kept) - _around(problem, v, solution.states, kept)
            assert change / 1e12 == pytest.approx(problem.seconds(states, kept) - whole, abs=1e-11)


def _around(problem: Any, v: int, states: Any, kept: Any) -> int:
    terms = problem.terms_of(v, [(s,) for s in states], kept)
    return sum(t.constant + int(problem.store.tables[t.table].flat[0]) for t in terms)


def test_a_pin_is_named_where_it_binds(pinned: Any) -> None:
    assert "the pin 'batch/x' = P(('node', 'gpu')) fixes it" in pinned.explain("batch/x")
    assert "fixes" not in pinned.explain("params/out")


def test_a_memory_limit_is_named_where_it_binds() -> None:
    step, args = small(layers=6)
    given: dict[str, Any] = {"cluster": "2x4", "backend": "specs", "time_model": "sum"}
    free = shardplan.plan(step, *args, **given)
    tight = shardplan.plan(step, *args, **given, memory_limit=int(free.peak_bytes * 0.5))
    assert tight.searched_s > free.searched_s
    assert "the memory limit of" in tight.explain()
    assert "the optimum" in bound_text(free.completed())
    assert "above the optimum" in bound_text(tight.completed())
    with pytest.raises(MemoryLimitError):
        shardplan.plan(step, *args, cluster="2x4", memory_limit=1000)


def test_a_dim_that_does_not_divide_names_the_size_that_would() -> None:
    step, args = small(width=50257)
    plan = shardplan.plan(step, *args, cluster="2x4")
    said = plan.explain("params/out")
    assert "50257 does not divide by node=2 and gpu=4; padded to 50304 it would" in said
    assert uneven((3, 8, 12), {"node": 2, "gpu": 4}) == ()
    assert [(u.dim, u.padded, u.axes) for u in uneven((9, 1026), {"node": 2, "gpu": 4})] == [
        (0, 16, ("node", "gpu")),
        (1, 1152, ("gpu",)),
    ]


def test_an_unknown_path_names_its_nearest(pinned: Any) -> None:
    with pytest.raises(ShardplanError, match="nearest: params/out"):
        pinned.explain("params/uot")


def test_a_baseline_is_explained_by_what_it_is() -> None:
    step, args = small()
    plan = shardplan.plan(step, *args, cluster="2x4")
    fsdp = plan.as_baseline("FSDP").explain("params/layers/1/kernel")
    assert "P() alone would save" in fsdp
    assert fsdp.count("it would not be FSDP") == 1
    assert not any("would save" in plan.explain(path) for path in plan.specs_by_path), "of an optimum nothing would"


def test_the_cuts_of_a_baseline_hold_in_what_its_layouts_would_cost() -> None:
    step, args = small()
    one = shardplan.plan(step, *args, cluster="2x4").as_baseline("ICML18")
    free = one.at(one.session.at(replace(one.session.solution, limits=None)))
    assert any(one.explain(path) != free.explain(path) for path in one.specs_by_path)


def test_explanations_are_saved_with_the_plan(pinned: Any) -> None:
    saved = pinned.to_json()["explanations"]
    assert set(saved) == {"", *pinned.specs_by_path}
    assert saved["params/out"] == pinned.explain("params/out")


def test_a_factoring_that_is_priced_lower_but_not_taken_has_a_reason() -> None:
    data = shardplan.plan(lambda x: jnp.tanh(x @ x), jnp.ones((64, 64)), cluster="2x2").completed()
    own = Tried(data.factors, 2e-3, True, None, "")
    other = (replace(data.factors[0], size=4),)
    lower, large = Tried(other, 1e-3, True, None, ""), Tried(other, 1e-3, False, None, "")
    assert "2 x 2 is the plan although another price is lower" in tried_text(replace(data, tried=(own, lower)))
    assert "the search was stopped" in tried_text(replace(data, tried=(own, lower), stopped="time budget"))
    assert "although" not in tried_text(replace(data, tried=(own, large)))
    assert "although" not in tried_text(replace(data, tried=(own, replace(lower, seconds=3e-3))))


def test_a_baseline_that_is_faster_than_a_restricted_plan_is_said() -> None:
    step, args = small()
    free = shardplan.plan(step, *args, cluster="8")
    fixed = shardplan.plan(step, *args, cluster="8", axes={"tensor": 8})
    said = "a ratio below 1: that baseline is predicted to be faster than this plan"
    assert said not in plan_text(free.completed())
    assert f"{said}, which axes= restricts" in plan_text(fixed.completed())


def test_a_bound_above_the_scheduled_step_proves_nothing_of_schedules() -> None:
    step, args = mlp.train_step(layers=2)
    data = shardplan.plan(step, *args, cluster="2x4").completed()
    data = replace(data, unlimited_s=None, searched_s=data.step_time_s * 1.1)
    assert "another layout may be faster" not in plan_text(replace(data, bound_s=data.step_time_s))
    text = plan_text(replace(data, bound_s=data.step_time_s * 1.1))
    assert "at most 0.0% above the optimum, as the search prices collectives" in text
    assert "more than the scheduled step: as scheduled, another layout may be faster" in text
