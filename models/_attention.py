"""Causal attention with grouped queries: at once, or block by block so that memory grows with the sequence and not its square:
block by block in the step, or in one kernel."""

import functools

import jax
import jax.numpy as jnp

from models._fused_attention import flash
from models._gpt_options import causal_mask

_MASKED = float(jnp.finfo(jnp.float32).min)


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """q [b, s, key heads, group, h], k and v [b, s, key heads, h] -> as q. Scores and softmax are float32 whatever q is."""
    scores = jnp.einsum("bqkgh,bskh->bkgqs", q, k).astype(jnp.float32)
    scores = jnp.where(causal_mask(q.shape[1]), scores, _MASKED)
    weights = jax.nn.softmax(scores).astype(q.dtype)
    return jnp.einsum("bkgqs,bskh->bqkgh", weights, v)


def attend_blockwise(q: jax.Array, k: jax.Array, v: jax.Array, *, block: int) -> jax.Array:
    """The same function, `block` queries against `block` keys at a time, with a running maximum and sum (Rabe and Staats 2021).

    Backward, each block of queries is computed again: what is kept of it is linear in the sequence. `block` divides the sequence.
    """
    queries, keys, values = (_blocks(x, block) for x in (q, k, v))
    number = jnp.arange(len(queries))

    @jax.checkpoint
    def rows(_, row):
        of = functools.partial(_one_block, *row)
        batch, size, *heads, depth = row[1].shape
        start = (
            jnp.full((batch, *heads, size), _MASKED),
            jnp.zeros((batch, *heads, size)),
            jnp.zeros((batch, *heads, size, depth)),
        )
        (_, total, weighted), _ = jax.lax.scan(of, start, (number, keys, values))
        return None, jnp.moveaxis(weighted / total[..., None], -2, 1).astype(q.dtype)

    _, results = jax.lax.scan(rows, None, (number, queries))
    return jnp.moveaxis(results, 0, 1).reshape(q.shape)


def attend_in_kernel(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The same function in one kernel. It takes as many heads of keys and values as of queries, so those are repeated."""

    def merged(x: jax.Array) -> jax.Array:
        """[b, s, key heads, group, h] -> [b, s, heads, h]"""
        return x.reshape(*x.shape[:2], -1, x.shape[-1])

    k, v = (jnp.repeat(x[:, :, :, None], q.shape[3], axis=3) for x in (k, v))
    result: jax.Array = flash(merged(q), merged(k), merged(v), 1.0, True)
    return result.reshape(q.shape)


def _one_block(row, q, state, column):
    """Adds one block of keys to (maximum, sum, weighted values) of a block of queries."""
    number, k, v = column
    largest, total, weighted = state
    scores = jnp.einsum("bqkgh,bskh->bkgqs", q, k).astype(jnp.float32)
    query, key = (jax.lax.broadcasted_iota(jnp.int32, scores.shape[-2:], dim) for dim in (0, 1))
    scores = jnp.where(row * q.shape[1] + query >= number * q.shape[1] + key, scores, _MASKED)
    # the maximum cancels out: no gradient passes through it
    highest = jax.lax.stop_gradient(jnp.maximum(largest, scores.max(axis=-1)))
    weights, fade = jnp.exp(scores - highest[..., None]), jnp.exp(largest - highest)
    found = jnp.einsum("bkgqs,bskh->bkgqh", weights.astype(q.dtype), v).astype(jnp.float32)
    return (highest, total * fade + weights.sum(axis=-1), weighted * fade[..., None] + found), None


def _blocks(x: jax.Array, block: int) -> jax.Array:
    """[b, s, ...] -> [s / block, b, block, ...]"""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0)
