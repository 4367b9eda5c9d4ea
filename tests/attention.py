"""The attention kernels that tests trace, and how to trace them on machines without a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import jax
import pytest

from models import _fused_attention
from shardplan import _jax

HAS_TOKAMAX = find_spec("tokamax") is not None
needs_tokamax = pytest.mark.skipif(not HAS_TOKAMAX, reason='tokamax is not installed: pip install ".[attention]"')
needs_flash = pytest.mark.skipif(
    not HAS_TOKAMAX and _fused_attention._of_jax() is None,
    reason="attention='flash' has no kernel: this JAX calls its own deprecated, and tokamax is not installed",
)
"""For tests of models with attention="flash"."""


def of_jax(causal: bool, segments: Any = None, block: int = 16) -> Callable[..., Any]:
    """JAX's Pallas kernel, in Pallas's interpreter."""
    attention = _jax.pallas_attention()
    blocks = attention.BlockSizes(*[block] * 6)
    return lambda q, k, v: attention.mha(q, k, v, segments, 0.25, causal, blocks, "triton", None, 2, None, True)


def of_tokamax(**options: Any) -> Callable[..., Any]:
    """tokamax's Pallas kernel for GPUs; to be traced under `for_gpus`."""
    tokamax = pytest.importorskip("tokamax")
    return lambda q, k, v, *rest: tokamax.dot_product_attention(q, k, v, *rest, implementation="triton", **options)


@contextmanager
def for_gpus() -> Iterator[None]:
    """While this lasts, tokamax traces its kernels for GPUs on any machine, if it is installed."""
    if not HAS_TOKAMAX:
        yield
        return
    config = pytest.importorskip("tokamax").config
    with config.cross_compile(True), config.ignore_autotuning_cache(True):
        yield


@contextmanager
def on_an_abstract_gpu() -> Iterator[None]:
    """While this lasts, kernels are lowered for a GPU that is not there. JAX calls Pallas's compiler by Triton deprecated."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("device",), abstract_device=device)
    with warnings.catch_warnings(), jax.sharding.use_abstract_mesh(mesh):
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        yield
