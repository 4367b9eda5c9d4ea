"""Products of attention are named by what happens between them, whatever the model calls them."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardplan.frontend.trace import trace
from shardplan.graph import flatten
from shardplan.graph.attention import attention_products, weight_tensors


def names_of(step: Any, *args: Any) -> Counter[tuple[str, bool]]:
    """How many products have each name, in the forward pass and in the backward pass (True)."""
    graph = flatten(trace(step, *args).program)
    named = attention_products(graph, weight_tensors(graph))
    assert all(graph.nodes[n].signature.contracts for n in named)
    return Counter((name, graph.nodes[n].backward) for n, name in named.items())


FORWARD = {("QK", False): 1, ("AV", False): 1}
GRADIENTS = {("gradient of QK", True): 2, ("gradient of AV", True): 2}
AGAIN = {("QK", True): 1, ("AV", True): 1}


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        ("gpt", {"layers": 1}, FORWARD | GRADIENTS),
        ("gpt", {"layers": 2, "scan": True, "remat": True}, FORWARD | AGAIN | GRADIENTS),
        ("llama", {"layers": 1}, FORWARD | GRADIENTS),
        ("moe", {"layers": 1}, FORWARD | GRADIENTS),
        ("mlp", {}, {}),
        ("two_tower", {}, {}),
    ],
    ids=str,
)
def test_each_attention_of_a_model_has_its_products(model: str, options: Any, expected: Any) -> None:
    """Not the gate of experts, nor the softmax of a loss over pairs."""
    step, args = importlib.import_module(f"models.{model}").train_step(**options)
    assert names_of(step, *args) == expected


def attend(w: Any, x: Any, *, divide_last: bool) -> Any:
    a, b, c = (x @ one for one in w)
    scores = a @ b.T
    weights = jnp.exp(scores - scores.max(1, keepdims=True))
    total = weights.sum(1, keepdims=True)
    return (weights @ c) / total if divide_last else (weights / total) @ c


@pytest.mark.parametrize(("divide_last", "expected"), [(False, FORWARD | GRADIENTS), (True, {})])
def test_a_softmax_is_known_by_its_ops(divide_last: bool, expected: Any) -> None:
    def step(w: Any, x: Any) -> Any:
        return jax.tree.map(jnp.subtract, w, jax.grad(lambda w: (attend(w, x, divide_last=divide_last) ** 2).sum())(w))

    w = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 3
    assert names_of(step, w, jax.ShapeDtypeStruct((16, 8), jnp.float32)) == expected


def test_a_layer_norm_between_two_products_of_values_is_no_softmax() -> None:
    def step(w: Any, x: Any) -> Any:
        y = (x @ w) @ (x @ w).T
        y = (y - y.mean(1, keepdims=True)) / jnp.sqrt(y.var(1, keepdims=True) + 1e-6)
        return w, (y @ (x @ w)).sum()

    assert names_of(step, jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((16, 8), jnp.float32)) == {}
