"""A step whose loop over layers is cut into parts computes the same, and says what cannot be cut."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

import shardplan
from shardplan.errors import PlacementError
from shardplan.frontend.trace import trace
from shardplan.ir import Microbatches
from shardplan.microbatches.layers import in_layer_parts, staged_program
from shardplan.planning.wanted import Wanted
from shardplan.regions.group_plans import GroupPlanner
from shardplan.regions.layer_parts import loop_in, part_in
from shardplan.verify.verify import verify

LAYERS, WIDTH, BATCH = 4, 8, 8
Tree = dict[str, Any]


def weights(layers: int = LAYERS) -> Tree:
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "first": jax.random.normal(keys[0], (WIDTH, WIDTH)) / 3,
        "blocks": {"up": jax.random.normal(keys[1], (layers, WIDTH, WIDTH)) / 3, "scale": jnp.ones((layers,))},
        "last": jax.random.normal(keys[2], (WIDTH, WIDTH)) / 3,
    }


def hidden(blocks: Tree, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, own: Tree) -> tuple[jax.Array, None]:
        return x + own["scale"] * jnp.tanh(x @ own["up"]), None

    return jax.lax.scan(layer, x, blocks)[0]


def loss(w: Tree, x: jax.Array) -> jax.Array:
    return jnp.mean((hidden(w["blocks"], x @ w["first"]) @ w["last"]) ** 2)


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def train_step(state: Tree, x: jax.Array) -> tuple[Tree, jax.Array]:
    value, gradients = jax.value_and_grad(loss)(state["weights"], x)
    updates, moments = OPTIMIZER.update(gradients, state["moments"], state["weights"])
    return {"weights": optax.apply_updates(state["weights"], updates), "moments": moments}, value


def arguments(layers: int = LAYERS) -> tuple[Tree, jax.Array]:
    w = weights(layers)
    return {"weights": w, "moments": OPTIMIZER.init(w)}, jax.random.normal(jax.random.key(1), (BATCH, WIDTH))


def test_weights_and_moments_are_in_parts_and_nothing_else() -> None:
    traced = trace(train_step, *arguments())
    found = in_layer_parts(traced.program, 2)
    assert found is not None
    program, layers = found
    cut = {path for path, own in zip(traced.program.input_paths, layers.inputs, strict=True) if len(own) == 2}
    assert {path.rpartition("/")[2] for path in cut} == {"up", "scale"}
    assert len(cut) == 6, "each with two moments"
    assert [p for p in program.input_paths if p.startswith("state/weights/blocks/up")] == [
        "state/weights/blocks/up[0:2]",
        "state/weights/blocks/up[2:4]",
    ]
    loops = [op for op in program.ops if op.control == "scan"]
    assert [(part_in(op.scope), op.params["length"], op.backward) for op in loops] == [
        (0, 2, False), (1, 2, False), (1, 2, True), (0, 2, True),
    ]  # fmt: skip
    assert all(program.tensors[program.inputs[i]].shape[0] == 2 for own in layers.inputs if len(own) == 2 for i in own)


def test_an_argument_that_an_op_needs_whole_stays_whole() -> None:
    def step(state: Tree, x: jax.Array) -> tuple[Tree, jax.Array]:
        gradients = jax.grad(loss)(state, x)
        after = jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients)
        return after, jnp.sort(state["blocks"]["scale"])  # of all layers together

    traced = trace(step, weights(), jnp.ones((BATCH, WIDTH)))
    found = in_layer_parts(traced.program, 2)
    assert found is not None
    cut = [path for path, own in zip(traced.program.input_paths, found[1].inputs, strict=True) if len(own) == 2]
    assert cut == ["state/blocks/up"]


def test_a_loop_that_takes_no_slices_of_layers_stays_whole() -> None:
    """It reads a mean of each layer, all at once, and runs as often as there are layers."""

    def step(w: Tree, x: jax.Array) -> tuple[Tree, jax.Array]:
        def layer(h: jax.Array, own: Tree) -> tuple[jax.Array, jax.Array]:
            h = h + jnp.tanh(h @ own["up"])
            return h, jnp.mean(h)

        _, means = jax.lax.scan(layer, x, w)
        total = jax.lax.scan(lambda c, _: (c + jnp.cumsum(c)[-1] * means, None), jnp.ones(LAYERS), None, length=LAYERS)[0]
        return {"up": w["up"] * 0.9}, total

    found = in_layer_parts(trace(step, {"up": stacked(LAYERS)["up"]}, jnp.ones((BATCH, WIDTH))).program, 2)
    assert found is not None
    loops = [op for op in found[0].ops if op.control == "scan"]
    assert [(part_in(op.scope), op.params["length"]) for op in loops] == [(0, 2), (1, 2), (None, 4)]


@pytest.mark.parametrize("layers", [1, 4])
def test_a_step_without_a_loop_over_weights_has_no_parts(layers: int) -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=layers)[0]

    assert in_layer_parts(trace(step, jnp.ones((WIDTH, WIDTH)), jnp.ones((BATCH, WIDTH))).program, 2) is None


def test_layers_that_do_not_divide_are_an_error() -> None:
    with pytest.raises(PlacementError, match="a loop over 4 layers does not divide into 3 stages"):
        staged_program(trace(train_step, *arguments()).program, Microbatches(), 3)


def test_chunks_of_a_loop_over_layers_are_an_error() -> None:
    with pytest.raises(PlacementError, match="chunk=2 is not supported for 1 loop over layers"):
        shardplan.plan(train_step, *arguments(), cluster="2", microbatches=2, axes={"stage": 2, "chunk": 2})


def attending(w: Tree, context: jax.Array, x: jax.Array) -> jax.Array:
    """Layers of a decoder, each of which reads what the encoder has made."""

    def layer(x: jax.Array, own: Tree) -> tuple[jax.Array, None]:
        weight = jax.nn.softmax(x @ own["query"] @ context.T)
        return x + own["scale"] * jnp.tanh((x + weight @ context) @ own["up"]), None

    return jax.lax.scan(layer, x, w)[0]


def two_loops(encoder: int, decoder: int) -> tuple[Any, tuple[Tree, Tree]]:
    """A step of an encoder and a decoder with these numbers of layers."""

    def loss(w: Tree, batch: Tree) -> jax.Array:
        context = jax.vmap(lambda x: hidden(w["encoder"], x))(batch["source"])
        made = jax.vmap(lambda c, x: attending(w["decoder"], c, x))(context, batch["target"] @ w["first"])
        return jnp.mean((made @ w["last"]) ** 2)

    def step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(state["weights"], batch)
        updates, moments = OPTIMIZER.update(gradients, state["moments"], state["weights"])
        return {"weights": optax.apply_updates(state["weights"], updates), "moments": moments}, value

    query = jax.random.normal(jax.random.key(5), (decoder, WIDTH, WIDTH)) / 3
    w = {
        "encoder": weights(encoder)["blocks"],
        "decoder": {**weights(decoder)["blocks"], "query": query},
        "first": weights()["first"],
        "last": weights()["last"],
    }
    keys = jax.random.split(jax.random.key(3))
    batch = {name: jax.random.normal(key, (BATCH, 4, WIDTH)) for name, key in zip(("source", "target"), keys, strict=True)}
    return step, ({"weights": w, "moments": OPTIMIZER.init(w)}, batch)


@pytest.mark.slow
@pytest.mark.parametrize(("encoder", "decoder"), [(4, 4), (2, 4), (6, 2)])
def test_stages_hold_layers_of_an_encoder_and_of_a_decoder(encoder: int, decoder: int) -> None:
    step, args = two_loops(encoder, decoder)
    plan: Any = shardplan.plan(step, *args, cluster="4", microbatches=2, axes={"stage": 2})
    assert plan.chunks == (0, 1, 0, 1)
    specs = plan.specs_by_path
    assert {specs[f"state/weights/{part}/up"][0] for part in ("encoder", "decoder")} == {"stage"}
    homes = {path.removeprefix("state/weights/"): group for path, group in plan.group_of.items() if "weights" in path}
    half = decoder // 2
    assert [homes[f"decoder/query[{n}:{n + half}]"] for n in (0, half)] == [0, 1]
    found = verify(plan, step, args)
    assert found.passed, found


def two_models(w: Tree, x: jax.Array) -> Any:
    """Two models are trained, one after the other: the second's loop runs after the backward pass of the first."""
    made = {name: jax.value_and_grad(loss)(w[name], x) for name in ("first", "second")}
    return {name: descended(w[name], gradients) for name, (_, gradients) in made.items()}, [value for value, _ in made.values()]


def distilled(w: Tree, x: jax.Array) -> Any:
    """The second model learns what the first one, which is trained too, makes of the batch."""
    first, gradients = jax.value_and_grad(loss)(w["first"], x)
    wanted = hidden(w["first"]["blocks"], x)
    second, others = jax.value_and_grad(lambda v: jnp.mean((hidden(v["blocks"], x) - wanted) ** 2))(w["second"])
    return {"first": descended(w["first"], gradients), "second": descended(w["second"], others)}, (first, second)


@pytest.mark.slow
@pytest.mark.parametrize(("step", "chunks"), [(two_models, (0, 1, 0, 1)), (distilled, (0, 1, 0, 1, 0, 1))])
def test_a_loop_that_depends_on_no_gradient_is_a_chunk_after_a_backward_pass_too(step: Any, chunks: tuple[int, ...]) -> None:
    args = {"first": weights(), "second": weights()}, jax.random.normal(jax.random.key(1), (BATCH, WIDTH))
    plan: Any = shardplan.plan(step, *args, cluster="4", microbatches=2, axes={"stage": 2})
    assert plan.chunks == chunks
    assert verify(plan, step, args).passed


@pytest.mark.slow
def test_a_loop_over_weights_alone_is_no_chunk() -> None:
    """As a norm of the old weights, layer by layer, that a step reports."""

    def step(w: Tree, x: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(w, x)
        norm = jax.lax.scan(lambda total, up: (total + jnp.sum(up**2), None), 0.0, w["blocks"]["up"])[0]
        return descended(w, gradients), (value, norm)

    args = weights(), jax.random.normal(jax.random.key(1), (BATCH, WIDTH))
    plan: Any = shardplan.plan(step, *args, cluster="4", microbatches=2, axes={"stage": 2})
    assert plan.chunks == (0, 1)
    assert verify(plan, step, args).passed


@pytest.mark.slow
def test_an_opaque_kernel_in_layers_may_run_whole_in_stages() -> None:
    kernel = Primitive("layer_kernel")
    kernel.def_abstract_eval(lambda x: x)
    mlir.register_lowering(kernel, mlir.lower_fun(lambda x: 2 * x, multiple_results=False))

    def step(w: Tree, x: jax.Array) -> Any:
        def layer(x: jax.Array, own: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ own + kernel.bind(jax.lax.stop_gradient(own[0]))), None

        value, gradient = jax.value_and_grad(lambda up: jnp.mean(jax.lax.scan(layer, x, up)[0] ** 2))(w["up"])
        return {"up": w["up"] - 0.1 * gradient}, value

    args = {"up": weights()["blocks"]["up"]}, jax.random.normal(jax.random.key(1), (BATCH, WIDTH))
    plan = shardplan.plan(step, *args, cluster="4", microbatches=2, axes={"stage": 2}, replicate=["layer_kernel"])
    assert verify(plan, step, args).passed


@pytest.mark.slow
def test_a_loop_over_layers_in_the_optimizer_is_no_chunk() -> None:
    """As Muon has it: each layer's gradient is made orthogonal, layer by layer."""

    def orthogonal(g: jax.Array) -> jax.Array:
        g = g / (jnp.linalg.norm(g) + 1e-6)
        return 1.5 * g - 0.5 * g @ g.T @ g

    def step(w: Tree, x: jax.Array) -> tuple[Tree, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(w, x)
        gradients["blocks"]["up"] = jax.lax.map(orthogonal, gradients["blocks"]["up"])
        return descended(w, gradients), value

    args = weights(), jax.random.normal(jax.random.key(1), (BATCH, WIDTH))
    plan: Any = shardplan.plan(step, *args, cluster="4", microbatches=2, axes={"stage": 2})
    assert plan.chunks == (0, 1)
    assert verify(plan, step, args).passed


def test_a_short_loop_beside_a_long_one_stays_whole() -> None:
    step, args = two_loops(2, 16)
    found = in_layer_parts(trace(step, *args).program, 2)
    assert found is not None
    program, layers = found
    assert layers.loops == 1
    lengths = [(loop_in(op.scope), op.params["length"]) for op in program.ops if op.control == "scan" and not op.backward]
    assert lengths == [(None, 2), (0, 8), (0, 8)]


def test_a_pipeline_of_a_loop_over_layers_trains_as_one_device(devices: list[Any]) -> None:
    args = arguments()
    plan: Any = shardplan.plan(
        train_step, *args, cluster="4", microbatches=2, axes={"stage": 2, "fsdp": 2}, donate_argnums=0, memory_limit="8KiB"
    )
    specs = plan.specs_by_path
    up = specs["state/weights/blocks/up"]
    assert (up[0], len(up) > 1) == ("stage", True), "cut over layers and inside of each"
    assert specs["state/moments/1/0/mu/blocks/up"] == up
    assert [plan.group_of[f"state/weights/blocks/up[{n}:{n + 2}]"] for n in (0, 2)] == [0, 1]
    found = verify(plan, train_step, args)
    assert found.passed, found
    one_device = jax.jit(train_step)(*args)[0]["weights"]["blocks"]["up"]
    shardings = plan.in_shardings(plan.mesh(devices[:4]))
    placed = jax.device_put(jax.tree.map(jnp.copy, args), shardings)
    state, _ = plan.jit(train_step, devices=devices[:4])(*placed)
    made = state["weights"]["blocks"]["up"]
    assert made.shape == (LAYERS, WIDTH, WIDTH)
    assert made.sharding.is_equivalent_to(shardings[0]["weights"]["blocks"]["up"], 3)
    assert placed[0]["weights"]["blocks"]["up"].is_deleted(), "its buffers were reused"
    np.testing.assert_allclose(made, one_device, rtol=1e-5, atol=1e-6)


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The plans that are made with the layouts of another group, in the order in which they are made."""
    made: list[Any] = []
    real = GroupPlanner._plan

    def planning(self: GroupPlanner, group: int, wanted: Wanted, *args: Any, **options: Any) -> Any:
        found = real(self, group, wanted, *args, **options)
        made.extend([found] if wanted.pins else [])
        return found

    monkeypatch.setattr(GroupPlanner, "_plan", planning)
    return made


@pytest.mark.parametrize(("layers", "limit"), [(4, "6KiB"), (2, "5KiB")], ids=["two in a stage", "one in a stage"])
def test_groups_that_would_lay_layers_out_differently_lay_them_out_alike(pinned: list[Any], layers: int, limit: str) -> None:
    """The last stage has a wide weight more: within this memory, it alone would cut its layers in another way."""
    wide = {**weights(layers), "last": jnp.ones((WIDTH, 64))}
    state = {"weights": wide, "moments": OPTIMIZER.init(wide)}
    options: dict[str, Any] = {"cluster": "2x4", "microbatches": 2, "axes": {"stage": 2}, "memory_limit": limit}
    plan: Any = shardplan.plan(train_step, state, jnp.ones((BATCH, WIDTH)), **options)
    assert pinned, "the groups do not differ before"
    first, last = ({path.partition("[")[0]: e for path, e in g.entries.items() if "blocks" in path} for g in plan.groups)
    assert first == last
    assert plan.groups[0].factors == plan.groups[1].factors


@pytest.mark.slow
def test_the_group_that_needs_most_says_what_a_step_needs() -> None:
    wide = {**weights(), "last": jnp.ones((WIDTH, 64))}
    state = {"weights": wide, "moments": OPTIMIZER.init(wide)}
    options: dict[str, Any] = {"cluster": "2x4", "microbatches": 2, "axes": {"stage": 2}, "memory_limit": 1000}
    with pytest.raises(shardplan.MemoryLimitError, match=r"arguments take .*weights/last .* or use more devices$"):
        shardplan.plan(train_step, state, jnp.ones((BATCH, WIDTH)), **options)


@pytest.mark.slow
def test_groups_are_planned_again_where_their_schedule_needs_more_than_each_of_them() -> None:
    """Within 5,000 bytes the first plans of the groups fit, but not the schedule, which waits with more values."""
    wide = {**weights(), "last": jnp.ones((WIDTH, 64))}
    state = {"weights": wide, "moments": OPTIMIZER.init(wide)}
    options: dict[str, Any] = {"cluster": "2x4", "microbatches": 2, "axes": {"stage": 2}, "memory_limit": 5000}
    assert shardplan.plan(train_step, state, jnp.ones((BATCH, WIDTH)), **options).peak_bytes <= 5000


def test_a_saved_plan_has_the_same_parts(tmp_path: Any) -> None:
    args = arguments()
    plan: Any = shardplan.plan(train_step, *args, cluster="2", microbatches=2, axes={"stage": 2})
    plan.save(tmp_path / "plan.json")
    again: Any = shardplan.load(tmp_path / "plan.json", train_step, *args)
    assert again.specs_by_path == plan.specs_by_path
    assert again.placed.layers is not None
    assert again.placed.layers == plan.placed.layers


def residual(w: Tree, x: jax.Array) -> jax.Array:
    """Its bias is broadcast over the batch, as people write it."""
    return jax.lax.scan(lambda h, own: (h + jnp.tanh(h @ own["up"]) * own["scale"] + own["bias"], None), x, w)[0]


def descended(w: Any, gradients: Any) -> Any:
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, gradients)


def only_layers(w: Tree, x: jax.Array) -> Any:
    value, gradients = jax.value_and_grad(lambda w: jnp.mean(residual(w, x) ** 2))(w)
    return descended(w, gradients), value


def rates_of_layers(state: tuple[Tree, jax.Array], x: jax.Array) -> Any:
    w, rates = state
    value, gradients = jax.value_and_grad(lambda w: jnp.mean(residual(w, x) ** 2))(w)
    after = {k: w[k] - rates.reshape(-1, *[1] * (w[k].ndim - 1)) * g for k, g in gradients.items()}
    return (after, rates * 0.9), value


def counters_of_layers(state: tuple[Tree, jax.Array], x: jax.Array) -> Any:
    w, value = only_layers(state[0], x)
    return (w, state[1] + 1), value


def an_unused_array(state: tuple[Tree, jax.Array], x: jax.Array) -> Any:
    value, gradients = jax.value_and_grad(lambda s: jnp.mean(residual(s[0], x) ** 2))(state)
    return descended(state, gradients), value


def frozen_layers(state: tuple[Tree, Tree], x: jax.Array) -> Any:
    w, frozen = state
    value, gradients = jax.value_and_grad(lambda w: jnp.mean(residual({**frozen, "bias": w["bias"]}, x) ** 2))(w)
    return (descended(w, gradients), frozen), value


def stacked(layers: int) -> Tree:
    draw = jax.random.normal
    return {
        "up": draw(jax.random.key(0), (layers, WIDTH, WIDTH)) / 3,
        "scale": jnp.full((layers,), 0.5),
        "bias": draw(jax.random.key(1), (layers, WIDTH)),
    }


@pytest.mark.parametrize(
    ("step", "state"),
    [
        (only_layers, stacked(4)),
        pytest.param(rates_of_layers, (stacked(4), jnp.full((4,), 0.1)), marks=pytest.mark.slow),
        pytest.param(counters_of_layers, (stacked(4), jnp.arange(4)), marks=pytest.mark.slow),
        pytest.param(an_unused_array, (stacked(4), jnp.ones((4, 3))), marks=pytest.mark.slow),
        (frozen_layers, ({"bias": stacked(4)["bias"]}, stacked(4))),
    ],
    ids=["layers", "rates", "counters", "unused", "frozen"],
)
def test_every_array_of_layers_lies_in_all_stages(step: Any, state: Any) -> None:
    args = state, jax.random.normal(jax.random.key(2), (BATCH, WIDTH))
    plan: Any = shardplan.plan(step, *args, cluster="2", microbatches=2, axes={"stage": 2}, donate_argnums=0)
    assert sum(path.endswith("[0:2]") for path in plan.group_of) == len(jax.tree.leaves(state))
    assert all(group == path.endswith("[2:4]") for path, group in plan.group_of.items() if path != "x")
    found = verify(plan, step, args, steps=2)
    assert found.passed, found


@pytest.mark.slow
def test_as_many_layers_as_other_dims_are_told_apart() -> None:
    def step(w: Tree, x: jax.Array) -> Any:
        def loss(w: Tree) -> jax.Array:
            return jnp.mean((residual(w["blocks"], x @ w["first"]) @ w["last"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(w)
        return descended(w, gradients), value

    w = {"first": jnp.eye(WIDTH), "blocks": stacked(WIDTH), "last": jnp.eye(WIDTH) / 2}
    args = w, jax.random.normal(jax.random.key(2), (BATCH, WIDTH))
    plan: Any = shardplan.plan(step, *args, cluster="2", microbatches=2, axes={"stage": 2}, donate_argnums=0)
    assert {path.partition("[")[0] for path in plan.group_of if "[" in path} == {"w/blocks/bias", "w/blocks/scale", "w/blocks/up"}
    assert verify(plan, step, args, steps=1).passed


def test_a_loop_from_the_last_layer_to_the_first_is_an_error() -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            return jnp.mean(jax.lax.scan(lambda h, own: (jnp.tanh(h @ own), None), x, w, reverse=True)[0] ** 2)

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * gradient, value

    with pytest.raises(PlacementError, match="runs from the last layer to the first"):
        shardplan.plan(step, stacked(4)["up"], jnp.ones((BATCH, WIDTH)), cluster="2", microbatches=2, axes={"stage": 2})
