"""Steps as graphs of operators: which ops they hold, how their loops are marked, and what passes between them."""

from __future__ import annotations

import jax
import pytest

from shardplan.errors import PlacementError
from shardplan.frontend.nnx_state import trace_step
from shardplan.graph import flatten
from shardplan.placement.grouping import operator_graph
from shardplan.placement.operators import BACKWARD, FORWARD, UPDATE
from tests.placement.problems import operators


def _loops(model: str, **options: object) -> dict[str, list[tuple[int, str]]]:
    return {o.name: [(x.extent, x.kind) for x in o.loops] for o in operators(model, **options).operators}


def test_the_loops_of_a_dense_layer_are_its_samples_and_parameters() -> None:
    assert _loops("mlp", layers=2) == {"layer_0/kernel": [(64, "S"), (64, "P")], "layer_1/kernel": [(64, "S"), (16, "P")]}


@pytest.mark.slow
def test_a_convolution_is_cut_over_places_too() -> None:
    """FlexFlow, Table 2: a 2D convolution has the attributes height and width, and its channels are parameters."""
    assert _loops("wresnet")["stem/kernel"] == [(16, "S"), (8, "A"), (8, "A"), (64, "P")]


def test_attention_is_cut_over_heads_as_attributes() -> None:
    (scores, _) = (loops for name, loops in _loops("gpt").items() if name.startswith("dot_general"))
    assert scores == [(16, "S"), (8, "A"), (32, "A"), (32, "A")]


@pytest.mark.parametrize(("model", "options"), [("mlp", {}), ("gpt", {}), ("rnn", {}), ("wresnet", {})])
def test_every_product_of_the_backward_pass_is_with_its_twin(model: str, options: dict[str, object]) -> None:
    """A product has one gradient for each operand that needs one: two, and one for the first layer, which reads data."""
    graph = operators(model, **options)
    products = [[sum(w.signature.multiplies for w in works) for works in o.works] for o in graph.operators]
    backward = [p[BACKWARD] for p in products if p[FORWARD]]
    assert all(p[FORWARD] == 1 for p in products if p[FORWARD])
    assert set(backward) <= {1, 2}
    assert backward.count(1) <= 2  # the first layer, and the first step of a recurrence, whose state needs no gradient
    assert all(p[BACKWARD] == 0 for p in products if not p[FORWARD])


@pytest.mark.parametrize("model", ["mlp", "gpt", "rnn", "wresnet"])
def test_each_weight_is_updated_by_its_first_reader(model: str) -> None:
    graph = operators(model)
    owners = {w.users[0] for w in graph.weights}
    assert owners == {i for i, o in enumerate(graph.operators) if o.works[UPDATE]}
    assert all(w.users == tuple(sorted(w.users)) for w in graph.weights)


def test_the_steps_of_a_recurrence_share_their_weights() -> None:
    users = {w.path.rpartition("params/")[2]: len(w.users) for w in operators("rnn").weights}
    assert users["layer_0/recurrent"] == users["layer_0/input"] == 3


def test_a_scan_is_one_operator_that_is_cut_over_samples() -> None:
    graph = operators("rnn", layers=2, steps=20, scan=True)
    (scan,) = [o for o in graph.operators if [x.name for x in o.loops] == ["sample"]]
    assert [(x.extent, x.kind) for x in scan.loops] == [(16, "S")]
    at = graph.operators.index(scan)
    assert any(e.consumer == at for e in graph.edges)
    assert any(e.producer == at for e in graph.edges)
    assert sum(w.signature.multiplies for w in scan.works[BACKWARD]) == 8  # two gradients of each of four products


def test_gradients_go_back_along_every_differentiated_tensor() -> None:
    graph = operators("gpt")
    floats = [e for e in graph.edges if e.itemsize == 4]
    assert floats
    assert all(e.gradient for e in floats)


def test_a_step_without_gradients_reduces_nothing() -> None:
    def predict(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        return jax.numpy.tanh(batch @ params["in"]) @ params["out"]

    shapes = {"in": (16, 32), "out": (32, 8)}, (64, 16)
    args = ({k: jax.ShapeDtypeStruct(s, "float32") for k, s in shapes[0].items()}, jax.ShapeDtypeStruct(shapes[1], "float32"))
    program = trace_step(predict, args).program
    graph = operator_graph(flatten(program), program)
    assert [[x.kind for x in o.loops] for o in graph.operators] == [["S", "P"], ["S", "P"]]
    assert graph.names == ("in", "out")
    assert not graph.weights
    assert not any(e.gradient for e in graph.edges)


def test_a_step_that_only_reads_arguments_has_nothing_to_place() -> None:
    program = trace_step(lambda x: x + 1, (jax.ShapeDtypeStruct((8,), "float32"),)).program
    with pytest.raises(
        PlacementError, match="has no operator to place: nothing that depends on its arguments is multiplied or reduced"
    ):
        operator_graph(flatten(program), program)
