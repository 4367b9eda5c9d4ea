"""Real programs of many kinds meet no op that is not described, and each of their ops is proven on their own shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from shardplan.tdl import Call, describe
from shardplan.tdl.coverage import sort_primitives
from shardplan.tdl.verify import draw, verify

STRUCTURAL = {entry.name for entry in sort_primitives() if entry.kind == "structural"}
KEY = jax.random.key(0)


def trained(loss: Callable[..., Any], params: Any, *batch: Any) -> Any:
    """A step of Adam on a loss, as a traced program."""
    optimizer = optax.adamw(1e-3)

    def step(params: Any, state: Any, *batch: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(params, *batch), state, params)
        return optax.apply_updates(params, updates), state

    return jax.make_jaxpr(step)(params, jax.eval_shape(optimizer.init, params), *batch)


def attention_with_dropout() -> Any:
    module = nn.MultiHeadDotProductAttention(2, dropout_rate=0.1, deterministic=False)
    x = jnp.ones((2, 4, 8))
    params = jax.eval_shape(module.init, {"params": KEY, "dropout": KEY}, x)
    return trained(
        lambda p, x: jnp.sum(jnp.asarray(module.apply(p, x, mask=nn.make_causal_mask(x[..., 0]), rngs={"dropout": KEY}))),
        params,
        x,
    )


def decoding_with_a_cache() -> Any:
    def decode(cache: Any, w: Any, x: Any, at: Any) -> Any:
        cache = lax.dynamic_update_slice(cache, (x @ w)[:, None], (0, at, 0))
        scores = jnp.where(jnp.arange(8) <= at, jnp.einsum("bd,btd->bt", x, cache), -jnp.inf)
        return cache, jnp.argmax(jnp.einsum("bt,btd->bd", jax.nn.softmax(scores), cache), -1)

    return jax.make_jaxpr(decode)(jnp.zeros((2, 8, 4)), jnp.ones((4, 4)), jnp.ones((2, 4)), 3)


def experts_by_one_hot() -> Any:
    def loss(p: Any, x: Any) -> Any:
        gate, chosen = lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
        dispatch = jax.nn.one_hot(chosen, 4)
        place = jnp.cumsum(dispatch.reshape(-1, 4), 0) * dispatch.reshape(-1, 4)
        sent = jnp.einsum("tke,td->ekd", dispatch, x) + place.sum()
        out = jnp.einsum("ekd,edh->ekh", sent, p["experts"])
        return jnp.einsum("tke,tk,ekh->th", dispatch, gate, out).sum()

    return trained(loss, {"router": jnp.ones((8, 4)), "experts": jnp.ones((4, 8, 6))}, jnp.ones((6, 8)))


def experts_by_ragged_dot() -> Any:
    def loss(p: Any, x: Any) -> Any:
        expert = jnp.argmax(x @ p["router"], -1)
        order = jnp.argsort(expert)
        sizes = jnp.bincount(expert, length=4)
        return lax.ragged_dot(x[order], p["experts"], sizes)[jnp.argsort(order)].sum()

    return trained(loss, {"router": jnp.ones((8, 4)), "experts": jnp.ones((4, 8, 6))}, jnp.ones((6, 8)))


def _cell(p: Any, carry: Any, x: Any) -> Any:
    h, c = carry
    i, f, g, o = jnp.split(x @ p["x"] + h @ p["h"] + p["b"], 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return (jax.nn.sigmoid(o) * jnp.tanh(c), c), h


LSTM = {"x": jnp.ones((4, 16)), "h": jnp.ones((4, 16)), "b": jnp.ones(16)}


def lstm_unrolled() -> Any:
    def loss(p: Any, xs: Any) -> Any:
        carry = (jnp.zeros((2, 4)), jnp.zeros((2, 4)))
        for t in range(3):
            carry, _ = _cell(p, carry, xs[t])
        return carry[0].sum()

    return trained(loss, LSTM, jnp.ones((3, 2, 4)))


def lstm_scanned() -> Any:
    def loss(p: Any, xs: Any) -> Any:
        zeros = jnp.zeros((2, 4))
        return lax.scan(lambda carry, x: _cell(p, carry, x), (zeros, zeros), xs)[1].sum()

    return trained(loss, LSTM, jnp.ones((3, 2, 4)))


class UNet(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        down = nn.relu(nn.Conv(4, (3, 3))(x))
        low = nn.relu(nn.Conv(8, (3, 3))(nn.max_pool(down, (2, 2), (2, 2))))
        up = nn.ConvTranspose(4, (2, 2), (2, 2))(low)
        resized = jax.image.resize(low[..., :4], up.shape, "nearest")
        return nn.Conv(1, (1, 1))(jnp.concatenate([down, up + resized], -1))


def unet() -> Any:
    x = jnp.ones((2, 8, 8, 1))
    return trained(lambda p, x: jnp.sum(jnp.asarray(UNet().apply(p, x))), jax.eval_shape(UNet().init, KEY, x), x)


def state_space_model() -> Any:
    def loss(p: Any, x: Any) -> Any:
        decay = jnp.exp(-jax.nn.softplus(p["a"]))

        def combine(left: Any, right: Any) -> Any:
            return left[0] * right[0], right[0] * left[1] + right[1]

        states = lax.associative_scan(combine, (jnp.broadcast_to(decay, x.shape), x * p["b"]), axis=1)[1]
        return (states @ p["c"]).sum()

    return trained(loss, {"a": jnp.ones(4), "b": jnp.ones(4), "c": jnp.ones((4, 4))}, jnp.ones((2, 8, 4)))


def graph_network() -> Any:
    def loss(p: Any, nodes: Any, senders: Any, receivers: Any) -> Any:
        messages = jax.nn.relu(nodes[senders] @ p["message"])
        total = jax.ops.segment_sum(messages, receivers, 6)
        most = jax.ops.segment_max(messages, receivers, 6)
        return (jnp.where(jnp.isfinite(most), total + most, total) @ p["update"]).sum()

    edges = jnp.arange(8) % 6
    return trained(loss, {"message": jnp.ones((4, 4)), "update": jnp.ones((4, 4))}, jnp.ones((6, 4)), edges, edges[::-1])


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.BatchNorm(use_running_average=False)(nn.Conv(4, (3, 3), strides=2)(x)).mean()


def batch_norm() -> Any:
    x = jnp.ones((4, 8, 8, 2))
    variables = jax.jit(Normed().init)(KEY, x)

    def loss(p: Any, x: Any) -> Any:
        return Normed().apply({**variables, "params": p}, x, mutable=["batch_stats"])[0]

    return trained(loss, variables["params"], x)


def fft_convolution() -> Any:
    def loss(p: Any, x: Any) -> Any:
        spectrum = jnp.fft.rfft(x, n=16) * jnp.fft.rfft(p["kernel"], n=16)
        return (jnp.fft.irfft(spectrum, n=16)[..., :8] ** 2).sum()

    return trained(loss, {"kernel": jnp.ones(8)}, jnp.ones((2, 8)))


def gaussian_process() -> Any:
    def loss(p: Any, x: Any, y: Any) -> Any:
        distance = ((x[:, :, None] - x[:, None]) ** 2).sum(-1)
        chol = jnp.linalg.cholesky(jnp.exp(-distance * p["scale"]) + 0.1 * jnp.eye(6))
        solved = jax.scipy.linalg.solve_triangular(chol, y, lower=True)
        return (solved**2).sum() + jnp.log(jnp.diagonal(chol, axis1=-2, axis2=-1)).sum()

    return trained(loss, {"scale": jnp.ones(())}, jnp.ones((2, 6, 3)), jnp.ones((2, 6, 1)))


def beam_search() -> Any:
    def search(table: Any) -> Any:
        def more(state: Any) -> Any:
            return (state[0] < 4) & jnp.any(state[1] != 0)

        def extend(state: Any) -> Any:
            step, beams, scores = state
            logits = jax.nn.log_softmax(table[jnp.take_along_axis(beams, jnp.full((2, 3, 1), step), -1)[..., 0]])
            scores, flat = lax.top_k((scores[..., None] + logits).reshape(2, -1), 3)
            beams = jnp.take_along_axis(beams, (flat // 12)[..., None], 1)
            return step + 1, lax.dynamic_update_slice(beams, (flat % 12)[..., None], (0, 0, step + 1)), scores

        return lax.while_loop(more, extend, (0, jnp.ones((2, 3, 6), jnp.int32), jnp.zeros((2, 3))))

    return jax.make_jaxpr(search)(jnp.ones((12, 12)))


PROGRAMS = [
    attention_with_dropout, decoding_with_a_cache, experts_by_one_hot, experts_by_ragged_dot, lstm_unrolled, lstm_scanned, unet,
    state_space_model, graph_network, batch_norm, fft_convolution, gaussian_process, beam_search,
]  # fmt: skip


def calls(jaxpr: Any) -> Iterator[Call]:
    """All applications of primitives, bodies included."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in STRUCTURAL:
            for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
                body = getattr(value, "jaxpr", value)
                if hasattr(body, "eqns"):
                    yield from calls(body)
            continue
        ins, outs = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
        yield Call(
            eqn.primitive.name,
            tuple(tuple(v.shape) for v in ins),
            tuple(tuple(v.shape) for v in outs),
            eqn.params,
            tuple(str(v.dtype) for v in ins),
            tuple(str(v.dtype) for v in outs),
        )


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_a_program_meets_no_undescribed_op(program: Callable[[], Any]) -> None:
    found = list(calls(program().jaxpr))
    assert found
    assert sorted({call.primitive for call in found if describe(call) is None}) == []


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_each_op_of_a_program_is_proven_on_its_shapes(program: Callable[[], Any]) -> None:
    seen: dict[Any, Call] = {}
    for call in calls(program().jaxpr):
        params = str({k: v for k, v in call.params.items() if "jaxpr" not in k})
        seen.setdefault((call.primitive, call.operands, call.results, call.dtypes, params), call)
    rng = np.random.default_rng(0)
    faults = [f for call in seen.values() for f in verify(call, draw(call, rng, low=0, high=2), nested=1).faults]
    assert not faults, "\n".join(map(str, faults))
