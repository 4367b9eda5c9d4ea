"""Values are named by the arguments that they update."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardplan.frontend.trace import trace
from shardplan.graph import flatten
from shardplan.graph.updates import updated, value_names


def names_of(step: Any, *args: Any) -> tuple[Any, dict[int, str]]:
    """(the flat graph, its names)."""
    program = trace(step, *args).program
    graph = flatten(program)
    return graph, value_names(graph, program.output_paths)


def made_by(graph: Any, names: dict[int, str], primitive: str) -> list[str]:
    """The names of the values that an op of this kind makes in the backward pass."""
    return [names[n.outputs[0]] for n in graph.nodes if n.backward and n.op.primitive == primitive and n.outputs[0] in names]


def test_gradients_are_named_by_their_weights_whatever_the_optimizer() -> None:
    weights = {"up": jnp.zeros((4, 8)), "down": jnp.zeros((8, 4))}
    loss = lambda w, x: jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2)  # noqa: E731
    for optimizer in (optax.sgd(0.1), optax.adamw(0.1), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))):

        def step(state: Any, x: Any, optimizer: optax.GradientTransformation = optimizer) -> Any:
            value, grads = jax.value_and_grad(loss)(state["w"], x)
            updates, moments = optimizer.update(grads, state["moments"], state["w"])
            return {"w": optax.apply_updates(state["w"], updates), "moments": moments}, value

        graph, names = names_of(step, {"w": weights, "moments": optimizer.init(weights)}, jnp.zeros((2, 4)))
        products = set(made_by(graph, names, "dot_general"))
        assert {"gradient of state/w/up", "gradient of state/w/down"} <= products, "whichever of them comes first"
        assert products.isdisjoint({"gradient of x"})


def test_a_gradient_that_a_scan_stacks_is_named_by_the_stacked_weight() -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, grad = jax.value_and_grad(lambda w: jnp.sum(jax.lax.scan(lambda c, wi: (jnp.tanh(c @ wi), None), x, w)[0] ** 2))(w)
        return w - 0.1 * grad, value

    graph, names = names_of(step, jnp.zeros((3, 4, 4)), jnp.zeros((2, 4)))
    assert "gradient of w" in made_by(graph, names, "dot_general")


def test_arguments_and_results_keep_their_own_names() -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return w - 0.1 * x, (x * 2.0).sum()

    graph, names = names_of(step, jnp.zeros(4), jnp.zeros(4))
    assert [names[t] for t in graph.inputs] == ["w", "x"]
    assert [names[t] for t in graph.outputs] == ["result 0", "result 1"]
    assert [i for t, i in updated(graph).items() if t == graph.inputs[1]] == [0], "what is subtracted updates w"
