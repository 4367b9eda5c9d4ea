"""Without a memory limit of the user, a plan has what JAX's allocator gives on the device, and says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.errors import ClusterError, MemoryLimitError, ShardplanError
from shardplan.mesh import Cluster
from shardplan.report.plan_text import plan_text
from shardplan.shell.memory_default import MemoryLimit, memory_limit

GPU = replace(Cluster.load("2x4").device, memory_bytes=80 * 2**30)
NEW, OLD = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
PREALLOCATE, ALLOCATOR = "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR"
W = jax.ShapeDtypeStruct((64, 64), "float32")


def step(w: jax.Array) -> jax.Array:
    return jnp.tanh(w @ w)


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    for name in (NEW, OLD, PREALLOCATE, ALLOCATOR):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "part", "words"),
    [
        ({}, 0.75, "0.75 of the device's 80.00 GiB, what JAX's allocator takes by default"),
        ({NEW: "0.9"}, 0.9, f"0.9 of the device's 80.00 GiB, as {NEW} says"),
        ({OLD: ".5"}, 0.5, f"0.5 of the device's 80.00 GiB, as {OLD} says"),
        ({NEW: "", OLD: ""}, 0.75, "by default"),
        ({PREALLOCATE: "false"}, 0.75, "by default"),  # it grows up to the same size
        ({ALLOCATOR: "cuda_async"}, 0.75, "by default"),
        ({ALLOCATOR: "Platform"}, 1.0, f"all 80.00 GiB of the device, as {ALLOCATOR}=platform"),
    ],
)
def test_a_gpu_gives_the_part_that_jax_takes(environment: Mapping[str, str], part: float, words: str) -> None:
    found = memory_limit(None, GPU, environment)
    assert found.nbytes == int(80 * 2**30 * part)
    assert words in found.origin


def test_other_devices_give_all_and_the_user_decides_for_any() -> None:
    cpu = Cluster.load("cpu").device
    assert memory_limit(None, cpu, {NEW: "0.5"}).nbytes == cpu.memory_bytes
    assert memory_limit("70GiB", GPU, {NEW: "nonsense"}) == MemoryLimit(70 * 2**30)
    with pytest.raises(ClusterError, match=r"platform: must be one of gpu, tpu, cpu, got 'gpus'"):
        replace(GPU, platform="gpus")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({NEW: "most"}, f"{NEW}='most' is not a fraction"),
        ({OLD: "75"}, f"{OLD}='75' is not a fraction"),
        ({NEW: "nan"}, "is not a fraction"),
        ({NEW: "0.5", OLD: "0.5"}, f"unset {OLD}"),
        ({ALLOCATOR: "jemalloc"}, "'jemalloc' is no allocator of JAX: set one of default, bfc"),
    ],
)
def test_a_variable_that_jax_would_refuse_is_an_error(
    environment: Mapping[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ShardplanError, match=words):
        shardplan.plan(step, W, cluster="2")


def test_a_plan_says_where_its_limit_comes_from_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NEW, "0.5")
    plan = shardplan.plan(step, W, cluster="2")
    whole = Cluster.load("2").device.memory_bytes
    assert plan.memory_limit == whole // 2
    assert f"memory limit 39.5 GiB: 0.5 of the device's 79.10 GiB, as {NEW} says" in plan_text(plan.completed())
    plan.save(tmp_path / "plan.json")
    monkeypatch.delenv(NEW)
    again = shardplan.load(tmp_path / "plan.json", step, W)
    assert plan_text(again.completed()) == plan_text(plan.completed())
    given = shardplan.plan(step, W, cluster="2", memory_limit=whole // 2)
    assert "memory limit" not in plan_text(given.completed())


def test_a_step_that_does_not_fit_hears_of_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NEW, "1e-7")
    with pytest.raises(
        MemoryLimitError, match=rf"fits in 8.29 KiB per device \(1e-07 of the device's 79.10 GiB, as {NEW} says\)"
    ):
        shardplan.plan(step, W, cluster="2")


def test_kept_plans_are_told_apart_by_their_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[Any] = []
    for part in ("0.5", "0.6", "0.5"):
        monkeypatch.setenv(NEW, part)
        wrapped = shardplan.parallelize(cluster="2", cache_dir=tmp_path)(step)
        wrapped(jnp.ones((64, 64)))
        limits.append(wrapped.plan.memory_limit)
    assert len(list(tmp_path.iterdir())) == 2
    assert limits[0] == limits[2] < limits[1]
