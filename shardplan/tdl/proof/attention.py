# pyright: basic
"""Cases of fused attention: the kernels of a traced gradient.

The Pallas kernels of JAX and of tokamax, where that is installed, run in Pallas's interpreter. Where there is no GPU, cuDNN's
attention is run by its formula (`shardplan.tdl.proof.cudnn_reference`): its cuts are then proven for the formula, not for cuDNN's
own arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardplan import _jax
from shardplan.tdl.proof.case import Case, Draw, array, case, traced


def _gradient(attend: Callable[..., Any], weights: Any) -> Callable[..., Any]:
    """A function of the operands that runs the attention forward and backward."""

    def loss(*operands: Any) -> Any:
        return jnp.sum((attend(*operands) * weights).astype(jnp.float32))

    return lambda *operands: jax.grad(loss, tuple(range(len(operands))))(*operands)


@case("pallas_call:mha_forward", "pallas_call:mha_preprocess_backward", "pallas_call:mha_backward")
def _pallas(name: str, draw: Draw) -> Case:
    attention = _jax.pallas_attention()
    batch, heads, sequence, head = draw.choose((2, 3)), draw.choose((2, 6)), draw.choose((32, 96)), 16
    causal, segmented = draw.choose((False, True)), draw.choose((False, False, True))
    segments = jnp.asarray(np.sort(draw.rng.integers(0, 3, (batch, sequence)))) if segmented else None
    q, k, v, weights = (array(draw, (batch, sequence, heads, head)) for _ in range(4))
    blocks = attention.BlockSizes(*[16] * 6)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return attention.mha(q, k, v, segments, head**-0.5, causal, blocks, "triton", None, 2, None, True)

    return traced(name, _gradient(attend, weights), q, k, v)


@case(
    "pallas_call:pallas_flash_attention",
    "pallas_call:pallas_flash_attention_fwd_res",
    "pallas_call:pallas_flash_attention_vjp",
    package="tokamax",
)
def _tokamax(name: str, draw: Draw) -> Case:
    tokamax = import_module("tokamax")
    batch, (heads, key_heads), head = draw.choose((2, 3)), draw.choose(((4, 4), (8, 4), (6, 1))), draw.choose((16, 24))
    causal = draw.choose((False, False, True))
    # under a causal mask, the backward pass of tokamax 0.0.17 reads beyond a last block of keys that is not full
    queries, keys = draw.choose(((128, 128), (192, 64), *(() if causal else ((48, 80),))))
    q, weights = (array(draw, (batch, queries, heads, head)) for _ in range(2))
    operands = [q, *(array(draw, (batch, keys, key_heads, head)) for _ in range(2))]
    options: dict[str, Any] = {"is_causal": causal}
    spread = draw.choose((1, batch)), draw.choose((1, heads)), queries, keys
    match draw.choose(("", "mask", "bias", "lengths", "window")):
        case "mask":
            options["mask"] = jnp.asarray(draw.rng.random(spread) < 0.7)
        case "bias":
            operands.append(array(draw, spread))
        case "lengths":
            options["key_value_seq_lengths"] = jnp.asarray(draw.rng.integers(1, keys + 1, batch))
            options["query_seq_lengths"] = jnp.asarray(draw.rng.integers(1, queries + 1, batch))
        case "window":
            options["local_window_size"] = 5, 3

    def attend(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
        return tokamax.dot_product_attention(q, k, v, bias, implementation="triton", **options)

    only_forward = name.endswith("flash_attention")
    with tokamax.config.cross_compile(True), tokamax.config.ignore_autotuning_cache(True):
        return traced(name, attend if only_forward else _gradient(attend, weights), *operands)


@case("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper")
def _cudnn(name: str, draw: Draw) -> Case:
    batch, (heads, key_heads), sequence, head = draw.choose((2, 6)), draw.choose(((4, 4), (8, 4), (6, 1))), 12, 8
    of = partial(array, draw, dtype="bfloat16")
    q, weights = (of((batch, sequence, heads, head)) for _ in range(2))
    operands = [q, *(of((batch, sequence, key_heads, head)) for _ in range(2))]
    options: dict[str, Any] = {"is_causal": draw.choose((False, False, True))}
    if draw.choose((False, False, True)):
        lengths = draw.rng.integers(1, sequence + 1, (2, batch)).astype(np.int32)
        options |= {"query_seq_lengths": lengths[0], "key_value_seq_lengths": lengths[1]}
    elif options["is_causal"]:
        options |= {"local_window_size": draw.choose((None, (4, 0)))}
    if draw.choose((False, True)):
        operands.append(of((draw.choose((1, batch)), draw.choose((1, heads)), sequence, sequence)))

    def attend(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
        return jax.nn.dot_product_attention(q, k, v, bias, implementation="cudnn", **options)

    with _jax.cudnn_assumed():
        return traced(name, _gradient(attend, weights), *operands)
