"""Steps with fused attention, planned and run: the kernels are cut, and the step computes what it does on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan import _jax
from shardplan.verify.verify import verify
from tests.attention import for_gpus, needs_tokamax, of_tokamax
from tests.attention import of_jax as pallas

BATCH, SEQUENCE, HEADS, HEAD = 8, 32, 8, 8
WIDTH = HEADS * HEAD


def training(
    attend: Callable[..., Any], *, dtype: Any = jnp.float32, key_heads: int = HEADS, batch: int = BATCH, sequence: int = SEQUENCE
) -> tuple[Any, tuple[Any, Any]]:
    """A step that trains one layer of attention, and its arguments."""

    def step(w: Any, x: jax.Array) -> Any:
        def loss(w: Any) -> jax.Array:
            q, k, v = (jnp.einsum("btc,chd->bthd", x, w[name]) for name in "qkv")
            return jnp.mean(jnp.einsum("bthd,hdc->btc", attend(q, k, v), w["o"]).astype(jnp.float32) ** 2)

        return jax.tree.map(lambda a, b: a - b, w, jax.grad(loss)(w))

    rng = np.random.default_rng(0)
    shapes = {"q": (WIDTH, HEADS, HEAD), "k": (WIDTH, key_heads, HEAD), "v": (WIDTH, key_heads, HEAD), "o": (HEADS, HEAD, WIDTH)}
    w = {name: jnp.asarray(rng.standard_normal(shape) / WIDTH**0.5, dtype) for name, shape in shapes.items()}
    return step, (w, jnp.asarray(rng.standard_normal((batch, sequence, WIDTH)), dtype))


def cut_dims(plan: Any, name: str) -> set[int]:
    """The dims of its first operand along which the plan cuts the op of this name."""
    node = next(n for n in plan.session.problem.graph.nodes if name in n.op.primitive)
    needs = plan.session.decisions.uses[node.id].needs[0]
    return {d for d, factors in enumerate(needs.dims) if factors}


HEADS_CUT = {"w/[qkv]": P(None, "gpu"), "w/o": P("gpu"), "x": P()}
BATCH_CUT = {"w/*": P(), "x": P(("node", "gpu"))}
QUERIES_CUT = {"w/*": P(), "x": P(None, "gpu")}


@pytest.mark.slow
@pytest.mark.parametrize(("pins", "dims"), [(HEADS_CUT, {0, 2}), (BATCH_CUT, {0})])
def test_a_pallas_kernel_runs_on_shares(pins: dict[str, P], dims: set[int], eager: Any) -> None:
    step, args = training(pallas(causal=True))
    plan = shardplan.plan(step, *args, cluster=eager, pins=pins)
    assert cut_dims(plan, "mha_forward") == dims
    found = verify(plan, step, args, steps=1, backend="explicit")
    assert found.passed, found
    assert not found.stand_ins


@pytest.mark.parametrize("causal", [False, True])
def test_queries_are_cut_where_they_know_no_place_and_read_gathered_keys(causal: bool, eager: Any) -> None:
    q, k, v = (np.random.default_rng(n).standard_normal((1, 64, 1, 8)).astype(np.float32) for n in range(3))
    plan = shardplan.plan(pallas(causal), q, k, v, cluster=eager, pins={name: P(None, "gpu") for name in "qkv"})
    assert cut_dims(plan, "mha_forward") == (set() if causal else {1})
    assert sum(c.times for c in plan.collectives if c.kind == "all-gather") == (3 if causal else 2)
    assert verify(plan, pallas(causal), (q, k, v), steps=1, backend="explicit").passed


@needs_tokamax
@pytest.mark.parametrize(
    ("batch", "pins", "options", "dims"),
    [
        (2, HEADS_CUT, {"is_causal": True}, {0, 2}),
        pytest.param(8, BATCH_CUT, {"key_value_seq_lengths": np.full(8, 40, np.int32)}, {0}, marks=pytest.mark.slow),
    ],
)
def test_tokamaxs_kernel_is_cut_and_verified_in_the_interpreter(
    batch: int, pins: dict[str, P], options: dict[str, Any], dims: set[int], eager: Any
) -> None:
    step, args = training(of_tokamax(**options), key_heads=4, batch=batch, sequence=64)
    with for_gpus():
        plan = shardplan.plan(step, *args, cluster=eager, pins=pins)
        assert cut_dims(plan, "flash_attention_fwd") == dims
        found = verify(plan, step, args, steps=1, backend="explicit")
    assert found.passed, found
    assert found.stand_ins == ("pallas_call:pallas_flash_attention_fwd_res", "pallas_call:pallas_flash_attention_vjp")


@needs_tokamax
@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_tokamaxs_queries_are_cut_where_they_know_no_place(causal: bool, eager: Any) -> None:
    q, k, v = (np.random.default_rng(n).standard_normal((1, 256, 1, 16)).astype(np.float32) for n in range(3))
    with for_gpus():
        step = of_tokamax(is_causal=causal)
        plan = shardplan.plan(step, q, k, v, cluster=eager, pins={name: P(None, "gpu") for name in "qkv"})
        assert cut_dims(plan, "flash_attention") == (set() if causal else {0})  # without a batch of one
        found = verify(plan, step, (q, k, v), steps=1, backend="explicit")
    assert found.passed, found
    assert found.stand_ins == ("pallas_call:pallas_flash_attention",)


@needs_tokamax
def test_nothing_is_interpreted_once_a_verification_is_over() -> None:
    x = jnp.ones((1, 64, 1, 16))
    with for_gpus(), pytest.raises(ValueError, match="Only interpret mode is supported on CPU"):
        jax.jit(of_tokamax())(x, x, x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pins", "options"),
    [
        (HEADS_CUT, {"mask": np.tril(np.ones((1, 1, SEQUENCE, SEQUENCE), bool), 3)}),
        (BATCH_CUT, {"is_causal": True}),
        (QUERIES_CUT, {}),
    ],
)
@pytest.mark.parametrize("backend", ["explicit", "specs"])
def test_cudnns_attention_is_cut_and_verified_by_its_formula(
    pins: dict[str, P], options: dict[str, Any], backend: str, eager: Any
) -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options)

    step, args = training(attend, dtype=jnp.bfloat16, key_heads=4)
    plan = shardplan.plan(step, *args, cluster=eager, pins=pins)
    assert cut_dims(plan, "attention_bwd")
    found = verify(plan, step, args, steps=1, backend=backend)
    assert found.equal
    assert found.stand_ins == ("dot_product_attention_bwd", "dot_product_attention_fwd")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"mask": np.tril(np.ones((1, 1, SEQUENCE, SEQUENCE), bool), 3)},
        {"bias": np.ones((1, HEADS, SEQUENCE, SEQUENCE), np.float32)},
        {"query_seq_lengths": np.full(BATCH, 20, np.int32), "key_value_seq_lengths": np.full(BATCH, 24, np.int32)},
        {"is_causal": True, "local_window_size": (5, 0)},
    ],
)
def test_the_plain_implementation_is_ordinary_ops(options: dict[str, Any], eager: Any) -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, implementation="xla", **options)

    step, args = training(attend, key_heads=4)
    plan = shardplan.plan(step, *args, cluster=eager)
    found = verify(plan, step, args, steps=1, backend="explicit")
    assert found.passed, found


def test_the_kernel_holds_no_scores_in_memory() -> None:
    def peak(attend: Callable[..., Any], sequence: int) -> int:
        step, (w, _) = training(attend, dtype=jnp.bfloat16)
        return shardplan.plan(step, w, jax.ShapeDtypeStruct((BATCH, sequence, WIDTH), jnp.bfloat16), cluster="1x1").peak_bytes

    def flash(q: Any, k: Any, v: Any) -> Any:
        return _jax.pallas_attention().mha(q, k, v, None, 0.25, True)

    def cudnn(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    def plain(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    scores = BATCH * HEADS * 1024 * 1024 * 2
    assert peak(plain, 1024) > scores
    assert max(peak(flash, 1024), peak(cudnn, 1024)) < scores / 4
    assert peak(flash, 2048) < 2.1 * peak(flash, 1024)


@needs_tokamax
def test_tokamaxs_kernel_holds_no_scores_in_memory() -> None:
    def peak(sequence: int) -> int:
        step, (w, _) = training(of_tokamax(is_causal=True), dtype=jnp.bfloat16)
        x = jax.ShapeDtypeStruct((BATCH, sequence, WIDTH), jnp.bfloat16)
        with for_gpus():
            return shardplan.plan(step, w, x, cluster="1x1").peak_bytes

    assert peak(1024) < BATCH * HEADS * 1024 * 1024 * 2 / 4
    assert peak(2048) < 2.1 * peak(1024)
