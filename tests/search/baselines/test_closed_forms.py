"""Baselines send what their names say: data parallel 2(n-1)/n of the gradients, FSDP its gathers and reduce-scatters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import shardplan
from models import llama

WIDTH, TOKENS, VOCABULARY = 256, 2048, 4096


def training(dtype: Any) -> tuple[Any, tuple[Any, ...]]:
    """A language model as optax trains it: a lookup, two layers and a head, computed in ``dtype`` on float32 weights."""
    tx = optax.adamw(1e-3)
    params = {
        "embedding": jax.ShapeDtypeStruct((VOCABULARY, WIDTH), jnp.float32),
        "up": jax.ShapeDtypeStruct((WIDTH, 4 * WIDTH), jnp.float32),
        "down": jax.ShapeDtypeStruct((4 * WIDTH, WIDTH), jnp.float32),
        "head": jax.ShapeDtypeStruct((WIDTH, VOCABULARY), jnp.float32),
    }

    def step(state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            own = jax.tree.map(lambda w: w.astype(dtype), params)
            x = own["embedding"][batch["tokens"]]
            x = x + jax.nn.gelu(x @ own["up"]) @ own["down"]
            logits = (x @ own["head"]).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        updates, moments = tx.update(grads, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss

    tokens = jax.ShapeDtypeStruct((TOKENS,), jnp.int32)
    state = {"params": params, "moments": jax.eval_shape(tx.init, params)}
    return step, (state, {"tokens": tokens, "targets": tokens})


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("cluster", "n"), [("8", 8), ("2x4", 8), ("4", 4)])
def test_a_baseline_sends_what_its_closed_form_says(cluster: str, n: int, dtype: Any) -> None:
    step, args = training(dtype)
    plan = shardplan.plan(step, *args, cluster=cluster, donate_argnums=0, factors={}, time_model="sum")
    sent = {b.name: b.communication_bytes for b in plan.baselines}
    weights = sum(x.size for x in jax.tree.leaves(args[0]["params"])) * jnp.dtype(dtype).itemsize
    part = (n - 1) / n
    scalars = 64 * part * 2  # the loss, the norms and the counts are a few numbers
    assert sent["replicated"] == 0
    assert sent["data parallel"] == pytest.approx(2 * part * weights, abs=scalars)
    # Each weight is gathered for the forward pass, and again for the backward pass, which reads no lookup's table. The backward
    # pass keeps what a step computes from a gathered weight: here its cast.
    table = VOCABULARY * WIDTH * jnp.dtype(dtype).itemsize
    again = weights - table if dtype == jnp.float32 else 0
    assert sent["FSDP"] == pytest.approx(part * (weights + again + weights), rel=0.01)


def test_masks_that_no_input_makes_lie_as_what_they_mask() -> None:
    """Of attention by blocks, the backward pass keeps a mask for each step of a loop, made of the step's number alone."""
    sizes = {"layers": 2, "width": 64, "heads": 4, "key_heads": 2, "inner": 128, "vocabulary": 256}
    step, args = llama.train_step(**sizes, sequence=64, block=16, batch=16)
    plan = shardplan.plan(step, *args, cluster="8", donate_argnums=0, factors={}, time_model="sum")
    parallel = next(b for b in plan.baselines if b.name == "data parallel")
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(args[0])) / 3  # and two moments
    assert parallel.communication_bytes == pytest.approx(2 * 7 / 8 * weights, rel=0.01)
