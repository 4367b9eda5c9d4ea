# pyright: basic
"""The formulas of cuDNN's kernels, for machines without cuDNN: proofs and verifications on CPUs run them in place of cuDNN.

Arguments and results of the attention are those of JAX's primitives `dot_product_attention_fwd` and `dot_product_attention_bwd`:
queries [batch, queries, heads, head], keys and values with fewer heads where several queries' heads share one, or all with heads
before the sequence; bias [1 or batch, 1 or heads, queries, keys]; lengths [batch]. Sums are taken in float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

_FAR = -1e30


def forward(*operands: Any, is_training: bool, **params: Any) -> tuple[Any, ...]:
    """The result, and in training the logarithms of the softmax's sums, float32 [batch, heads, queries]."""
    q, k, v = (_heads_first(x, params) for x in operands[:3])
    scores, seen = _scores(q, k, operands, params)
    highest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.where(seen, jnp.exp(scores - highest), 0.0)
    total = jnp.maximum(weights.sum(axis=-1, keepdims=True), 1e-37)
    out = jnp.einsum("bnts,bnsh->bnth", weights / total, _per_head(v, q), precision="highest").astype(q.dtype)
    return (_heads_first(out, params), (highest + jnp.log(total))[..., 0])[: 2 if is_training else 1]


def backward(*operands: Any, **params: Any) -> tuple[Any, ...]:
    """The gradients of queries, keys and values, and of the bias if there is one."""
    q, k, v, out, gradient = (_heads_first(x, params).astype(jnp.float32) for x in (*operands[:3], *operands[11:]))
    sums, scale = operands[10], params["scale"]
    scores, seen = _scores(q, k, operands, params)
    weights = jnp.where(seen, jnp.exp(scores - sums[..., None]), 0.0)
    wanted = _product("bnth,bnsh->bnts", gradient, _per_head(v, q)) - jnp.sum(out * gradient, axis=-1, keepdims=True)
    slopes = weights * wanted
    found = [
        _product("bnts,bnsh->bnth", slopes, _per_head(k, q)) * scale,
        _shared(_product("bnts,bnth->bnsh", slopes, q) * scale, k),
        _shared(_product("bnts,bnth->bnsh", weights, gradient), v),
    ]
    results = [_heads_first(x, params).astype(like.dtype) for x, like in zip(found, operands, strict=False)]
    if params["variadic_args"][1]:
        bias = operands[3]
        over = tuple(d for d in (0, 1) if bias.shape[d] == 1)
        results.append(jnp.sum(slopes, axis=over, keepdims=True).astype(bias.dtype))
    return tuple(results)


def _product(how: str, x: Any, y: Any) -> Any:
    return jnp.einsum(how, x, y, precision="highest")


def _heads_first(x: Any, params: Any) -> Any:
    """Between the call's layout and [batch, heads, sequence, head], either way."""
    return x if params["layout"] == 1 else jnp.swapaxes(x, 1, 2)


def _per_head(x: Any, q: Any) -> Any:
    """Keys or values, once for each head of the queries."""
    return jnp.repeat(x.astype(jnp.float32), q.shape[1] // x.shape[1], axis=1)


def _shared(x: Any, like: Any) -> Any:
    """Gradients for each head of the queries, added up over those that share keys and values."""
    return x.reshape(x.shape[0], like.shape[1], -1, *x.shape[2:]).sum(axis=2)


def _scores(q: Any, k: Any, operands: Any, params: Any) -> tuple[Any, Any]:
    """Scores with their bias, and whether each counts: [batch, heads, queries, keys]."""
    scores = _product("bnth,bnsh->bnts", q.astype(jnp.float32), _per_head(k, q)) * params["scale"]
    if params["variadic_args"][0]:
        scores = scores + operands[3].astype(jnp.float32)
    at_query, at_key = (jax.lax.broadcasted_iota(jnp.int32, scores.shape, d) for d in (2, 3))
    seen = jnp.ones(scores.shape, bool)
    mask, window = params["mask_type"].name, params["sliding_window_length"]
    if "CAUSAL" in mask or window is not None:
        seen &= at_query >= at_key
    if window is not None:
        seen &= at_query - at_key < window
    if "PADDING" in mask:
        queries, keys = (x[:, None, None, None] for x in operands[4:6])
        seen &= (at_query < queries) & (at_key < keys)
    return jnp.where(seen, scores, _FAR), seen


def scaled_matmul(x: Any, y: Any, x_scale: Any, y_scale: Any, *, preferred_element_type: Any) -> tuple[Any, ...]:
    """x [batch, m, k] by y [batch, n, k] with a scale for each block along k, as JAX computes it on other GPUs."""
    numbers = ((2,), (2,)), ((0,), (0,))
    scales = {"lhs_scale": x_scale, "rhs_scale": y_scale}
    return (jax.lax.scaled_dot(x, y, **scales, dimension_numbers=numbers, preferred_element_type=preferred_element_type),)


FUNCTIONS = {"dot_product_attention_fwd": forward, "dot_product_attention_bwd": backward, "scaled_matmul": scaled_matmul}
"""By the names of JAX's primitives. A traced step has each with ``_wrapper`` behind its name."""
