"""What every test stands on: simulated devices, drawn examples that never change, and golden text."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import jax
import pytest

GOLDEN = Path(__file__).parent / "golden"

# Before the first computation, or it has no effect. Sixteen compile as fast as eight; a test on eight takes the first eight.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 16)
# Most tests compile much and compute little. This leaves LLVM's optimizations out; programs are partitioned as ever.
jax.config.update("jax_disable_most_optimizations", True)

# What these say changes the default memory limit of plans.
for _name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR"):
    os.environ.pop(_name, None)

# What tests print has no colours.
os.environ.pop("FORCE_COLOR", None)

# A shell's background jobs ignore Ctrl-C, which some tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Draws are the same in every run, and no example is failed for being slow.
hypothesis.settings.register_profile("shardplan", deadline=None, derandomize=True, print_blob=False)
hypothesis.settings.load_profile("shardplan")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the files of tests/golden anew")


MAPS = Path("/proc/self/maps")
MOST_MAPS = 30_000
"""Compiled programs hold memory maps, of which Linux grants a process 65,530: XLA crashes where it gets none."""


@pytest.fixture(autouse=True)
def maps() -> Iterator[None]:
    """Drops compiled programs after a test where they hold many memory maps."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()


@pytest.fixture(scope="session")
def devices() -> list[Any]:
    """The first eight simulated devices."""
    return jax.devices()[:8]


@pytest.fixture
def environment() -> dict[str, str]:
    """The environment of a process of its own that imports this checkout."""
    return {**os.environ, "PYTHONPATH": str(GOLDEN.parent.parent)}


@pytest.fixture
def eager() -> Any:
    """A 2x4 cluster of slow devices and fast links: even the smallest op is worth cutting, so that small programs are cut."""
    from shardplan.mesh import Cluster

    base = Cluster.load("2x4")
    levels = tuple(
        replace(level, bandwidth_bytes_per_s=b, latency_s=1e-12, rails=1, ring_efficiency=1.0, tree_efficiency=1.0)
        for level, b in zip(base.levels, (1e10, 1e11), strict=True)
    )
    rates: dict[str, Any] = {"flops_per_s": {"float32": 1e7}, "memory_bytes_per_s": 1e8, "compute_units": None}
    device = replace(base.device, **rates, launch_s=0.0, collective_launch_s=0.0)
    return replace(base, name="eager", levels=levels, device=device)


@pytest.fixture
def slow_devices() -> Callable[[int], Any]:
    """One level of so many slow devices with fast links."""
    from shardplan.mesh import Cluster

    def cluster(ways: int) -> Any:
        base = Cluster.load(str(ways))
        rates: dict[str, Any] = {"flops_per_s": {"float32": 1e6}, "memory_bytes_per_s": 1e6, "compute_units": None}
        device = replace(base.device, **rates, launch_s=0.0, collective_launch_s=0.0)
        return replace(base, name="slow", levels=tuple(replace(level, latency_s=1e-9) for level in base.levels), device=device)

    return cluster


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden("plan/gpt.txt", text)``: text equals that file of ``tests/golden``, or becomes it under ``--update-golden``."""
    update = request.config.getoption("--update-golden")

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.exists(), f"{path} is missing: run pytest --update-golden, read it, commit it"
        assert text == path.read_text(encoding="utf-8"), f"{path} differs: if the change is meant, run pytest --update-golden"

    return compare
