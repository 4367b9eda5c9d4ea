"""The cuts of a whole function are those along which all its ops agree."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardplan.frontend.trace import trace
from shardplan.graph import flatten
from shardplan.graph.function_cuts import FunctionCut, dependencies
from shardplan.shell.registering import _cuts_of


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def cuts_of(function: Any, *args: Any) -> list[tuple[Any, ...]]:
    """(dims of the arguments, dims of the results) of every cut."""
    return [(cut.arguments, cut.results) for cut in _cuts_of(function, jax.tree.structure(args), args)[1]]


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
    assert cuts_of(lambda x: jax.nn.softmax(x.reshape(-1, 2, 4)), array(4, 8)) == [((0,), (0,))]
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
    args = array(4, 6), array(6, 8)
    _, cuts = _cuts_of(lambda a, b: a @ b, jax.tree.structure(args), args)
    assert cuts[1] == FunctionCut(6, (1, 0), ("sum",))


def group_norm(x: jax.Array) -> jax.Array:
    groups = max(1, x.shape[1] // 4)
    parts = x.reshape(x.shape[0], groups, -1)
    return (parts - parts.sum(-1, keepdims=True)).reshape(x.shape)


def test_what_counts_its_own_elements_stays_whole() -> None:
    """On a share it would count those of the share."""
    assert cuts_of(lambda x: x.mean(0), array(8, 6)) == [((1,), (0,))]
    assert cuts_of(lambda x: x / x.shape[0], array(8, 6)) == [((1,), (1,))]
    assert cuts_of(lambda x: x * np.float32(x.shape[1]), array(8, 6)) == [((0,), (0,))]
    assert cuts_of(lambda x, w: jnp.mean((x @ w) ** 2), array(4, 6), array(6, 8)) == []
    assert cuts_of(lambda x: x ** x.shape[0], array(3, 6)) == [((1,), (1,))]
    assert cuts_of(lambda x: x * jnp.asarray(np.arange(x.shape[1]))[-1], array(8, 6)) == [((0,), (0,))]


def test_a_dim_is_cut_into_any_number_of_shares_or_none() -> None:
    assert cuts_of(group_norm, array(4, 8)) == [((0,), (0,))]


def test_no_branch_makes_a_term_that_another_makes_whole() -> None:
    def step(p: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.cond(p, lambda y: y.sum(0), lambda y: jnp.ones(y.shape[1:]), x)

    assert ((None, 0), ("sum",)) not in cuts_of(step, jax.ShapeDtypeStruct((), jnp.bool_), array(4, 6))
