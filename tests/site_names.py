"""The names that the Python blocks of a page take as given, by page: a small step of the user, its state and its batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import shardplan


def loss_of(state: Any, batch: Any) -> jax.Array:
    """A block without heads: attention between the rows of a batch, and an MLP."""
    query, key, value = (batch["x"] @ state["attention"][name]["kernel"] for name in ("query", "key", "value"))
    x = batch["x"] + jax.nn.softmax(query @ key.T) @ value
    hidden = jax.nn.gelu(x @ state["mlp"]["up"]["kernel"])
    return jnp.mean((hidden @ state["mlp"]["down"]["kernel"] - batch["y"]) ** 2)


def step(state: Any, batch: Any) -> Any:
    loss, gradients = jax.value_and_grad(loss_of)(state, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), loss


def init() -> Any:
    keys = iter(jax.random.split(jax.random.key(0), 5))

    def kernel(rows: int, columns: int) -> Any:
        return {"kernel": jax.random.normal(next(keys), (rows, columns)) / rows**0.5}

    attention = {name: kernel(16, 16) for name in ("query", "key", "value")}
    return {"attention": attention, "mlp": {"up": kernel(16, 64), "down": kernel(64, 16)}}


def trained() -> dict[str, Any]:
    x = jax.random.normal(jax.random.key(1), (32, 16))
    return {"loss_of": loss_of, "step": step, "init": init, "state": init(), "batch": {"x": x, "y": jnp.sin(x)}}


def moved() -> dict[str, Any]:
    """A plan on eight devices, of which four are left."""
    names = trained()
    plan = shardplan.plan(step, names["state"], names["batch"], cluster="2x4")
    state, _ = plan.put((names["state"], names["batch"]))
    left = jax.devices()[:4]
    return names | {"plan": plan, "state": state, "cluster": "4", "those_that_are_left": left, "path": Path.cwd() / "state"}


GIVEN: Mapping[str, Callable[[], dict[str, Any]]] = {
    "README": trained,
    "replanning": lambda: {"shardplan": shardplan, **moved()},
    "search": lambda: {"jax": jax, "jnp": jnp},
}
