"""The flags that a plan counts on, and what they change in programs compiled for H100s that are not there."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.plans.xla_flags import bytes_in_latency, xla_flags
from shardplan.report.json import plan_json
from shardplan.report.plan_text import plan_text

LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"


def _plugin() -> bool:
    try:
        return importlib.util.find_spec("jax_plugins.xla_cuda13") is not None
    except ModuleNotFoundError:
        return False


def test_collectives_merge_while_latency_is_most_of_their_time() -> None:
    cluster = shardplan.Cluster.load("dgx-h100:4")
    # 450 GB/s at 0.8, 7 us to launch and 8 messages of 1 us; one of 8 rails of 400 GB/s at 0.92, 7 us and 4 messages of 6 us
    assert [bytes_in_latency(cluster, level) for level in range(2)] == [1_426_000, 5_400_000]
    assert xla_flags(cluster) == {
        "xla_gpu_all_gather_combine_threshold_bytes": 5_400_000,
        "xla_gpu_all_reduce_combine_threshold_bytes": 5_400_000,
        "xla_gpu_collective_permute_combine_threshold_bytes": 5_400_000,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 675_000,
        LIMIT: 4,
    }


@pytest.mark.parametrize(("cluster", "links"), [("8", 1), ("dgx-h100:1", 1), ("2x4", 2), ("2x2x2", 3), ("1", 1)])
def test_each_level_with_a_link_has_two_collectives_under_way(cluster: str, links: int) -> None:
    assert xla_flags(shardplan.Cluster.load(cluster))[LIMIT] == 2 * links


def test_reports_name_the_flags() -> None:
    pins = {"x": P("gpu")}
    plan = shardplan.plan(lambda x: x @ x, jnp.ones((64, 64)), cluster="2x2", pins=pins)
    assert plan.collectives
    assert plan_json(plan.completed())["xla_flags"] == plan.xla_flags
    text = plan_text(plan.completed())
    assert plan.xla_flags
    assert all(f"--{name}={value}" in text for name, value in plan.xla_flags.items())


def test_a_plan_without_collectives_counts_on_no_flags() -> None:
    plan = shardplan.plan(lambda x: x + x, jnp.ones((64, 64)), cluster="2x2")
    assert not plan.collectives
    assert plan.xla_flags == plan_json(plan.completed())["xla_flags"] == {}
    assert "XLA flags" not in plan_text(plan.completed())


@pytest.mark.slow
@pytest.mark.skipif(not _plugin(), reason="no CUDA compiler here: pip install 'shardplan[gpu-aot]' brings it")
def test_flags_keep_gradients_apart_and_levels_busy_at_once() -> None:
    """Without them, XLA reduces all gradients at the end, in one instruction for each step of their program."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join(p for p in [str(root), *sys.path] if p)
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_gpu_autotune_level=0", "PYTHONPATH": path}
    command = [sys.executable, str(Path(__file__).parent / "aot_flags.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    gradients, merge_bytes = found["sends"], found["merge_bytes"]
    assert min(gradients) > merge_bytes
    for flags in ("none", "merge", "limit", "all"):
        operands = [nbytes for one in found[flags]["operands"] for nbytes in one]
        assert sum(operands) == sum(gradients), "what a plan sends becomes neither more nor less"
    for flags in ("none", "limit"):
        assert len(found[flags]["operands"]) < len(gradients), "XLA merges what it may"
    for flags in ("merge", "all"):
        assert sorted(found[flags]["operands"]) == sorted([nbytes] for nbytes in gradients)
    assert (found["none"]["open"], found["merge"]["open"]) == (1, 1)
    assert found["all"]["open"] == found["limit_of_all"], "as many are under way as may be"
