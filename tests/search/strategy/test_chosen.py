"""What may be chosen is chosen: for each means of the search a small step in which it is right, and a twin in which it is not.

Four devices on one switch, slow beside their arithmetic and without launch times, so that a few sizes decide. Twins are the same
step on other sizes, or the same sizes in a step that differs in one op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.mesh import Cluster

Weights = dict[str, jax.Array]
Loss = Callable[[Any, Any], jax.Array]


def _planned(step: Callable[..., Any], *args: Any, shape: str = "4", pins: Mapping[str, P] | None = None) -> shardplan.Plan:
    base = Cluster.load(shape)
    levels = tuple(
        replace(level, bandwidth_bytes_per_s=1e10, latency_s=1e-9, rails=1, ring_efficiency=1.0, tree_efficiency=1.0)
        for level in base.levels
    )
    device = replace(
        base.device,
        flops_per_s={"float32": 1e14},
        flops_efficiency=1.0,
        memory_bytes_per_s=1e12,
        memory_efficiency=1.0,
        memory_bytes=2**40,
        launch_s=0.0,
        collective_launch_s=0.0,
    )
    round_numbers = replace(base, name="round", levels=levels, device=device)
    plan = shardplan.plan(step, *args, cluster=round_numbers, pins=pins, factors={}, time_model="sum")
    assert plan.exact
    return plan


def _like(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _descent(loss: Loss) -> Callable[..., Any]:
    def step(weights: Weights, batch: Any) -> tuple[Weights, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(weights, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    return step


def _layouts(plan: shardplan.Plan, *shape: int) -> list[tuple[tuple[int, ...], ...]]:
    """For each value of this shape that has a layout, the factors that split each dim."""
    tensors = plan.session.problem.graph.tensors
    found = [x.dims for t, x in zip(tensors, plan.session.decisions.layouts, strict=True) if x is not None and t.shape == shape]
    assert found
    return found


def _kinds(plan: shardplan.Plan, *, least: float = 64) -> list[str]:
    """Kinds of the collectives of at least so many bytes, each as often as it runs."""
    return sorted(c.kind for c in plan.collectives for _ in range(round(c.times)) if c.bytes >= least)


# -- replication -------------------------------------------------------------------------------------------------------


def _behind_a_filter(w: Weights, x: Mapping[str, jax.Array]) -> jax.Array:
    return jnp.sum((jnp.tanh(x["x"] @ x["filter"]) @ w["out"]) ** 2)


def test_a_small_matrix_lies_on_every_device_and_a_large_one_does_not() -> None:
    def plan(rows: int, width: int) -> shardplan.Plan:
        args = {"out": _like(width, 8)}, {"x": _like(rows, 64), "filter": _like(64, width)}
        return _planned(_descent(_behind_a_filter), *args)

    small, large = plan(65536, 64), plan(64, 8192)
    assert small.specs_by_path["batch/filter"] == P()
    assert small.specs_by_path["batch/x"] == P("gpu")
    assert large.specs_by_path["batch/filter"] == P(None, "gpu")
    assert large.specs_by_path["batch/x"] == P()


# -- optimizer state ---------------------------------------------------------------------------------------------------


def _adam(state: Weights, x: jax.Array) -> tuple[Weights, jax.Array]:
    """The matrix is read twice, once transposed, so that a copy of it gathered when it is read would be gathered twice."""
    value, g = jax.value_and_grad(lambda w: jnp.sum((jnp.tanh(x @ w) @ w.T) ** 2))(state["w"])
    m = 0.9 * state["m"] + 0.1 * g
    s = 0.9 * state["s"] + 0.1 * g * g
    return {"w": state["w"] - 0.1 * m / (jnp.sqrt(s) + 1e-8), "m": m, "s": s}, value


def test_optimizer_state_is_split_where_its_parameter_is_not() -> None:
    apart = _planned(_adam, {k: _like(512, 512) for k in "wms"}, _like(262_144, 512)).specs_by_path
    assert apart["state/w"] == P()
    assert "gpu" in tuple(apart["state/m"])
    assert apart["state/m"] == apart["state/s"]


def test_optimizer_state_lies_as_its_parameter_where_that_is_split() -> None:
    together = _planned(_adam, {k: _like(8192, 8192) for k in "wms"}, _like(64, 8192)).specs_by_path
    assert "gpu" in tuple(together["state/w"])
    assert together["state/m"] == together["state/s"] == together["state/w"]


# -- sequence ----------------------------------------------------------------------------------------------------------


def _attention(w: Weights, x: jax.Array) -> jax.Array:
    q, k, v = (x @ w[name] for name in "qkv")
    scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k) / 8)
    return jnp.sum((jnp.einsum("bts,bsd->btd", scores, v) + x) ** 2)


def test_one_long_sequence_is_split_and_of_several_each_stays_whole() -> None:
    def plan(batch: int, length: int) -> shardplan.Plan:
        return _planned(_descent(_attention), {k: _like(128, 128) for k in "qkv"}, _like(batch, length, 128))

    # scores [batch, of, to]
    assert set(_layouts(plan(1, 8192), 1, 8192, 8192)) == {((), (0,), ())}
    assert set(_layouts(plan(8, 1024), 8, 1024, 1024)) == {((0,), (), ())}


# -- experts -----------------------------------------------------------------------------------------------------------


def _experts(w: Weights, x: jax.Array) -> jax.Array:
    chosen = jax.nn.one_hot(jnp.argmax(x @ w["router"], -1), 8)
    return jnp.sum(jnp.einsum("etd,edf->etf", jnp.einsum("td,te->etd", x, chosen), w["up"]) ** 2)


def test_large_experts_are_spread_and_small_ones_are_not() -> None:
    def plan(tokens: int, width: int, inner: int) -> shardplan.Plan:
        return _planned(_descent(_experts), {"router": _like(width, 8), "up": _like(8, width, inner)}, _like(tokens, width))

    large, small = plan(256, 256, 8192), plan(65536, 64, 64)
    assert large.specs_by_path["weights/up"] == P("gpu")
    assert set(_layouts(large, 8, 256, 8192)) == {((0,), (), ())}, "each device runs its experts alone"
    assert set(_layouts(small, 8, 65536, 64)) == {((), (0,), ())}, "each device runs all experts on its tokens"


# -- vocabulary --------------------------------------------------------------------------------------------------------


def _language(w: Weights, tokens: jax.Array) -> jax.Array:
    return jnp.mean(jax.nn.logsumexp(w["table"][tokens] @ w["head"], -1))


def _language_plan(vocabulary: int, tokens: int, shape: str = "4") -> shardplan.Plan:
    weights = {"table": _like(vocabulary, 256), "head": _like(256, vocabulary)}
    return _planned(_descent(_language), weights, _like(tokens, dtype=jnp.int32), shape=shape)


def test_a_large_vocabulary_is_split_and_a_small_one_is_not() -> None:
    assert _language_plan(32768, 2048).specs_by_path["weights/head"] == P(None, "gpu")
    assert set(_layouts(_language_plan(32768, 2048), 2048, 32768)) == {((), (0,))}
    assert set(_layouts(_language_plan(512, 65536), 65536, 512)) == {((0,), ())}


# -- padding -----------------------------------------------------------------------------------------------------------


def test_a_vocabulary_that_does_not_divide_is_padded_inside_the_step() -> None:
    odd, even = _language_plan(50257, 2048, "8"), _language_plan(50304, 2048, "8")
    assert set(_layouts(odd, 2048, 50257)) == {((), (0,))}
    assert odd.specs_by_path["weights/head"] == P("gpu"), "an argument is stored along what divides"
    assert set(_layouts(even, 2048, 50304)) == {((), (0,))}
    assert even.specs_by_path["weights/head"] == P(None, "gpu"), "what divides needs no other layout in store"
    assert odd.compute_s > even.compute_s * (50257 / 50304), "the padding is paid for"


def test_a_dim_that_would_be_mostly_padding_is_left_whole() -> None:
    """Over eight devices 4001 columns are padded to 4008; nine would be sixteen."""

    def plan(columns: int) -> shardplan.Plan:
        return _planned(lambda x, w: jnp.sum(jnp.tanh(x @ w)), _like(3, 65536), _like(65536, columns), shape="8")

    assert set(_layouts(plan(4001), 3, 4001)) == {((), (0,))}
    assert set(_layouts(plan(9), 3, 9)) == {((), ())}


# -- halo --------------------------------------------------------------------------------------------------------------


def _filtered(w: Weights, x: jax.Array) -> jax.Array:
    y = jax.lax.conv_general_dilated(x, w["f"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jnp.sum(jnp.tanh(y) ** 2)


def test_one_large_image_is_split_with_a_halo_and_several_are_not() -> None:
    def plan(images: int, side: int) -> shardplan.Plan:
        return _planned(_descent(_filtered), {"f": _like(3, 3, 16, 16)}, _like(images, side, side, 16))

    one, several = plan(1, 1024), plan(4, 512)
    assert _kinds(one).count("collective-permute") == 4, "the filter reads across both edges, forward and for its gradient"
    assert set(_layouts(one, 1, 1024, 1024, 16)) in ({((), (0,), (), ())}, {((), (), (0,), ())})
    assert _kinds(several).count("collective-permute") == 0
    assert set(_layouts(several, 4, 512, 512, 16)) == {((0,), (), (), ())}


# -- partial sums ------------------------------------------------------------------------------------------------------


def _partial(plan: shardplan.Plan) -> int:
    """How many values stay partial sums."""
    return sum(x is not None and bool(x.partial) for x in plan.session.decisions.layouts)


def test_two_partial_sums_are_added_before_they_are_reduced_unless_one_is_changed_first() -> None:
    args = _like(512, 65536), _like(65536, 512), _like(65536, 512)
    added = _planned(lambda x, v, w: jnp.sin(3 * (x @ v) + (x @ w)), *args)
    changed = _planned(lambda x, v, w: jnp.sin(x @ v) + jnp.sin(x @ w), *args)
    assert _partial(added) > 0
    assert _kinds(added) == ["reduce-scatter"]
    assert _partial(changed) == 0
    assert _kinds(changed) == ["reduce-scatter", "reduce-scatter"]


def test_a_carry_stays_a_partial_sum_unless_the_body_changes_it() -> None:
    def summed(xs: jax.Array, ys: jax.Array, change: Callable[[jax.Array], jax.Array]) -> jax.Array:
        def body(total: jax.Array, xy: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return change(total) + xy[0].T @ xy[1], None

        return jax.lax.scan(body, jnp.zeros((512, 512)), (xs, ys))[0]

    args = _like(6, 65536, 512), _like(6, 65536, 512)
    kept = _planned(lambda xs, ys: summed(xs, ys, lambda s: 0.5 * s), *args)
    changed = _planned(lambda xs, ys: summed(xs, ys, jnp.tanh), *args)
    assert _partial(kept) > 0
    assert _kinds(kept) == ["reduce-scatter"]
    assert _partial(changed) == 0
    assert _kinds(changed) == ["reduce-scatter"] * 6


# -- reduce-scatter ----------------------------------------------------------------------------------------------------


def test_a_sum_that_is_read_in_parts_is_scattered_and_one_that_is_read_whole_is_not() -> None:
    """Rows can be sorted apart, a matrix is factored as one."""
    args = _like(512, 65536), _like(65536, 512)
    assert _kinds(_planned(lambda x, w: jax.lax.sort(x @ w), *args)) == ["reduce-scatter"]
    assert _kinds(_planned(lambda x, w: jnp.linalg.cholesky(x @ w), *args)) == ["all-reduce"]


# -- copies ------------------------------------------------------------------------------------------------------------


def _read_often(w: Weights, xs: list[jax.Array]) -> jax.Array:
    """One matrix for several inputs, twice for each."""
    return sum((jnp.sum((jnp.tanh(x @ w["a"]) @ w["a"]) ** 2) for x in xs), start=jnp.zeros(()))


def _gathers(rows: list[int], width: int, pins: Mapping[str, P]) -> int:
    """How often the whole matrix is gathered in a step that reads it three times for each of the inputs."""
    args = {"a": _like(width, width)}, [_like(n, width) for n in rows]
    plan = _planned(_descent(_read_often), *args, pins=pins)
    return sum(round(c.times) for c in plan.collectives if c.kind == "all-gather" and c.bytes == 4 * width * width)


@pytest.mark.parametrize("rows", [[65536], [65536, 32768]])
def test_one_gathered_copy_serves_all_readers_of_a_matrix_that_lies_split(rows: list[int]) -> None:
    assert _gathers(rows, 512, {"weights/a": P("gpu")}) == 1


def test_no_copy_is_made_where_the_parts_serve_as_they_are() -> None:
    assert _gathers([64], 8192, {"weights/a": P("gpu")}) == 0
