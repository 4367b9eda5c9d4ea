"""Attention in one kernel, which never holds the scores in memory: a Pallas kernel for GPUs (Dao 2023, FlashAttention-2).

It is the kernel of JAX where JAX has one that is not deprecated, else that of tokamax. The device that a step is compiled for
chooses how it runs: compiled by Triton, or on CPUs step by step in Pallas's interpreter. So a step that is traced on a CPU and
compiled for GPUs has the compiled kernel.
"""

import functools
import importlib
import sys
import warnings
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import jax

from models import _tokamax_attention
from models._options import one_of, require

ATTENTION = one_of("xla", "flash")
_BLOCK = 128
_OF_JAX = "jax.experimental.pallas.ops.gpu.attention"


def check(kind: str, *, sequence: int) -> None:
    """Raises ValueError for a sequence that the kernel's blocks do not divide, and where no kernel is installed."""
    if kind != "flash":
        return
    fits = sequence % _BLOCK == 0 or (16 <= sequence <= _BLOCK and sequence & (sequence - 1) == 0)
    require(fits, f"attention='flash' takes sequences of 16, 32, 64 or a multiple of {_BLOCK}, not {sequence}")
    require(
        _of_jax() is not None or find_spec("tokamax") is not None,
        "attention='flash' takes a kernel from tokamax, as this JAX has none that is not deprecated: pip install tokamax",
    )


def flash(q: jax.Array, k: jax.Array, v: jax.Array, scale: float, causal: bool) -> jax.Array:
    """q, k, v [batch, sequence, heads, head] -> as q. What is kept for the backward pass is linear in the sequence."""
    return _flash(q, k, v, scale, causal) if _of_jax() else _tokamax_attention.attend(q, k, v, scale, causal)


@functools.cache
def _of_jax() -> ModuleType | None:
    """JAX's module of the kernel; None where JAX calls it deprecated when it is imported, or no longer has it."""
    before = sys.modules.pop(_OF_JAX, None)  # whoever imported it has had the warning
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", f"{_OF_JAX} is deprecated", DeprecationWarning)
            module = importlib.import_module(_OF_JAX)
    except (ImportError, DeprecationWarning):
        module = None
    if before is not None:
        sys.modules[_OF_JAX] = before
        vars(sys.modules[_OF_JAX.rpartition(".")[0]])[_OF_JAX.rpartition(".")[2]] = before
    return module and (before or module)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _flash(q: jax.Array, k: jax.Array, v: jax.Array, scale: float, causal: bool) -> jax.Array:
    return _forward(q, k, v, scale, causal)[0]


def _forward(q, k, v, scale, causal):
    def run(interpret, q, k, v):
        out, (*_, sums) = _mha().fwd(q, k, v, None, *_arguments(scale, causal, interpret))
        return out, sums

    out, sums = _for_this_platform(run, q, k, v)
    return out, (q, k, v, out, sums)


def _backward(scale, causal, kept, gradient):
    def run(interpret, q, k, v, out, sums, gradient):
        return _mha().bwd(*_arguments(scale, causal, interpret), (q, k, v, None, out, sums), gradient)[:3]

    return _for_this_platform(run, *kept, gradient)


_flash.defvjp(_forward, _backward)


def _for_this_platform(run: Any, *operands: jax.Array) -> Any:
    return jax.lax.platform_dependent(*operands, cpu=functools.partial(run, True), default=functools.partial(run, False))


def _mha() -> Any:
    """A custom_vjp function with its two halves."""
    attention: Any = _of_jax()
    return attention.mha


def _arguments(scale: float, causal: bool, interpret: bool) -> tuple[Any, ...]:
    """What `mha` takes behind the segments: scale, mask, blocks, backward kernel, warps, stages, grid, interpret, debug, sums."""
    attention: Any = _of_jax()
    return scale, causal, attention.BlockSizes.get_default(), "triton", None, 2, None, interpret, False, False
