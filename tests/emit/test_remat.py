"""A step with activations computed again is the step, and holds less while it runs."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest

import shardplan
from models import gpt, mlp
from shardplan.verify.verify import measured_program, verify

SMALL: dict[str, Any] = {"layers": 2, "width": 32, "sequence": 16, "batch": 16, "vocabulary": 64, "heads": 4, "dropout": 0.1}


def rematerialised(step: Any, args: Any, part: float) -> shardplan.Plan:
    """The plan for this part of what a device holds in the fastest plan."""
    free = shardplan.plan(step, *args, cluster="8", donate_argnums=0)
    plan = shardplan.plan(step, *args, cluster="8", donate_argnums=0, memory_limit=int(part * free.peak_bytes), remat="auto")
    assert plan.remat.without is not None
    assert not plan.remat.without.fits
    return plan


@cache
def straight() -> tuple[Any, Any, shardplan.Plan]:
    """(step, args, plan) of straight-line code."""
    step, args = mlp.train_step(layers=8, batch=2048, concrete=True)
    return step, args, rematerialised(step, args, 0.095)


@pytest.mark.slow
def test_blocks_computed_again_are_what_they_were(devices: list[Any]) -> None:
    step, args, plan = straight()
    assert plan.remat.blocks
    found = verify(plan, step, args, devices=devices)
    assert found.passed, found.json
    assert found.json["recompiles"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loop_body_computed_again_is_what_it_was(dtype: str, devices: list[Any]) -> None:
    """Random masks too: their keys are read again."""
    step, args = gpt.train_step(**SMALL, scan=True, dtype=dtype, concrete=True)
    plan = rematerialised(step, args, 0.1)
    assert plan.remat.loops
    found = verify(plan, step, args, devices=devices)
    assert found.passed, found.json
    assert found.json["recompiles"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"accumulate": 2}], ids=str)
def test_layers_computed_again_are_what_they_were(options: dict[str, Any], devices: list[Any]) -> None:
    step, args = gpt.train_step(**{**SMALL, "layers": 4}, **options, concrete=True)
    plan = rematerialised(step, args, 0.1)
    assert plan.remat.blocks
    assert verify(plan, step, args, devices=devices).passed


@pytest.mark.slow
def test_the_compiled_step_holds_less(devices: list[Any]) -> None:
    """With a scan: where code is straight the CPU's compiler drops barriers."""
    step, args = gpt.train_step(layers=8, width=64, sequence=64, batch=32, scan=True)
    plan = rematerialised(step, args, 0.25)
    assert plan.remat.loops
    _, peak = measured_program(plan, step, devices=devices)
    assert plan.remat.without is not None
    assert peak < 0.75 * plan.remat.without.peak_bytes
    assert peak < 1.25 * plan.peak_bytes


@pytest.mark.slow
def test_blocks_wait_for_the_backward_pass(devices: list[Any]) -> None:
    """Each has a barrier, which what is kept and what the backward pass made before both go through."""
    step, args, plan = straight()
    text = plan.jit(step, devices, "specs").lower(*args).as_text()
    again = [op for op in plan.program.ops if op.primitive == "remat2"]
    assert len(again) == plan.remat.blocks
    backward = {t for op in plan.program.ops if "transpose(" in op.scope for t in op.outputs}
    assert all(backward.intersection(op.tensors) for op in again)
    operands = [
        line.split("optimization_barrier", 1)[1].split(":")[0] for line in text.splitlines() if "optimization_barrier" in line
    ]
    widths = sorted((len(re.findall("%", line)) for line in operands), reverse=True)
    assert widths[len(again) - 1] >= min(len(op.tensors) for op in again)
