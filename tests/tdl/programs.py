"""Small real programs of many kinds, as steps with their arguments; what can be trained is a step of AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

Program = tuple[Callable[..., Any], tuple[Any, ...]]
KEY = jax.random.key(0)


def normal(*shape: int, scale: float = 1.0, seed: int = 0) -> Any:
    """A float array from a seed."""
    rng = np.random.default_rng([seed, *shape])
    return jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)


def trained(loss: Callable[..., Any], params: Any, *batch: Any) -> Program:
    """A step of AdamW on a loss, and its arguments."""
    optimizer = optax.adamw(1e-3)

    def step(params: Any, state: Any, *batch: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, optimizer.init(params), *batch)


def attention_with_dropout() -> Program:
    module = nn.MultiHeadDotProductAttention(4, dropout_rate=0.1, deterministic=False)
    x = normal(8, 8, 16)
    params = module.init({"params": KEY, "dropout": KEY}, x)

    def loss(p: Any, x: Any) -> Any:
        out = module.apply(p, x, mask=nn.make_causal_mask(x[..., 0]), rngs={"dropout": jax.random.key(3)})
        return jnp.mean((jnp.asarray(out) - x) ** 2)

    return trained(loss, params, x)


def decoding_with_a_cache() -> Program:
    def decode(cache: Any, at: Any, w: Any, x: Any) -> Any:
        q, k, v = (jnp.einsum("bd,dhe->bhe", x, w[n]) for n in "qkv")
        keys = lax.dynamic_update_slice(cache["k"], k[:, None], (0, at, 0, 0))
        values = lax.dynamic_update_slice(cache["v"], v[:, None], (0, at, 0, 0))
        scores = jnp.where(jnp.arange(8) <= at, jnp.einsum("bhe,bthe->bht", q, keys), -jnp.inf)
        out = jnp.einsum("bht,bthe->bhe", jax.nn.softmax(scores), values)
        logits = jnp.einsum("bhe,hev->bv", out, w["o"])
        return {"k": keys, "v": values}, at + 1, jnp.argmax(logits, -1), logits

    cache = {"k": jnp.zeros((8, 8, 4, 4)), "v": jnp.zeros((8, 8, 4, 4))}
    w = {n: normal(16, 4, 4, seed=i) for i, n in enumerate("qkv")} | {"o": normal(4, 4, 32)}
    return decode, (cache, jnp.asarray(0), w, normal(8, 16))


def experts_by_one_hot() -> Program:
    def loss(p: Any, x: Any) -> Any:
        gate, chosen = lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
        sent = jax.nn.one_hot(chosen.reshape(-1), 8)
        place = (jnp.cumsum(sent, 0) - 1) * sent
        kept = jax.nn.one_hot(place.sum(-1).astype(int), 8) * (sent.sum(-1, keepdims=True))
        dispatch = jnp.einsum("te,tc->tec", sent, kept).reshape(16, 2, 8, 8).sum(1)
        combine = jnp.einsum("tke,tkc,tk->tec", sent.reshape(16, 2, 8), kept.reshape(16, 2, 8), gate)
        hidden = jax.nn.relu(jnp.einsum("ecd,edh->ech", jnp.einsum("tec,td->ecd", dispatch, x), p["up"]))
        out = jnp.einsum("tec,ecd->td", combine, jnp.einsum("ech,ehd->ecd", hidden, p["down"]))
        return jnp.mean((out - x) ** 2)

    params = {"router": normal(8, 8), "up": normal(8, 8, 16, scale=0.3), "down": normal(8, 16, 8, scale=0.3)}
    return trained(loss, params, normal(16, 8))


def experts_by_ragged_dot() -> Program:
    def loss(p: Any, x: Any) -> Any:
        logits = jax.nn.softmax(x @ p["router"])
        expert = jnp.argmax(logits, -1)
        order = jnp.argsort(expert)
        sizes = jnp.bincount(expert, length=8)
        hidden = jax.nn.relu(lax.ragged_dot(x[order], p["up"], sizes))
        out = lax.ragged_dot(hidden, p["down"], sizes)[jnp.argsort(order)]
        return jnp.mean((out * jnp.max(logits, -1, keepdims=True) - x) ** 2)

    params = {"router": normal(8, 8), "up": normal(8, 8, 16, scale=0.3), "down": normal(8, 16, 8, scale=0.3)}
    return trained(loss, params, normal(16, 8))


def _cell(p: Any, carry: Any, x: Any) -> Any:
    h, c = carry
    i, f, g, o = jnp.split(x @ p["x"] + h @ p["h"] + p["b"], 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def _lstm() -> Any:
    return {"x": normal(8, 32, scale=0.3), "h": normal(8, 32, scale=0.3, seed=1), "b": normal(32)}


def lstm_unrolled() -> Program:
    def loss(p: Any, xs: Any) -> Any:
        carry = (jnp.zeros((8, 8)), jnp.zeros((8, 8)))
        for t in range(3):
            carry, _ = _cell(p, carry, xs[t])
        return jnp.mean(carry[0] ** 2)

    return trained(loss, _lstm(), normal(3, 8, 8))


def lstm_scanned() -> Program:
    def loss(p: Any, xs: Any) -> Any:
        zeros = jnp.zeros((8, 8))
        return jnp.mean(lax.scan(lambda carry, x: _cell(p, carry, x), (zeros, zeros), xs)[1] ** 2)

    return trained(loss, _lstm(), normal(4, 8, 8))


class UNet(nn.Module):
    """Down, across and up again, with a skip connection and a resized copy."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        down = nn.relu(nn.Conv(8, (3, 3))(x))
        low = nn.relu(nn.Conv(16, (3, 3))(nn.max_pool(down, (2, 2), (2, 2))))
        up = nn.ConvTranspose(8, (2, 2), (2, 2))(low)
        resized = jax.image.resize(low[..., :8], up.shape, "nearest")
        return nn.Conv(1, (1, 1))(jnp.concatenate([down, up + resized], -1))


def unet() -> Program:
    x = normal(8, 16, 16, 1)
    return trained(lambda p, x: jnp.mean((jnp.asarray(UNet().apply(p, x)) - x) ** 2), UNet().init(KEY, x), x)


def state_space_model() -> Program:
    def loss(p: Any, x: Any) -> Any:
        decay = jnp.exp(-jax.nn.softplus(p["a"]))

        def combine(left: Any, right: Any) -> Any:
            return left[0] * right[0], right[0] * left[1] + right[1]

        states = lax.associative_scan(combine, (jnp.broadcast_to(decay, x.shape), x * p["b"]), axis=1)[1]
        return jnp.mean((states @ p["c"] - x) ** 2)

    return trained(loss, {"a": normal(8), "b": normal(8, seed=1), "c": normal(8, 8)}, normal(8, 8, 8))


def graph_network() -> Program:
    def loss(p: Any, nodes: Any, senders: Any, receivers: Any) -> Any:
        messages = jax.nn.relu(nodes[senders] @ p["message"])
        total = jax.ops.segment_sum(messages, receivers, 16)
        most = jax.ops.segment_max(messages, receivers, 16)
        return jnp.mean(((jnp.where(jnp.isfinite(most), total + most, total) @ p["update"]) - nodes) ** 2)

    edges = jnp.asarray(np.random.default_rng(0).integers(0, 16, 32))
    params = {"message": normal(8, 8, scale=0.3), "update": normal(8, 8, scale=0.3, seed=1)}
    return trained(loss, params, normal(16, 8), edges, edges[::-1])


class Normed(nn.Module):
    """A strided convolution and a batch norm in training."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(8, (3, 3), strides=2)(x)))


def batch_norm() -> Program:
    x = normal(8, 16, 16, 2)
    variables = Normed().init(KEY, x)

    def step(variables: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            out, updated = Normed().apply({**variables, "params": p}, x, mutable=["batch_stats"])
            return jnp.mean(out**3), updated

        gradient, updated = jax.grad(loss, has_aux=True)(variables["params"])
        return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], gradient), **updated}

    return step, (variables, x)


def fft_convolution() -> Program:
    def loss(p: Any, x: Any) -> Any:
        spectrum = jnp.fft.rfft(x, n=16) * jnp.fft.rfft(p["kernel"], n=16)
        return jnp.mean((jnp.fft.irfft(spectrum, n=16)[..., :8] - x) ** 2)

    return trained(loss, {"kernel": normal(4, 8)}, normal(8, 4, 8))


def gaussian_process() -> Program:
    def loss(p: Any, x: Any, y: Any) -> Any:
        distance = ((x[:, :, None] - x[:, None]) ** 2).sum(-1)
        chol = jnp.linalg.cholesky(jnp.exp(-distance * jnp.exp(p["scale"])) + 0.1 * jnp.eye(8))
        solved = jax.scipy.linalg.solve_triangular(chol, y, lower=True)
        return jnp.mean(solved**2) + jnp.log(jnp.diagonal(chol, axis1=-2, axis2=-1)).mean()

    return trained(loss, {"scale": jnp.zeros(())}, normal(8, 8, 3), normal(8, 8, 1))


def beam_search() -> Program:
    def search(table: Any, start: Any) -> Any:
        def more(state: Any) -> Any:
            return (state[0] < 4) & jnp.any(state[1] != 0)

        def extend(state: Any) -> Any:
            step, beams, scores = state
            logits = jax.nn.log_softmax(table[jnp.take_along_axis(beams, jnp.full((8, 4, 1), step), -1)[..., 0]])
            scores, flat = lax.top_k((scores[..., None] + logits).reshape(8, -1), 4)
            beams = jnp.take_along_axis(beams, (flat // 16)[..., None], 1)
            return step + 1, lax.dynamic_update_slice(beams, (flat % 16)[..., None], (0, 0, step + 1)), scores

        beams = jnp.broadcast_to(start[:, None, None], (8, 4, 6))
        return lax.while_loop(more, extend, (0, beams, jnp.zeros((8, 4)) - jnp.arange(4.0)))

    return search, (normal(16, 16), jnp.arange(1, 9, dtype=jnp.int32))


def diagonals() -> Program:
    """`jnp.diag` of a matrix chooses by platform how it is made."""

    def loss(p: Any, x: Any) -> Any:
        return jnp.sum(jnp.diag(p["w"] @ x.T @ x) ** 2) + jnp.sum(jnp.diag(jnp.diag(p["w"]) @ p["w"]) ** 2)

    return trained(loss, {"w": normal(8, 8)}, normal(16, 8))


PROGRAMS: tuple[Callable[[], Program], ...] = (
    attention_with_dropout, decoding_with_a_cache, experts_by_one_hot, experts_by_ragged_dot, lstm_unrolled, lstm_scanned, unet,
    state_space_model, graph_network, batch_norm, fft_convolution, gaussian_process, beam_search, diagonals,
)  # fmt: skip
