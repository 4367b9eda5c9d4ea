"""The compute that each movement can hide behind, before layouts are chosen."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardplan.frontend.trace import trace
from shardplan.graph import Graph, flatten
from shardplan.search.problem.compute_prices import least_compute_s
from shardplan.search.problem.windows import windows_of
from tests.search import steps

DEVICE = steps.cluster("4").device
"""It has no launches, so products of one shape take the same time."""


def chain(x: Any, ws: Any) -> Any:
    for w in ws:
        x = x @ w
    return x


def graph_of(step: Any, *args: Any) -> tuple[Graph, float]:
    """A step's graph, and the seconds of its compute on one of four devices."""
    graph = flatten(trace(step, *args).program)
    return graph, sum(least_compute_s(n.costed, DEVICE, 4) * n.weight for n in graph.nodes)


def test_a_weight_hides_behind_what_comes_before_its_reader_and_an_activation_behind_nothing() -> None:
    graph, step_s = graph_of(chain, steps.array(64, 64), [steps.array(64, 64)] * 61)
    found = windows_of(graph, DEVICE, 4)
    for k in range(61):
        before = k / 61  # of the step; from a half on, the window has no limit of its own
        expected = 0.0 if k == 0 else math.inf if before >= 1 / 2 else step_s * 2.0 ** round(math.log2(before))
        assert found.operands[k, 1].seconds == pytest.approx(expected), k
        assert found.operands[k, 0].seconds == found.results[k, 0].seconds == 0.0


def test_a_window_of_less_than_a_thousandth_of_the_step_is_none() -> None:
    graph, step_s = graph_of(chain, steps.array(64, 64), [steps.array(64, 64), steps.array(64, 1 << 18)])
    assert 0 < least_compute_s(graph.nodes[0].costed, DEVICE, 4) < step_s / 1024
    assert windows_of(graph, DEVICE, 4).operands[1, 1].seconds == 0.0


def test_a_gradient_is_reduced_beside_the_rest_of_the_backward_pass() -> None:
    def training(ws: Any, x: Any) -> Any:
        gradients = jax.grad(lambda ws: (chain(x, ws) ** 2).sum())(ws)
        return [w - 0.1 * g for w, g in zip(ws, gradients, strict=True)]

    layers, n = 6, 1024
    graph, step_s = graph_of(training, [steps.array(n, n)] * layers, steps.array(n, n))
    found = windows_of(graph, DEVICE, 4)
    products = [n.id for n in graph.nodes if n.signature.contracts]
    forward, backward = products[:layers], products[layers:]
    read = {t for n in graph.nodes if n.signature.contracts for t in n.inputs}
    of_weights = [n for n in backward if graph.nodes[n].outputs[0] not in read]
    assert len(of_weights) == layers
    assert all(found.results[n, 0].seconds == 0.0 for n in forward)
    of_activations = [n for n in backward if n not in of_weights]
    left = [found.results[n, 0].seconds / step_s for n in of_weights]
    assert math.isinf(left[0])  # over half of the step comes later
    assert left == sorted(left, reverse=True)
    assert 0 < left[-1] < 1 / 32  # only updates are left
    beside = 1 / len(products)  # the gradient of an activation is reduced beside one product, that of the weight
    assert all(beside / 2 < found.results[n, 0].seconds / step_s < 2 * beside for n in of_activations)


@pytest.mark.parametrize("length", [24, 96, 5000])
def test_inside_a_loop_a_window_is_that_of_one_iteration(length: int) -> None:
    def step(x: Any, ws: Any) -> Any:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w[0]) @ w[1], None), x, ws)[0]

    graph, step_s = graph_of(step, steps.array(256, 256), steps.array(length, 2, 256, 256))
    found = windows_of(graph, DEVICE, 4)
    last = max(n.id for n in graph.nodes if n.signature.contracts)
    iteration_s = step_s / length
    assert 0.25 * iteration_s < found.operands[last, 1].seconds < math.sqrt(2) * iteration_s
    assert all(window.seconds < math.sqrt(2) * iteration_s for window in found.operands.values())


def test_weights_and_gradients_have_company_and_activations_none() -> None:
    """All weights may be gathered together, and all gradients reduced together; an activation waits for nothing else."""

    def training(ws: Any, x: Any) -> Any:
        gradients = jax.grad(lambda ws: (chain(x, ws) ** 2).sum())(ws)
        return [w - 0.1 * g for w, g in zip(ws, gradients, strict=True)]

    layers, n = 3, 64
    graph, _ = graph_of(training, [steps.array(n, n)] * layers, steps.array(n, n))
    found = windows_of(graph, DEVICE, 4)
    products = [node for node in graph.nodes if node.signature.contracts]
    whole, weights = n * n * 4, set(graph.inputs[:layers])
    early = {found.operands[p.id, i].company for p in products for i, t in enumerate(p.inputs) if t in weights}
    assert early == {whole * (layers + 1)}  # with the batch
    read = {t for p in products for t in p.inputs}
    gradients = [p.id for p in products if p.outputs[0] not in read]
    assert {found.results[g, 0].company for g in gradients[-layers:]} == {whole * layers}
    between = [p.id for p in products[1 : layers - 1]]
    assert {found.results[p, 0].company for p in between} == {0.0}
