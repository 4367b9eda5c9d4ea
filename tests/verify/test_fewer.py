"""How many samples and layers a shrunken copy keeps: every cut of a plan divides them, and only what counts them is smaller."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardplan.frontend.nnx_state import trace_step
from shardplan.graph import flatten
from shardplan.verify.fewer import fewer_layers, fewer_samples, first_of, smaller


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def train(state: Any, batch: Any) -> Any:
    """Half of the state are stacks of eight layers; the head only has as many rows."""

    def loss(w: Any) -> Any:
        x = jnp.tanh(batch["x"].reshape(-1, 8) @ w["head"]).reshape(-1, 6, 8)
        return (
            jnp.sum(jax.lax.scan(lambda h, k: (jnp.tanh(h @ k), None), x, w["layers"].astype(jnp.bfloat16))[0]) * batch["scale"]
        )

    slope = jax.grad(loss)(state["w"])
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], slope)
    return {"w": jax.tree.map(jnp.subtract, state["w"], moments), "moments": moments}


def traced(batch: int) -> Any:
    w = {"head": shape(8, 8), "layers": shape(8, 8, 8)}
    return trace_step(train, ({"w": w, "moments": w}, {"x": shape(batch, 6, 8), "scale": shape()}))


@pytest.mark.parametrize(
    ("batch", "parts", "sizes"),
    [
        (48, 1, [2, 3, 4, 6, 8, 12, 16, 24]),
        (48, 8, [8, 16, 24]),
        (48, 32, [2, 3, 4, 6, 8, 12, 16, 24]),
        (7, 1, [2]),
        (7, 7, []),
        (2, 1, []),
    ],
)
def test_the_cuts_of_the_batch_divide_what_is_kept(batch: int, parts: int, sizes: list[int]) -> None:
    """A cut that pads now may pad then."""
    graph = flatten(traced(batch).program)
    (x,) = [t for t, path in zip(graph.inputs, graph.input_paths, strict=True) if path == "batch/x"]
    found = fewer_samples(graph, [(x, (parts, 1, 1))])
    assert [own.kept for own in found] == sizes
    assert all([graph.input_paths[i] for i in own.dims] == ["batch/x"] for own in found)


def test_a_cut_of_samples_by_positions_divides_too() -> None:
    graph = flatten(traced(48).program)
    (rows,) = [n.outputs[0] for n in graph.nodes if n.signature.contracts and graph.tensors[n.outputs[0]].shape == (288, 8)][:1]
    assert [own.kept for own in fewer_samples(graph, [(rows, (4, 1))])] == [2, 4, 6, 8, 12, 16, 24]


def test_layers_are_those_that_a_loop_runs_over() -> None:
    step = traced(16)
    graph = flatten(step.program)
    layers = [t for t, path in zip(graph.inputs, graph.input_paths, strict=True) if path.endswith("layers")]
    (found,) = fewer_layers(graph, [])
    assert (str(found), [graph.input_paths[i] for i in found.dims]) == (
        "layers 8 -> 2",
        ["state/moments/layers", "state/w/layers"],
    )
    (cut,) = fewer_layers(graph, [(layers[0], (4, 1, 1))])
    assert cut.kept == 4
    shapes = smaller(step, [found])
    assert shapes[0]["w"]["layers"].shape == (2, 8, 8)
    assert shapes[0]["w"]["head"].shape == (8, 8)


def test_the_first_of_an_array() -> None:
    x = jnp.arange(12).reshape(4, 3)
    assert first_of(x, (2, 3)).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert first_of(x, (4, 3)) is x
    assert first_of(1.0, ()) == 1.0
