"""What XLA's partitioner infers, priced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan import _jax
from shardplan.emit.inference import inferred_layouts
from shardplan.ir import Layout
from shardplan.planning.partitioned import partitioned
from shardplan.planning.scheduled import scheduled
from shardplan.report.score_text import score_text


def step(w: jax.Array, x: jax.Array) -> jax.Array:
    """One layer."""
    return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)


def chain(w: jax.Array, x: jax.Array) -> jax.Array:
    """Two layers, whose hidden values share no layout."""
    return jnp.tanh(jnp.tanh(x @ w) @ w)


ARGUMENTS = jax.ShapeDtypeStruct((256, 256), "float32"), jax.ShapeDtypeStruct((1024, 256), "float32")
BOTH = ("node", "gpu")


@pytest.fixture(scope="module")
def plan() -> shardplan.Plan:
    """Both arguments split along their first dim."""
    return shardplan.plan(step, *ARGUMENTS, cluster="2x4", pins={"*": P(BOTH)}, factors={})


def test_products_of_a_split_batch_are_split_along_the_batch(plan: shardplan.Plan) -> None:
    layouts = inferred_layouts(plan.planned, plan.traced, plan.flat_in_specs)
    made = {node.op.primitive: node.outputs[0] for node in plan.graph.nodes}
    assert layouts[made["tanh"]] == Layout(((0, 1), ()))
    assert layouts[made["sub"]] == Layout(((0, 1), ()))


def test_a_step_is_priced_with_the_layouts_that_it_is_given(plan: shardplan.Plan) -> None:
    """The weight is gathered, its gradient reduced and scattered."""
    layouts = inferred_layouts(plan.planned, plan.traced, plan.flat_in_specs)
    found, share = partitioned(plan.session, layouts)
    assert share == 1
    run = scheduled(found)
    weight = 256 * 256 * 4
    assert sorted(i.step.kind for i in run.issued) == ["all-gather", "reduce-scatter"]
    assert run.communication_bytes == pytest.approx(2 * weight * 7 / 8)
    whole = {t: Layout.whole(len(layout.dims)) for t, layout in layouts.items()}
    other = scheduled(partitioned(plan.session, whole)[0])
    assert other.communication_bytes > run.communication_bytes


def test_loops_are_inferred_with_their_bodies_and_calls() -> None:
    """A scan's body is a function that is called, and hands weights on unchanged."""

    def looped(w: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ w), None

        return jnp.sum(jax.lax.scan(layer, x, w)[0])

    shapes = jax.ShapeDtypeStruct((3, 64, 64), "float32"), jax.ShapeDtypeStruct((512, 64), "float32")
    plan = shardplan.plan(looped, *shapes, cluster="2x4", pins={"w": P(), "x": P(BOTH)}, factors={})
    layouts = inferred_layouts(plan.planned, plan.traced, plan.flat_in_specs)
    made = {node.op.primitive: node.outputs[0] for node in plan.graph.nodes}
    assert layouts[made["dot_general"]] == layouts[made["tanh"]] == Layout(((0, 1), ()))


def test_what_a_loop_stacks_and_slices_lies_as_in_the_loop() -> None:
    """XLA does so in ops of its own, which stand for none of the step: the saved activations, and the weights of a layer."""

    def looped(w: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ w), None

        return w - jax.grad(lambda w: jnp.sum(jax.lax.scan(layer, x, w)[0]))(w)

    shapes = jax.ShapeDtypeStruct((3, 64, 64), "float32"), jax.ShapeDtypeStruct((512, 64), "float32")
    plan = shardplan.plan(looped, *shapes, cluster="2x4", pins={"w": P(None, "gpu"), "x": P(BOTH)}, factors={})
    layouts = inferred_layouts(plan.planned, plan.traced, plan.flat_in_specs)
    lifts = {link.lift for link in plan.graph.links}
    assert {1, -1} <= lifts
    assert all(t in layouts for link in plan.graph.links for t in (link.source, link.target))
    stacks = {layouts[t] for t, x in enumerate(plan.graph.tensors) if x.shape == (3, 512, 64)}
    weights = {layouts[t] for t, x in enumerate(plan.graph.tensors) if x.shape == (3, 64, 64)}
    assert stacks == {Layout(((), (0, 1), ()))}
    assert weights == {Layout(((), (1,), ()))}


def test_a_jax_without_the_passes_is_told(plan: shardplan.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardplan._jax.shardy._PASSES", "no-such-pass")
    with pytest.raises(_jax.UnknownShardyError):
        inferred_layouts(plan.planned, plan.traced, plan.flat_in_specs)
    found = shardplan.score(step, *ARGUMENTS, cluster="2x4", in_shardings=P(BOTH))
    assert not found.inferred
    assert found.step_time_s == found.best_s


def test_a_program_that_the_passes_refuse_is_told(plan: shardplan.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardplan._jax.shardy._sharding", lambda *_: "#sdy.sharding<[")
    with pytest.raises(_jax.UnknownShardyError, match="Unable to parse attribute"):
        inferred_layouts(plan.planned, plan.traced, plan.flat_in_specs)


def test_an_error_of_shardplans_own_is_not_taken_for_one_of_jax(plan: shardplan.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prices would change without a word of what is wrong."""

    def wrong(*_: object) -> None:
        raise TypeError("a slip")

    monkeypatch.setattr("shardplan._jax.shardy._inline", wrong)
    with pytest.raises(TypeError, match="a slip"):
        inferred_layouts(plan.planned, plan.traced, plan.flat_in_specs)


def test_a_product_that_is_not_found_is_told(plan: shardplan.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the locations of ops are lost, nothing is inferred."""
    monkeypatch.setattr("shardplan._jax.shardy._results", lambda *_: [])
    with pytest.raises(_jax.UnknownShardyError, match=r"2 of 2 products are not found, such as that at .*test_partitioned\.py"):
        inferred_layouts(plan.planned, plan.traced, plan.flat_in_specs)


def test_the_share_that_is_inferred_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(planned: Any, *rest: Any) -> dict[int, Layout]:
        first = next(node for node in planned.graph.nodes if node.signature.contracts)
        return {t: layout for t, layout in inferred_layouts(planned, *rest).items() if t in first.outputs}

    def apart(planned: Any, *rest: Any) -> dict[int, Layout]:
        """Another layout for the result of an elementwise op than for its operand."""
        elementwise = next(node for node in planned.graph.nodes if node.signature.elementwise)
        return {**inferred_layouts(planned, *rest), elementwise.outputs[0]: Layout(((), (1,)))}

    def found() -> shardplan.Score:
        return shardplan.score(chain, *ARGUMENTS, cluster="2x4", in_shardings=P(BOTH))

    whole = found()
    assert whole.inferred_share == 1
    monkeypatch.setattr("shardplan.shell.score.inferred_layouts", product)
    part = found()
    assert part.inferred
    assert 0 < part.inferred_share < 1
    assert "% of their bytes; the rest have the best layouts" in score_text(part, title="a")
    monkeypatch.setattr("shardplan.shell.score.inferred_layouts", apart)
    other = found()
    assert other.inferred_share == 1
    assert other.communication_bytes > whole.communication_bytes
    monkeypatch.setattr("shardplan.shell.score.inferred_layouts", lambda *_: {})
    assert (found().inferred, found().inferred_share) == (False, 0)


def test_the_results_of_a_kernel_are_inferred_from_its_formula() -> None:
    """JAX lowers the kernel for devices alone."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")

    heads = jax.ShapeDtypeStruct((16, 128, 4, 64), "bfloat16")
    with _jax.cudnn_assumed():
        plan = shardplan.plan(attend, heads, heads, heads, cluster="2x4", pins={"*": P("node", None, "gpu")}, factors={})
        layouts = inferred_layouts(plan.planned, plan.traced, plan.flat_in_specs)
    (kernel,) = [node for node in plan.graph.nodes if node.signature.attends]
    assert layouts[kernel.outputs[0]] == Layout(((0,), (), (1,), ()))


def test_ops_between_values_of_unknown_layout_are_cut_like_their_neighbours() -> None:
    """XLA makes one transposition of two, so that nobody says how the value between them lies."""

    def turned(w: jax.Array, x: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            return jnp.sum(jnp.tanh(jnp.transpose(jnp.transpose(jnp.transpose(x @ w, (2, 0, 1)), (2, 0, 1)), (2, 1, 0))))

        return w - 0.1 * jax.grad(loss)(w)

    shapes = jax.ShapeDtypeStruct((256, 256), "float32"), jax.ShapeDtypeStruct((64, 16, 256), "float32")
    score = shardplan.score(turned, *shapes, cluster="2x4", in_shardings=(P(), P(BOTH)))
    weight = 256 * 256 * 4
    assert score.inferred
    assert score.communication_bytes == pytest.approx(2 * weight * 7 / 8)


def test_what_a_step_prints_does_not_hinder_the_inference() -> None:
    def printing(w: jax.Array, x: jax.Array) -> jax.Array:
        jax.debug.print("{}", w[0, 0])
        return step(w, x)

    assert shardplan.score(printing, *ARGUMENTS, cluster="2x4", in_shardings=P(BOTH)).inferred


def test_a_step_that_is_lowered_for_devices_alone_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def called(w: jax.Array, x: jax.Array) -> jax.Array:
        return step(jax.pure_callback(lambda w: w, w, w), x)

    assert not shardplan.score(called, *ARGUMENTS, cluster="2x4", in_shardings=P(BOTH)).inferred
    assert "require devices to be present" in caplog.text


def test_a_constraint_is_inferred_as_it_is_written() -> None:
    """The loop carries a value split along its batch, although the weights suggest its features."""
    mesh = AbstractMesh((2, 4), BOTH, axis_types=(AxisType.Auto,) * 2)

    def layers(w: jax.Array, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jax.lax.with_sharding_constraint(jnp.tanh(h @ w), NamedSharding(mesh, P(BOTH))), None

        return jax.lax.scan(layer, x, w)[0]

    arguments = jax.ShapeDtypeStruct((3, 256, 256), "float32"), jax.ShapeDtypeStruct((1024, 256), "float32")
    plan = shardplan.plan(layers, *arguments, cluster="2x4", pins={"w": P(None, None, BOTH), "x": P(BOTH)}, factors={})
    layouts = inferred_layouts(plan.planned, plan.traced, plan.flat_in_specs)
    (placed,) = plan.graph.placed.values()
    assert layouts[placed.outputs[0]] == Layout(((0, 1), ()))
