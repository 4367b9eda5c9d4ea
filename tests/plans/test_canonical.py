"""What a fingerprint is made of: equal for the same step in every process, different wherever a number could be."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardplan
from shardplan.frontend.trace import trace
from shardplan.plans.fingerprint import difference, fingerprint

ROOT = Path(__file__).parents[2]
ONES, THREES = np.ones((64, 64), np.float32), np.full((64, 64), 3, np.float32)
THREES[0, 0] = 1.0  # numpy shortens a large array where it prints it: the corners are equal
THREES[-1, -1] = 1.0
W = jax.ShapeDtypeStruct((64, 64), jnp.float32)

PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "power": (lambda w: w**2, lambda w: w**3),
    "transposed": (lambda w: w @ w, lambda w: w @ w.T),
    "axis": (lambda w: w.sum(0), lambda w: w.sum(1)),
    "direction": (lambda w: jax.lax.cumsum(w, 0), lambda w: jax.lax.cumsum(w, 0, reverse=True)),
    "argmax": (lambda w: jnp.argmax(w, 0), lambda w: jnp.argmax(w, 1)),
    "array": (lambda w: w * ONES, lambda w: w * THREES),
    "scalar": (lambda w: w * 2.0, lambda w: w * 2.0000002),
    "body": (
        lambda w: jax.lax.fori_loop(0, 3, lambda _, x: x**2, w),
        lambda w: jax.lax.fori_loop(0, 3, lambda _, x: x**3, w),
    ),
    "array of a body": (
        lambda w: jax.lax.scan(lambda x, _: (x * ONES, None), w, None, length=2)[0],
        lambda w: jax.lax.scan(lambda x, _: (x * THREES, None), w, None, length=2)[0],
    ),
    "program among parameters": (
        lambda w: jax.lax.reduce(w, np.float32(0), lambda a, b: a * a + b, (0,)),
        lambda w: jax.lax.reduce(w, np.float32(0), lambda a, b: a + b * b, (0,)),
    ),
    "window": (lambda w: jax.lax.slice(w, (0, 0), (8, 8)), lambda w: jax.lax.slice(w, (1, 0), (9, 8))),
    "callback": (
        lambda w: jax.pure_callback(np.sin, w, w),
        lambda w: jax.pure_callback(np.cos, w, w),
    ),
    "written callback": (
        lambda w: jax.pure_callback(lambda v: v + 1, w, w),
        lambda w: jax.pure_callback(lambda v: v + 2, w, w),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_steps_of_other_numbers_have_other_fingerprints(name: str) -> None:
    one, other = (trace(step, W) for step in PAIRS[name])
    assert fingerprint(one) != fingerprint(other)
    assert difference(one, other)
    assert fingerprint(one) == fingerprint(trace(PAIRS[name][0], W))


@pytest.mark.parametrize("name", ["power", "axis", "array"])
def test_a_plan_runs_no_step_of_other_numbers(name: str, tmp_path: Path) -> None:
    planned, other = PAIRS[name]
    made = shardplan.plan(planned, W, cluster="2x4")
    made.save(tmp_path / "plan.json")
    with pytest.raises(shardplan.PlanFileError, match="not the one that was planned"):
        made.jit(other)
    with pytest.raises(shardplan.PlanFileError):
        shardplan.load(tmp_path / "plan.json", other, W)


def test_what_a_function_is_called_changes_no_fingerprint() -> None:
    def named(w: Any) -> Any:
        return jnp.where(w > 0, w, 0.0)

    assert fingerprint(trace(named, W)) == fingerprint(trace(lambda w: jnp.where(w > 0, w, 0.0), W))


SAYS = """
import jax
from models import {model}
from shardplan.plans.fingerprint import fingerprint
from shardplan.frontend.trace import trace
step, args = {model}.train_step()
print(fingerprint(trace(step, *args)))
"""


@pytest.mark.parametrize("model", ["gpt", pytest.param("moe", marks=pytest.mark.slow)])
def test_two_processes_find_the_same_fingerprint(model: str) -> None:
    found: set[str] = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", SAYS.format(model=model)], cwd=ROOT, env=env, capture_output=True, check=True
        )
        found.add(done.stdout.decode())
    assert len(found) == 1
