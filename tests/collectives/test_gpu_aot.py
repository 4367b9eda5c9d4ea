"""GPU HLO, compiled without a GPU, keeps the steps of a program with the groups that it names."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardplan.collectives import groups, parse

NAMES = ("node", "gpu")
SCATTERED = "(node, InsideGroup, ReduceScatter) (node, Parallel(root), AllReduce) (node, InsideGroup, AllGather)"
TWICE = "(node, InsideGroup, AllReduce) (node, Parallel(root), AllReduce)"
ROOTED = "(node, InsideGroup, Reduce) (node, Master(root), AllReduce) (node, InsideGroup, Broadcast)"


def _plugin() -> bool:
    try:
        return importlib.util.find_spec("jax_plugins.xla_cuda13") is not None
    except ModuleNotFoundError:
        return False


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _plugin(), reason="no CUDA compiler here: pip install 'shardplan[gpu-aot]' brings it"),
]


def compiled(nodes: int, gpus: int, *programs: str) -> list[list[tuple[str, list[list[int]]]]]:
    """The collectives of each program's GPU HLO, in order, with their groups."""
    path = os.pathsep.join(p for p in [str(Path(__file__).parents[2]), *sys.path] if p)
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_gpu_autotune_level=0", "PYTHONPATH": path}
    script = str(Path(__file__).parent / "aot_reductions.py")
    command = [sys.executable, script, str(nodes), str(gpus), *programs]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(("nodes", "gpus"), [(2, 4), (4, 8)])
def test_steps_and_groups_survive_the_gpu_compiler(nodes: int, gpus: int):
    scattered, twice, rooted = compiled(nodes, gpus, SCATTERED, TWICE, ROOTED)
    for text, found in ((SCATTERED, scattered), (TWICE, twice)):
        steps = parse(text, NAMES).steps
        wanted = [(s.collective, [list(g) for g in groups((nodes, gpus), s)]) for s in steps]
        assert [tuple(c) for c in found] == wanted
    assert {kind for kind, _ in rooted} == {"collective-permute"}
    heads = {n * gpus for n in range(nodes)}
    across = [pairs for _, pairs in rooted if any(a // gpus != b // gpus for a, b in pairs)]
    assert len(across) == 2 * (nodes - 1)  # the masters' ring
    assert all({d for pair in pairs for d in pair} == heads for pairs in across)
