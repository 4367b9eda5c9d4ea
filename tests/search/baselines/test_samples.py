"""The samples of a step are counted by its data: batches, microbatches, timesteps, tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardplan.frontend.trace import trace
from shardplan.graph import flatten
from shardplan.search.baselines.samples import samples_of
from shardplan.shell.target import load_target


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def _counted(step: Callable[..., Any], *args: Any) -> tuple[int, int | None] | None:
    found = samples_of(flatten(trace(step, *args).program))
    return None if found is None else (found.count, found.tokens)


@pytest.mark.parametrize(
    ("target", "options", "expected"),
    [
        ("models.mlp:train_step", {"batch": 24}, (24, None)),
        ("models.gpt:train_step", {"batch": 8, "sequence": 16}, (8, 128)),
        ("models.gpt:train_step", {"batch": 8, "sequence": 16, "accumulate": 2}, (8, 128)),
        ("models.wresnet:train_step", {"batch": 4}, (4, None)),
        ("models.rnn:train_step", {"batch": 6, "steps": 10, "scan": True}, (6, 60)),
    ],
)
def test_the_batch_of_a_model(target: str, options: dict[str, Any], expected: tuple[int, int | None]) -> None:
    step, args = load_target(target, options)
    assert _counted(step, *args) == expected


def test_microbatches_of_an_accumulating_step_add_up() -> None:
    def step(weight: Any, batch: Any) -> Any:
        def add(total: Any, x: Any) -> Any:
            return total + jax.grad(lambda w: jnp.mean((x @ w) ** 2))(weight), None

        return weight - jax.lax.scan(add, jnp.zeros_like(weight), batch)[0]

    assert _counted(step, _floats(8, 8), _floats(5, 4, 8)) == (20, None)


def test_timesteps_are_steps_of_the_same_samples() -> None:
    def step(weight: Any, batch: Any) -> Any:
        def loss_of(weight: Any) -> Any:
            def unit(hidden: Any, x: Any) -> Any:
                return jnp.tanh(x + hidden @ weight), None

            return jnp.mean(jax.lax.scan(unit, jnp.zeros_like(batch[0]), batch)[0])

        return weight - jax.grad(loss_of)(weight)

    assert _counted(step, _floats(8, 8), _floats(5, 4, 8)) == (4, None)


def test_a_step_that_gives_nothing_back_has_its_last_argument_as_data() -> None:
    assert _counted(lambda weight, x: (x @ weight).sum(), _floats(8, 3), _floats(12, 8)) == (12, None)


def test_a_step_without_data_has_no_samples() -> None:
    assert _counted(lambda state: {"weight": state["weight"] * 2}, {"weight": _floats(8)}) is None


def test_frozen_weights_are_no_samples() -> None:
    """Low-rank adapters are trained beside more weights than the batch has arrays."""

    def step(adapters: Any, frozen: Any, batch: Any) -> Any:
        def loss_of(adapters: Any) -> Any:
            hidden = frozen["embedding"][batch["tokens"]]
            for (down, up), weight in zip(adapters, frozen["layers"], strict=True):
                hidden = jnp.tanh(hidden @ weight + hidden @ down @ up)
            return jnp.mean(jnp.take_along_axis(hidden @ frozen["head"], batch["targets"][..., None], -1))

        return jax.tree.map(lambda w, g: w - g, adapters, jax.grad(loss_of)(adapters))

    layers = [_floats(64, 64)] * 3
    frozen = {"embedding": _floats(256, 64), "layers": layers, "head": _floats(64, 256)}
    tokens = jax.ShapeDtypeStruct((8, 16), "int32")
    adapters = [(_floats(64, 4), _floats(4, 64))] * 3
    assert _counted(step, adapters, frozen, {"tokens": tokens, "targets": tokens}) == (8, 128)
