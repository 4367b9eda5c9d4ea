"""`shardplan.score` and `shardplan score`: a sharding that the user wrote, priced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from models import gpt, mlp
from shardplan.errors import ClusterError, PinError, ShardplanError
from shardplan.report.score_text import score_text

WIDE = {"width": 1024, "batch": 2048, "inputs": 1024}
BOTH = ("node", "gpu")


def fsdp(tree: Any, axes: Any = BOTH, ways: int = 8) -> Any:
    """FSDP by hand: each array split along its first dim that divides, the batch along its leading one."""

    def spec(x: Any) -> P:
        d = next((i for i, n in enumerate(x.shape) if n % ways == 0), None)
        return P() if d is None else P(*[None] * d, axes)

    return jax.tree.map(spec, tree)


@pytest.fixture(scope="module")
def wide() -> tuple[Any, Any, shardplan.Score]:
    """(step, args, score) of an MLP by FSDP."""
    step, args = mlp.train_step(**WIDE)
    return step, args, shardplan.score(step, *args, cluster="2x4", in_shardings=fsdp(args))


def test_fsdp_of_an_mlp_is_priced_beside_the_plan(wide: Any) -> None:
    step, args, found = wide
    plan = shardplan.plan(step, *args, cluster="2x4")
    baseline = next(b for b in plan.baselines if b.name == "FSDP")
    assert found.plan_s == plan.step_time_s
    assert plan.step_time_s <= found.step_time_s <= baseline.step_time_s * 1.001  # the best with these arguments
    assert found.fits
    assert found.peak_bytes < plan.peak_bytes
    assert found.replicated == ()
    assert found.in_specs["batch/inputs"] == "P(('node', 'gpu'))"
    assert all(a.seconds >= b.seconds > 0 for a, b in zip(found.losses, found.losses[1:], strict=False))
    assert all("mlp.py" in row.source or "losses.py" in row.source or "optax" in row.source for row in found.unasked)


def test_a_plan_that_takes_no_time_is_not_divided_by(wide: Any) -> None:
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    none = shardplan.score(lambda x: x, x, cluster="2x4", in_shardings=P("gpu"))
    assert repr(none) == "<Score: a step takes 0 s, the plan's 0 s; 0 losses, 0 collectives that the plan does not have>"
    more = replace(wide[2], plan_s=0.0, losses=wide[2].losses[:1])
    assert "; 1 loss, " in repr(more)
    assert "and under the plan no time." in score_text(more, title="it")


def test_an_array_that_is_pinned_badly_is_named_first_with_its_line(wide: Any) -> None:
    """The first kernel's output dim over both levels: its activations would have to move, or the kernel be gathered."""
    step, args, before = wide
    bad = fsdp(args)
    bad[0]["params"]["layer_1"]["kernel"] = P("gpu", "node")
    found = shardplan.score(step, *args, cluster="2x4", in_shardings=bad)
    first = found.losses[0]
    assert first.path == "state/params/layer_1/kernel"
    assert first.given == "P('gpu', 'node')"
    assert first.instead != first.given
    assert "mlp.py" in first.source
    assert first.bytes > 0
    assert found.step_time_s > before.step_time_s


def adam_step(w: Any, x: Any) -> Any:
    """Two products, and Adam on both weights."""
    state, own = w["moments"], w["params"]
    grads = jax.grad(lambda p: jnp.mean((nn.relu(x @ p["up"]) @ p["down"]) ** 2))(own)
    updates, state = optax.adam(1e-3).update(grads, state)
    return {"params": optax.apply_updates(own, updates), "moments": state}


def sgd_step(w: Any, x: Any) -> Any:
    """Two products, and gradient descent."""
    grads = jax.grad(lambda w: jnp.mean((nn.relu(x @ w["up"]) @ w["down"]) ** 2))(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads)


def two_products(rows: int, width: int, hidden: int) -> tuple[Any, Any]:
    """The weights and the batch of the steps above."""
    shapes = {"up": (width, hidden), "down": (hidden, width)}
    return {n: jax.ShapeDtypeStruct(s, "float32") for n, s in shapes.items()}, jax.ShapeDtypeStruct((rows, width), "float32")


def test_a_weight_that_is_pinned_badly_with_its_moments_is_named_before_them() -> None:
    weights, x = two_products(16384, 512, 2048)
    args = {"params": weights, "moments": jax.eval_shape(optax.adam(1e-3).init, weights)}, x
    rules = {"*/up": P("gpu", "node"), "*/down": P(BOTH), "x": P(BOTH)}
    first = shardplan.score(adam_step, *args, cluster="2x4", rules=rules, donate_argnums=0).losses[0]
    assert first.path == "w/params/up"
    assert set(first.together) == {"w/params/up", "w/moments/0/mu/up", "w/moments/0/nu/up"}


def test_weights_that_gain_only_together_are_one_loss() -> None:
    """Both weights over all devices, as for tensor parallelism: where only one moves, its products no longer fit together."""
    rules = {"w/up": P(None, BOTH), "w/down": P(BOTH), "x": P()}
    found = shardplan.score(sgd_step, *two_products(2048, 1024, 4096), cluster="2x4", rules=rules, donate_argnums=0)
    (loss,) = found.losses
    assert dict(loss.together) == {"w/up": "P(None, 'gpu')", "w/down": "P('gpu')"}
    moved = {path: eval(spec, {"P": P}) for path, spec in loss.together.items()}
    after = shardplan.score(sgd_step, *two_products(2048, 1024, 4096), cluster="2x4", rules=rules | moved, donate_argnums=0)
    assert loss.seconds == pytest.approx(found.best_s - after.best_s, rel=0.1)


def test_a_batch_by_which_xla_infers_bad_layouts_is_named_with_what_it_costs() -> None:
    """With the best layouts inside, a slice mends it, so that other arguments would gain more."""
    args = two_products(16384, 512, 2048)
    rules = {"w/up": P(None, BOTH), "w/down": P(BOTH), "x": P()}
    found = shardplan.score(sgd_step, *args, cluster="2x4", rules=rules, donate_argnums=0)
    first = found.losses[0]
    assert (first.path, first.instead) == ("x", "P(('node', 'gpu'))")
    after = shardplan.score(sgd_step, *args, cluster="2x4", rules=rules | {"x": P(BOTH)}, donate_argnums=0)
    assert first.seconds == pytest.approx(found.step_time_s - after.step_time_s)
    assert first.seconds > 0.9 * (found.step_time_s - found.best_s)


@pytest.mark.slow
def test_a_gain_is_that_of_the_freed_argument_alone(wide: Any) -> None:
    """Pinning the argument where its loss says makes the step faster by what it says, in the search's prices."""
    step, args, _ = wide
    bad = fsdp(args)
    bad[0]["params"]["layer_1"]["kernel"] = P("gpu", "node")
    before = shardplan.score(step, *args, cluster="2x4", in_shardings=bad)
    loss = before.losses[0]
    bad[0]["params"]["layer_1"]["kernel"] = eval(loss.instead, {"P": P})
    after = shardplan.score(step, *args, cluster="2x4", in_shardings=bad)
    assert after.communication_bytes == pytest.approx(before.communication_bytes - loss.bytes)
    assert not [row for row in after.losses if row.path == loss.path]


@pytest.mark.slow
def test_fsdp_of_a_gpt_names_what_the_plan_does_not_send() -> None:
    step, args = gpt.train_step()
    found = shardplan.score(step, *args, cluster="2x4", in_shardings=fsdp(args))
    assert found.plan_s < found.step_time_s
    gathered = [row for row in found.unasked if row.kind == "all-gather"]
    assert gathered
    assert all(row.bytes > 0 for row in found.unasked)
    assert sum(row.bytes for row in found.unasked) <= found.communication_bytes
    assert any("gpt.py" in row.source for row in gathered)


def test_a_prefix_stands_for_all_below_it() -> None:
    step, args = mlp.train_step()
    state, batch = args
    whole = jax.tree.map(lambda x: P(), state), {"inputs": P("node"), "labels": P("node")}
    assert jax.tree.structure(whole[1]) == jax.tree.structure(batch)
    one = shardplan.score(step, *args, cluster="2x4", in_shardings=(P(), P("node")))
    every = shardplan.score(step, *args, cluster="2x4", in_shardings=whole)
    assert one == every
    nothing = shardplan.score(step, *args, cluster="2x4", in_shardings=(None, P("node")))
    assert nothing.step_time_s == one.step_time_s
    assert len(nothing.replicated) == len(jax.tree.leaves(state))
    assert shardplan.score(step, *args, cluster="2x4", in_shardings=None).communication_bytes == 0


def test_the_first_rule_that_matches_holds() -> None:
    step, args = mlp.train_step()
    found = shardplan.score(
        step, *args, cluster="2x4", rules={"batch/*": P("node"), "*layer_1/kernel": P("gpu"), "*kernel": P(None, "gpu")}
    )
    assert found.in_specs["state/params/layer_1/kernel"] == "P('gpu')"
    assert found.in_specs["state/params/layer_2/kernel"] == "P(None, 'gpu')"
    assert found.in_specs["state/params/layer_2/bias"] == "P()"
    assert "state/params/layer_2/bias" in found.replicated


MISTAKES = [
    ({"rules": {"*kernl": P("gpu")}}, "the rule '*kernl' = PartitionSpec('gpu',) matches no argument"),
    ({"rules": {"batch/inputs": P("gpux")}}, "unknown axis 'gpux'; the mesh has node=2, gpu=4 (nearest: gpu)"),
    ({"rules": {"batch/inputs": P("data")}}, "other axes need mesh="),
    ({"rules": {"batch/labels": P("gpu", None)}}, "has 2 entries, but batch/labels has rank 1"),
    ({"rules": {"state/params/layer_3/bias": P(("node", "gpu"))}}, "which does not divide 10"),
    ({"rules": {"inputs": "gpu"}}, "no argument carries axis names"),
    ({"rules": {"batch/inputs": "gpu"}}, "= 'gpu': give a PartitionSpec for a glob"),
    ({"rules": {"batch/inputs": 3}}, "give a PartitionSpec for a glob"),
    ({"rules": 7}, "rules=7"),
    ({"rules": {}}, "nothing shards the step"),
    ({}, "nothing shards the step"),
    ({"in_shardings": (P(),)}, "has 1 entries, and the step takes 2"),
    ({"in_shardings": {"inputs": P()}}, "in_shardings is a dict"),
    ({"in_shardings": (P(), {"inputs": P("node")})}, "nothing for batch/labels"),
    ({"in_shardings": (P(), {"inputs": P(), "labels": P(), "label": P()})}, "batch/label, which is no argument"),
    ({"in_shardings": (P(), "node")}, "is a str: give a PartitionSpec"),
    ({"in_shardings": P(), "rules": {"*": P()}}, "cannot be given together"),
    ({"in_shardings": P(), "mesh": {"data": 3}}, "has 3 devices, and '2x4' has 8"),
    ({"in_shardings": P(), "mesh": {}}, "give sizes by axis name"),
    ({"in_shardings": P(), "mesh": {"data": True}}, "give sizes by axis name"),
    ({"in_shardings": P(), "measure": "x"}, "unsupported measure='x'"),
    ({"rules": {"batch/inputs": P("gpu", "gpu")}}, "the rule 'batch/inputs': P('gpu', 'gpu') "),
    ({"in_shardings": P(), "pins": {"*": P()}}, "score has no option 'pins'"),
]


@pytest.mark.parametrize(("given", "part"), MISTAKES, ids=[part for _, part in MISTAKES])
def test_a_mistake_says_what_to_do(given: dict[str, Any], part: str) -> None:
    step, args = mlp.train_step(classes=10)
    with pytest.raises((PinError, ClusterError, ShardplanError)) as raised:
        shardplan.score(step, *args, cluster="2x4", **given)
    assert part.replace("PartitionSpec('gpu',)", str(P("gpu"))) in str(raised.value)


class Linen(nn.Module):
    """Two layers whose kernels name mesh axes, or logical ones."""

    logical: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        wrap = nn.with_logical_partitioning if self.logical else nn.with_partitioning
        names = ("embed", "mlp") if self.logical else (None, "gpu")
        init = nn.initializers.lecun_normal()
        x = nn.Dense(64, kernel_init=wrap(init, names))(x)
        return nn.Dense(32, kernel_init=wrap(init, names[::-1]))(nn.relu(x))


def linen_step(*, logical: bool) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    model, x = Linen(logical), jax.ShapeDtypeStruct((16, 32), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)

    def step(params: Any, x: Any) -> Any:
        run: Any = model.apply
        grads = jax.grad(lambda p: jnp.square(run(p, x)).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return step, (params, x)


def test_axes_that_linen_metadata_names_are_read_from_the_model() -> None:
    step, args = linen_step(logical=False)
    found = shardplan.score(step, *args, cluster="2x4", rules={"x": P("node")})
    assert found.in_specs["params/params/Dense_0/kernel"] == "P(None, 'gpu')"
    assert found.in_specs["params/params/Dense_1/kernel"] == "P('gpu', None)"
    assert found.in_specs["x"] == "P('node')"
    assert found.replicated == ("params/params/Dense_0/bias", "params/params/Dense_1/bias")


def test_logical_axes_go_through_flaxs_rules() -> None:
    step, args = linen_step(logical=True)
    found = shardplan.score(
        step, *args, cluster="2x4", rules=[("mlp", "gpu"), ("embed", "node"), ("heads", "gpu"), ("x", P("node"))]
    )
    assert found.in_specs["params/params/Dense_0/kernel"] == "P('node', 'gpu')"
    with pytest.raises(PinError, match="unknown axis 'embed'"):
        shardplan.score(step, *args, cluster="2x4")
    whole = shardplan.score(step, *args, cluster="2x4", rules=[("*Dense_0/kernel", None), ("mlp", "gpu"), ("embed", None)])
    assert whole.in_specs["params/params/Dense_0/kernel"] == "P()"
    assert whole.in_specs["params/params/Dense_1/kernel"] == "P('gpu', None)"


@pytest.mark.parametrize("logical", [False, True])
def test_a_name_that_two_dims_have_is_told_with_its_path(logical: bool) -> None:
    wrap = nn.with_logical_partitioning if logical else nn.with_partitioning
    layer = nn.Dense(64, kernel_init=wrap(nn.initializers.lecun_normal(), ("mlp", "mlp")))
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32)
    args = jax.eval_shape(layer.init, jax.random.key(0), x), x

    def step(params: Any, x: Any) -> Any:
        return layer.apply(params, x)

    with pytest.raises(
        PinError, match=r"metadata of params/params/kernel names its dims \('mlp', 'mlp'\), 'mlp' twice"
    ) as raised:
        shardplan.score(step, *args, cluster="2x4", rules=[("mlp", "gpu")])
    assert raised.value.pins == ("params/params/kernel",)
    found = shardplan.score(step, *args, cluster="2x4", rules=[("mlp", "gpu"), ("*/kernel", P("gpu"))])  # as the error advises
    assert found.in_specs["params/params/kernel"] == "P('gpu')"


class Nnx(nnx.Module):
    """One layer whose kernel names a mesh axis."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "gpu"))
        self.layer = nnx.Linear(8, 64, rngs=rngs, kernel_init=init)


def test_nnx_objects_may_be_arguments() -> None:
    with nnx.use_eager_sharding(False):
        model = Nnx(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: (m.layer(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    args = model, optimizer, jax.ShapeDtypeStruct((16, 8), jnp.float32)
    carried = shardplan.score(step, *args, cluster="2x4", rules={"x": P("node")})
    assert carried.in_specs["model/layer/kernel"] == "P(None, 'gpu')"
    assert carried.in_specs["optimizer/opt_state/0/mu/layer/kernel"] == "P(None, 'gpu')"
    specs = nnx.get_partition_spec(nnx.state(model)), nnx.get_partition_spec(nnx.state(optimizer)), P("node")
    assert shardplan.score(step, *args, cluster="2x4", in_shardings=specs).step_time_s == carried.step_time_s
    assert shardplan.score(step, *args, cluster="2x4", in_shardings=(P(), None, P())).communication_bytes == 0


def test_named_shardings_over_the_users_own_mesh(devices: list[Any]) -> None:
    """The mesh's axes lie on the levels; specs and losses name them."""
    step, args = mlp.train_step()
    mesh = Mesh(np.array(devices).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    mine = NamedSharding(mesh, P("model")), NamedSharding(mesh, P(("data", "model")))
    state = jax.tree.map(lambda x: mine[0] if x.ndim == 2 else None, args[0])
    found = shardplan.score(step, *args, cluster="8", in_shardings=(state, mine[1]))
    assert found.axes == {"data": 4, "model": 2}
    assert any("'model'" in loss.given for loss in found.losses)
    over = shardplan.score(step, *args, cluster=mesh, in_shardings=(state, mine[1]), mesh=mesh)
    assert over.in_specs == found.in_specs
    other = Mesh(np.array(devices), ("all",), axis_types=(AxisType.Auto,))
    with pytest.raises(ClusterError, match="several meshes"):
        shardplan.score(step, *args, cluster="8", in_shardings=(state, NamedSharding(other, P("all"))))


def test_an_axis_may_go_over_several_levels() -> None:
    step, args = mlp.train_step()
    found = shardplan.score(step, *args, cluster="2x4", in_shardings=(fsdp(args[0], "all"), P("all")), mesh={"all": 8})
    same = shardplan.score(step, *args, cluster="2x4", in_shardings=(fsdp(args[0]), P(BOTH)))
    assert found.step_time_s == same.step_time_s
    assert found.losses[0].given == "P(('all[0]', 'all[1]'))"


def test_a_mesh_that_does_not_lie_on_the_levels_is_refused() -> None:
    step, args = mlp.train_step()
    with pytest.raises(ClusterError, match="does not lay its axes on the levels"):
        shardplan.score(step, *args, cluster="3x2", in_shardings=P(), mesh={"a": 2, "b": 3})


@pytest.mark.slow
def test_what_does_not_fit_is_priced_all_the_same() -> None:
    step, args = mlp.train_step(**WIDE)
    plan = shardplan.plan(step, *args, cluster="2x4", memory_limit="16MiB")
    found = shardplan.score(step, *args, cluster="2x4", in_shardings=None, memory_limit="16MiB")
    assert not found.fits
    assert found.peak_bytes > found.memory_limit == plan.memory_limit
    assert found.plan_s == plan.step_time_s


def test_odd_sizes_are_priced_whole() -> None:
    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).sum())(w)

    args = jnp.ones((7, 5)), jnp.ones((9, 7))
    assert shardplan.score(step, *args, cluster="2x4", in_shardings=P()).in_specs == {"w": "P()", "x": "P()"}
    with pytest.raises(PinError, match=r"in_shardings: w: .* does not divide 7; pad it to 8"):
        shardplan.score(step, *args, cluster="2x4", in_shardings=(P("node"), P()))


def test_arguments_by_name_are_scored() -> None:
    def step(w: jax.Array, *, x: jax.Array) -> jax.Array:
        return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    w, x = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((256, 64), "float32")
    found = shardplan.score(step, w, kwargs={"x": x}, cluster="2x4", rules={"x": P(BOTH)}, donate_argnums=-1)
    assert found.in_specs["x"] == "P(('node', 'gpu'))"
    alone = shardplan.score(lambda w, x: step(w, x=x), w, x, cluster="2x4", rules={"x": P(BOTH)}, donate_argnums=0)
    assert (found.step_time_s, found.peak_bytes) == (alone.step_time_s, alone.peak_bytes)


class _Named(nnx.Module):
    """A module with one layer, which has this name."""

    def __init__(self, name: str) -> None:
        self.layer = name
        setattr(self, name, nnx.Linear(32, 32, rngs=nnx.Rngs(0)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return getattr(self, self.layer)(x)


def test_a_layer_may_be_called_value() -> None:
    def step(model: _Named, x: jax.Array) -> Any:
        return nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)

    model = _Named("value")
    specs = jax.tree.map(lambda _: P("gpu"), model)
    found = shardplan.score(step, model, jnp.ones((64, 32)), cluster="2x4", in_shardings=(specs, P("gpu")))
    assert sorted(path.split("/", 1)[1] for path in found.in_specs if "/" in path) == ["value/bias", "value/kernel"]


def test_the_text_says_where_a_sharding_by_hand_is_faster_than_the_plan() -> None:
    from shardplan.report.score_text import score_text

    step, args = mlp.train_step(layers=2)
    found = shardplan.score(step, *args, cluster="2x4", rules={"*": P()})
    faster = replace(found, step_time_s=0.9 * found.plan_s)
    assert "10.0% less than under the plan" in score_text(faster, title="mlp")
    assert "less than under the plan" not in score_text(replace(found, step_time_s=found.plan_s), title="mlp")


def test_few_rows_make_up_the_losses(wide: Any) -> None:
    """What is left of them is one row, which adds up no gains: they do not add up."""
    from shardplan.report.score_text import score_text

    found = wide[2]
    many = tuple(replace(found.losses[0], seconds=2.0**-n) for n in range(20))
    shown = score_text(replace(found, losses=many), title="mlp")
    (rest,) = [row for row in shown.splitlines() if "others, each at most" in row]
    assert rest.split()[0] == "15"
    assert "31.2 ms" in rest


def test_a_batch_that_is_whole_everywhere_is_named_as_one() -> None:
    """The search may split what it reads of it at no cost; XLA computes all of it on every device."""

    def step(w: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            logits = jnp.tanh(batch["x"] @ w) @ w
            return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], 1))

        return w - 0.1 * jax.grad(loss)(w)

    batch = {"x": jax.ShapeDtypeStruct((8192, 1024), "float32"), "label": jax.ShapeDtypeStruct((8192,), "int32")}
    args = jax.ShapeDtypeStruct((1024, 1024), "float32"), batch
    score = shardplan.score(step, *args, cluster="2x4", in_shardings=P(), donate_argnums=0)
    first = score.losses[0]
    assert dict(first.together) == {"batch/x": "P(('node', 'gpu'))", "batch/label": "P(('node', 'gpu'))"}
    split = shardplan.score(step, *args, cluster="2x4", in_shardings=(P(), P(("node", "gpu"))), donate_argnums=0)
    assert first.seconds == pytest.approx(score.step_time_s - split.step_time_s)
    assert first.seconds > 0.5 * score.step_time_s


class Heads(NamedTuple):
    """A state whose first weight has the name under which nnx keeps a variable's array."""

    value: Any
    policy: Any


def two(state: Any, x: jax.Array) -> Any:
    """A step of two weights."""

    def loss(state: Any) -> jax.Array:
        first, second = jax.tree.leaves(state)
        return jnp.mean(((x @ first) @ second) ** 2)

    return jax.tree.map(lambda w, g: w - g, state, jax.grad(loss)(state))


def test_each_array_has_the_spec_at_its_own_place() -> None:
    square, x = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((64, 64), "float32")
    given = Heads(P("gpu"), P(None, "node"))
    score = shardplan.score(two, Heads(square, square), x, cluster="2x4", in_shardings=(given, P("gpu")))
    assert score.in_specs == {"state": "P('gpu')", "state/policy": "P(None, 'node')", "x": "P('gpu')"}
    state = {"a/b": square, "a": {"b": square}}
    score = shardplan.score(two, state, x, cluster="2x4", in_shardings=({"a/b": P("gpu"), "a": {"b": P(None, "node")}}, P()))
    assert score.in_specs == {"state/a/b": "P(None, 'node')", "state/a/b#2": "P('gpu')", "x": "P()"}
    rules = {"state/a/b#2": P("gpu"), "*": P()}
    assert shardplan.score(two, state, x, cluster="2x4", rules=rules).in_specs["state/a/b#2"] == "P('gpu')"


def test_a_rule_that_never_applies_is_refused() -> None:
    args = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((64, 64), "float32")
    with pytest.raises(PinError, match=r"the rule 'x' = P.*'gpu'.* never applies: '\*' before it matches all .*; put it first"):
        shardplan.score(adam_step, *args, cluster="2x4", rules={"w": P("node"), "*": None, "x": P("gpu")})
    with pytest.raises(
        PinError, match=r"'a' .* matches no argument.*; 2 other rules match none either: are they for another step"
    ):
        shardplan.score(adam_step, *args, cluster="2x4", rules={"a": P("node"), "b": P(), "c": P()})
    rest = {"w": P("node"), "x": P("gpu"), "*": None}
    assert shardplan.score(lambda w, x: x @ w, *args, cluster="2x4", rules=rest).in_specs == {"w": "P('node')", "x": "P('gpu')"}
