"""The plan of the demo."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import shardplan
from models.gpt import train_step


@pytest.mark.quick
def test_the_demos_plan_communicates() -> None:
    spec = importlib.util.spec_from_file_location("demo", Path(__file__).parent.parent / "examples" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    step, args = train_step(**demo.OPTIONS)
    plan = shardplan.plan(step, *args, cluster=demo.CLUSTER, donate_argnums=0)
    assert plan.communication_bytes > 0
    assert plan.step_time_s <= min(b.step_time_s for b in plan.baselines if b.fits) * (1 + 1e-6)
