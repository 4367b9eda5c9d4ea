"""LLaMA-70B on 64 H100s that are not there: what is planned to be held is what XLA's compiler for them says."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks import memory


def _plugin() -> bool:
    try:
        return importlib.util.find_spec("jax_plugins.xla_cuda13") is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not _plugin(), reason="no CUDA compiler here: pip install 'shardplan[gpu-aot]' brings it")
@pytest.mark.parametrize("row", ["4096x64/512", "8192x64/512", "4096x32/512"])
def test_70b_holds_what_the_gpu_compiler_says(row: str) -> None:
    found = memory.fresh(row)
    assert found["compiled_peak"] <= found["limit"]
    assert found["arguments"] == found["compiled_arguments"]
    assert 0.95 <= found["peak"] / found["compiled_peak"] <= 1.2
