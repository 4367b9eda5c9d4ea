# pyright: basic
"""Cases of fused attention: the kernels of a traced gradient.

JAX's Pallas kernels run in Pallas's interpreter. Where there is no GPU, cuDNN's attention is run by its formula
(`shardplan.tdl.proof.cudnn_reference`): its cuts are then proven for the formula, not for cuDNN's own arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
    from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

    batch, heads, sequence, head = draw.choose((2, 3)), draw.choose((2, 6)), draw.choose((32, 96)), 16
    causal, segmented = draw.choose((False, True)), draw.choose((False, False, True))
    segments = jnp.asarray(np.sort(draw.rng.integers(0, 3, (batch, sequence)))) if segmented else None
    q, k, v, weights = (array(draw, (batch, sequence, heads, head)) for _ in range(4))
    blocks = BlockSizes(*[16] * 6)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return mha(q, k, v, segments, head**-0.5, causal, blocks, "triton", None, 2, None, True)

    return traced(name, _gradient(attend, weights), q, k, v)


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
