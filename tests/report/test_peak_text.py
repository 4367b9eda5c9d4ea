"""What a device holds where its memory peaks."""

from __future__ import annotations

from typing import Any

import pytest

import shardplan
from models import gpt, mlp, moe, unet
from shardplan.report.peak_text import peak_lines
from shardplan.search.memory.contents import held_at_peak
from shardplan.search.memory.liveness import liveness, whole_bytes

STEPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "unrolled": (gpt, {"layers": 2, "width": 64, "batch": 16}),
    "scan with recomputation": (gpt, {"layers": 2, "width": 64, "batch": 16, "scan": True, "remat": True}),
    "experts": (moe, {"layers": 1}),
    "convolutions": (unet, {}),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "scan with recomputation")) for n in STEPS])
def test_what_is_held_adds_up_to_the_peak(name: str) -> None:
    model, options = STEPS[name]
    step, args = model.train_step(**options)
    plan = shardplan.plan(step, *args, cluster="2x2")
    session = plan.session
    live = liveness(session.problem, session.donated)
    solution = session.solution
    _, held = held_at_peak(session.problem, live, solution.states, solution.keep, solution.limits)
    assert whole_bytes(sum(h.nbytes for h in held)) == plan.peak_bytes
    assert held == sorted(held, key=lambda h: -h.nbytes)


def test_arguments_are_named_by_path_and_values_by_line() -> None:
    step, args = mlp.train_step(layers=4, width=512, batch=4096)
    plan = shardplan.plan(step, *args, cluster="2x2")
    first, *rows = peak_lines(plan.session)
    assert first.startswith("Memory peaks ")
    assert "mlp.py" in first
    arguments = next(row for row in rows if "of arguments" in row)
    assert "kernel" in arguments
    assert "mu" in arguments
    assert " at " in next(row for row in rows if "of values" in row)
    assert "\n".join(peak_lines(plan.session)) in plan.explain()
