"""Attention in one kernel, which never holds the scores in memory: JAX's Pallas kernel for GPUs (Dao 2023, FlashAttention-2).

The device that a step is compiled for chooses how the kernel runs: compiled by Triton, or on CPUs step by step in Pallas's
interpreter. So a step that is traced on a CPU and compiled for GPUs has the compiled kernel.
"""

import functools
from typing import Any

import jax
from jax.experimental.pallas.ops.gpu import attention

from models._options import one_of, require

ATTENTION = one_of("xla", "flash")
_BLOCK = 128
_mha: Any = attention.mha  # a custom_vjp function with its two halves


def check(kind: str, *, sequence: int) -> None:
    """Raises ValueError for a sequence that the kernel's blocks do not divide."""
    fits = sequence % _BLOCK == 0 or (16 <= sequence <= _BLOCK and sequence & (sequence - 1) == 0)
    require(
        kind != "flash" or fits,
        f"attention='flash' takes sequences of 16, 32, 64 or a multiple of {_BLOCK}, not {sequence}",
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def flash(q: jax.Array, k: jax.Array, v: jax.Array, scale: float, causal: bool) -> jax.Array:
    """q, k, v [batch, sequence, heads, head] -> as q. What is kept for the backward pass is linear in the sequence."""
    return _forward(q, k, v, scale, causal)[0]


def _forward(q, k, v, scale, causal):
    def run(interpret, q, k, v):
        out, (*_, sums) = _mha.fwd(q, k, v, None, *_arguments(scale, causal, interpret))
        return out, sums

    out, sums = _for_this_platform(run, q, k, v)
    return out, (q, k, v, out, sums)


def _backward(scale, causal, kept, gradient):
    def run(interpret, q, k, v, out, sums, gradient):
        return _mha.bwd(*_arguments(scale, causal, interpret), (q, k, v, None, out, sums), gradient)[:3]

    return _for_this_platform(run, *kept, gradient)


flash.defvjp(_forward, _backward)


def _for_this_platform(run: Any, *operands: jax.Array) -> Any:
    return jax.lax.platform_dependent(*operands, cpu=functools.partial(run, True), default=functools.partial(run, False))


def _arguments(scale: float, causal: bool, interpret: bool) -> tuple[Any, ...]:
    """What `mha` takes behind the segments: scale, mask, blocks, backward kernel, warps, stages, grid, interpret, debug, sums."""
    return scale, causal, attention.BlockSizes.get_default(), "triton", None, 2, None, interpret, False, False
