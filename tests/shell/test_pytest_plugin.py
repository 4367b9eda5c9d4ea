"""The plugin, as a project that uses it would: a pytest of its own in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TEST = """
import jax, jax.numpy as jnp, pytest
from jax.sharding import PartitionSpec as P

def step(state, batch):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(state)
    return state - 0.1 * gradient, loss

ARGS = jax.random.normal(jax.random.key(0), (16, 8)), jax.random.normal(jax.random.key(1), (32, 16))

def test_equal(verify_plan):
    assert len(jax.devices()) == 4
    assert verify_plan(step, *ARGS, cluster="2x2", pins={"batch": P("gpu")}).equal

def test_equal_but_uncut(verify_plan):
    with pytest.warns(UserWarning, match="the plan cuts no array.*axes data=4"):
        verify_plan(step, *ARGS, cluster="2x2")

def test_not_equal(verify_plan):
    bits = lambda batch: jax.lax.bitcast_convert_type(batch.sum(0), "int32")  # they depend on the order of the sum
    verify_plan(bits, jax.random.normal(jax.random.key(1), (64, 32)), cluster="2x2", pins={"batch": P(("node", "gpu"))})
"""


@pytest.mark.slow
def test_a_plan_is_proven_by_a_fixture(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "test_step.py").write_text(TEST)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "shardplan.shell.pytest_plugin",
        "--shardplan-devices",
        "4",
        "test_step.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "NOT EQUAL" in done.stdout
