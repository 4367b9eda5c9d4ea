"""The cuts of a whole function are those along which all its ops agree."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from shardplan.frontend.trace import trace
from shardplan.graph import flatten
from shardplan.graph.function_cuts import FunctionCut, dependencies, function_cuts
from shardplan.tdl.cut_proof import same_everywhere


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def cuts_of(function: Any, *args: Any) -> list[tuple[Any, ...]]:
    """(dims of the arguments, dims of the results) of every cut."""
    graph = flatten(trace(function, *args).program)
    return [(cut.arguments, cut.results) for cut in function_cuts(graph, same_everywhere)]


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k)), v)


def causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    place = jnp.arange(q.shape[1])
    scores = jnp.where(place[:, None] >= place[None], jnp.einsum("bqd,bkd->bqk", q, k), -1e9)
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v)


THREE = [array(4, 6, 8)] * 3


def test_attention_is_cut_along_batch_queries_and_features_of_values() -> None:
    assert cuts_of(attention, *THREE) == [((0, 0, 0), (0,)), ((1, None, None), (1,)), ((None, None, 2), (2,))]


def test_what_depends_on_the_place_in_the_whole_stays_whole() -> None:
    assert cuts_of(causal, *THREE) == [((0, 0, 0), (0,)), ((None, None, 2), (2,))]


def test_gradients_of_what_every_share_reads_are_terms_of_a_sum() -> None:
    backward = cuts_of(lambda q, k, v, g: jax.vjp(attention, q, k, v)[1](g), *THREE, THREE[0])
    assert backward == [
        ((0, 0, 0, 0), (0, 0, 0)),
        ((1, None, None, 1), (1, "sum", "sum")),
        ((None, None, 2, 2), ("sum", "sum", 2)),
    ]


def test_a_sum_that_is_read_by_anything_that_is_not_linear_stays_whole() -> None:
    product = lambda a, b: a @ b  # noqa: E731
    assert ((1, 0), ("sum",)) in cuts_of(product, array(4, 6), array(6, 8))
    scaled = lambda a, b: 2.0 * (a @ b).T  # noqa: E731
    assert ((1, 0), ("sum",)) in cuts_of(scaled, array(4, 6), array(6, 8))
    bounded = lambda a, b: jnp.tanh(a @ b)  # noqa: E731
    assert cuts_of(bounded, array(4, 6), array(6, 8)) == [((0, None), (0,)), ((None, 1), (1,))]


def test_a_maximum_is_no_sum() -> None:
    assert cuts_of(lambda x: x.max(0), array(4, 6)) == [((1,), (0,))]


def test_neighbours_merged_dims_and_closed_over_arrays_keep_a_dim_whole() -> None:
    assert cuts_of(lambda x: x[1:] - x[:-1], array(7, 4)) == [((1,), (1,))]
    assert cuts_of(lambda x: jax.nn.softmax(x.reshape(4, 2, 4)), array(4, 8)) == [((0,), (0,))]
    weights = jnp.ones((6, 4))
    assert cuts_of(lambda x: x * weights, array(6, 4)) == []


def test_loops_are_cut_along_what_their_iterations_share() -> None:
    def recurrent(w: jax.Array, x: jax.Array) -> Any:
        return jax.lax.scan(lambda c, row: (jnp.tanh(c @ w + row), c), jnp.zeros(x.shape[1:]), x)

    assert cuts_of(recurrent, array(8, 8), array(6, 4, 8)) == [((None, 1), (0, 1))]


def test_each_result_depends_on_the_arguments_that_reach_it() -> None:
    def step(a: jax.Array, b: jax.Array, c: jax.Array) -> Any:
        return a + b, jax.lax.scan(lambda s, x: (s + x, s), c[0], b)[0], c * 2.0

    graph = flatten(trace(step, array(4, 2), array(4, 2), array(4, 2)).program)
    assert dependencies(graph) == [frozenset({0, 1}), frozenset({1, 2}), frozenset({2})]


def test_a_cut_has_one_extent() -> None:
    cuts = function_cuts(flatten(trace(lambda a, b: a @ b, array(4, 6), array(6, 8)).program), same_everywhere)
    assert cuts[1] == FunctionCut(6, (1, 0), ("sum",))
