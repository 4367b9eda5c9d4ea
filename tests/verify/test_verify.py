"""A sharded step equals the single-device step, sends what was predicted, and a step that lacks one exchange is caught."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.errors import DeviceError, ShardplanError
from shardplan.report.verified_text import verified_text
from shardplan.verify.judge import Sensitivity, difference, judge
from shardplan.verify.mutate import DroppingEmitter
from shardplan.verify.on_host import drawn, on_host
from shardplan.verify.runs import Noise, Sharded, Single, StateFeedback, loop_of
from shardplan.verify.verify import verify
from tests.machines import machine

PINS = {"batch/*": P(("node", "gpu")), "state/params/*": P("gpu")}


def small(batch: int = 64, dtype: str = "float32") -> tuple[Any, tuple[Any, ...]]:
    """A regression by two layers with momentum, a step counter and a random key in its state, computed in ``dtype``."""

    def loss_of(params: Any, batch: Any) -> Any:
        params, batch = jax.tree.map(lambda x: x.astype(dtype), (params, batch))
        return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)

    def step(state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
        key, _ = jax.random.split(state["key"])
        return {"params": params, "momentum": momentum, "count": state["count"] + 1, "key": key}, loss

    rng = np.random.default_rng(0)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), "float32")

    params = {"up": array(16, 32), "down": array(32, 8)}
    state = {
        "params": params,
        "momentum": jax.tree.map(jnp.zeros_like, params),
        "count": jnp.zeros((), "int32"),
        "key": jax.random.key(1),
    }
    return step, (state, {"x": array(batch, 16), "y": array(batch, 8)})


@pytest.fixture(scope="module")
def planned(devices: list[Any]) -> tuple[Any, Any, tuple[Any, ...]]:
    step, args = small(batch=2048)
    slow = shardplan.Cluster.load("gcp-a100").resized(2, 2)  # gradients are reduced rather than the batch gathered
    return shardplan.plan(step, *args, cluster=slow, pins=PINS), step, args


def test_a_planned_step_is_the_step(planned: Any) -> None:
    plan, step, args = planned
    found = verify(plan, step, args)
    assert (found.equal, found.unequal, found.steps) == (True, (), 3)
    assert (found.recompiles, found.moved, found.passed) == (0, (), True)
    assert found.max_error < 1e-4
    assert found.predicted_bytes == pytest.approx(found.measured_bytes, rel=0.06)
    assert found.predicted_bytes == pytest.approx(sum(b.predicted for b in found.collectives.values()))
    assert found.measured_bytes == pytest.approx(sum(b.measured for b in found.collectives.values()))


def test_leaving_out_any_one_exchange_is_noticed(planned: Any) -> None:
    plan, step, args = planned
    emitter = DroppingEmitter(plan.planned, plan.mesh(), dropped=-1)
    jax.eval_shape(emitter, *jax.tree.leaves(args))
    assert len(emitter.exchanges) >= 4
    assert not emitter.skipped
    caught = [not verify(plan, step, args, backend="specs", drop=n).equal for n in range(len(emitter.exchanges))]
    assert all(caught), [what for what, seen in zip(emitter.exchanges, caught, strict=True) if not seen]


@pytest.mark.slow
def test_leaving_out_any_one_exchange_is_noticed_in_bfloat16(devices: list[Any]) -> None:
    step, (state, batch) = small(batch=2048, dtype="bfloat16")
    args = state, {**batch, "y": batch["y"] * jnp.linspace(0, 2, 2048)[:, None]}  # different rows have different means
    plan = shardplan.plan(step, *args, cluster=shardplan.Cluster.load("gcp-a100").resized(2, 2), pins=PINS)
    assert verify(plan, step, args).passed
    emitter = DroppingEmitter(plan.planned, plan.mesh(), dropped=-1)
    jax.eval_shape(emitter, *jax.tree.leaves(args))
    caught = [not verify(plan, step, args, backend="specs", drop=n).equal for n in range(len(emitter.exchanges))]
    assert len(caught) >= 4
    assert all(caught), [what for what, seen in zip(emitter.exchanges, caught, strict=True) if not seen]


def test_donated_state_is_not_used_again(devices: list[Any]) -> None:
    step, args = small()
    plan = shardplan.plan(step, *args, cluster="2x2", pins=PINS, donate_argnums=(0,))
    found = verify(plan, step, args)
    assert found.passed
    assert (
        found.measured_peak_bytes < verify(shardplan.plan(step, *args, cluster="2x2", pins=PINS), step, args).measured_peak_bytes
    )
    assert all(not x.is_deleted() for x in jax.tree.leaves(args))


def test_shapes_are_drawn(planned: Any) -> None:
    plan, step, args = planned
    shapes = jax.eval_shape(lambda *a: a, *args)
    assert verify(plan, step, shapes, steps=1).equal
    values = drawn(jax.tree.leaves(shapes))
    again = drawn(jax.tree.leaves(shapes))
    for x, y in zip(values, again, strict=True):
        a, b = (jax.random.key_data(v) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v for v in (x, y))
        np.testing.assert_array_equal(a, b)


def test_too_few_devices_and_no_steps_are_refused(planned: Any) -> None:
    plan, step, args = planned
    with pytest.raises(DeviceError, match=r"4.*2|2.*4"):
        verify(plan, step, args, devices=jax.devices()[:2])
    with pytest.raises(ShardplanError, match="steps=0"):
        verify(plan, step, args, steps=0)


def test_differences_of_integers_and_of_what_is_not_finite() -> None:
    error = difference
    assert error(np.array([1, 2]), np.array([1, 2])) == 0
    assert error(np.array([2**60]), np.array([2**60 + 1])) >= 1
    assert error(np.array([1, 2]), np.array([1, 4])) == 2
    assert error(np.array([np.nan, np.inf]), np.array([np.nan, np.inf])) == 0
    assert error(np.array([np.nan]), np.array([1.0])) == np.inf
    assert error(np.array([], np.float32), np.array([], np.float32)) == 0


def test_an_infinity_hides_no_other_number() -> None:
    """Scores of which some are masked: the check still notices a sum that is left out."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.where(jnp.arange(24) < 20, (x @ w).sum(0), -jnp.inf)

    rng = np.random.default_rng(0)
    args = tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((8, 24), (16, 8)))
    plan = shardplan.plan(step, *args, cluster=machine("2x4:eager"), pins={"x": P("gpu")})
    assert verify(plan, step, args, steps=1).equal
    assert not verify(plan, step, args, steps=1, drop=0).equal


def test_what_a_perturbation_makes_infinite_may_be_infinite() -> None:
    one = np.array([1.0, 2.0, 3.0])
    lost = np.array([1.0, np.inf, 3.5])
    change = Sensitivity().with_run(one, lost)
    assert change.size == 0.5
    assert judge(["a"], [[one]], [[lost]], [[change]]).unequal == ()
    assert judge(["a"], [[one]], [[np.array([1.0, np.nan, 9.5])]], [[change]]).unequal == ("a",)
    assert judge(["a"], [[one]], [[np.array([np.inf, 2.0, 3.0])]], [[change]]).unequal == ("a",)


@pytest.mark.parametrize(
    ("error", "drawn_in_all", "equal"),
    [(0.5, 5, True), (3.0, 15, True), (4.5, 30, False)],
    ids=["equal", "equal once more are drawn", "unequal by any"],
)
def test_perturbations_are_drawn_until_they_decide(error: float, drawn_in_all: int, equal: bool) -> None:
    """The first ten change a leaf by 0.1, all others by 0.4: ten times that is the tolerance."""
    seen: list[int] = []

    class Steps(Single):
        def __init__(self) -> None: ...

        def once(self, host: Any, seed: int = 0, *, later: bool = False) -> list[np.ndarray]:
            seen.append(seed)
            return [np.array([100.0 + (0.1 if seed < 10 else 0.4)])]

    single, found = [[np.array([100.0])]], [[np.array([100.0 + error])]]
    judged = Noise(Steps().again, [[]], single).judged(["a"], single, found)
    assert (judged.unequal == (), len(seen)) == (equal, drawn_in_all)


GPT = {"layers": 1, "width": 256, "sequence": 64, "batch": 32}
DEEP = {**GPT, "layers": 2}
MODELS = [
    ("mlp", {}, "2x4"),
    ("moe", {}, "2x4"),
    ("gpt", {}, "2x4"),
    ("gpt", GPT, "2x4"),
    ("gpt", GPT, "2x2x2"),
    ("gpt", GPT, "8"),
    ("gpt", {**DEEP, "scan": True}, "2x4"),
    ("gpt", {**GPT, "remat": True}, "2x4"),
    ("gpt", {**DEEP, "scan": True, "remat": True}, "2x4"),
    ("gpt", {**GPT, "dtype": "bfloat16"}, "2x4"),
    ("gpt", {"dtype": "bfloat16"}, "2x4"),
    ("gpt", {**GPT, "dropout": 0.1}, "2x4"),
    ("gpt_linen", GPT, "2x4"),
    ("wresnet", {}, "2x4"),
    ("wresnet", {}, "2x2x2"),
    ("wresnet", {}, "8"),
]
QUICK = {("mlp", "2x4", 0)}


def _named(name: str, options: dict[str, Any], cluster: str) -> Any:
    shown = ",".join(f"{k}={v}" for k, v in options.items())
    quick = (name, cluster, len(options)) in QUICK
    return pytest.param(name, options, cluster, id=f"{name}({shown})-{cluster}", marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "options", "cluster"), [_named(*row) for row in MODELS])
def test_a_model_is_equal_and_sends_what_was_predicted(
    devices: list[Any], name: str, options: dict[str, Any], cluster: str
) -> None:
    step, args = importlib.import_module(f"models.{name}").train_step(**options, concrete=True)
    plan = shardplan.plan(step, *args, cluster=cluster)
    found = verify(plan, step, args)
    assert found.passed, found
    assert found.measured_bytes == pytest.approx(found.predicted_bytes, rel=0.05)


def test_a_step_without_a_finite_number_proves_nothing(devices: list[Any]) -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return w - jnp.log(-jnp.abs(x)).mean(), (w * jnp.nan).sum()

    args = jnp.ones((64, 64)), jnp.ones((64, 64))
    found = verify(shardplan.plan(step, *args, cluster="2x4"), step, args, devices=devices)
    assert (found.compared, found.equal, found.passed) == (0, False, False)
    assert "NOT COMPARED" in verified_text(found.json)


def test_a_verification_says_that_a_plan_cuts_no_array(devices: list[Any]) -> None:
    step, args = small()
    whole = verify(shardplan.plan(step, *args, cluster="2"), step, args, steps=1, devices=devices)
    assert whole.passed
    assert whole.uncut
    assert "the plan cuts no array, so every device ran the whole step" in verified_text(whole.json)
    assert "--axes data=2 " in verified_text(whole.json)
    cut = shardplan.plan(step, *args, cluster="2", axes={"data": 2})
    assert not cut.uncut
    assert not cut.repeated
    assert not shardplan.plan(step, *args, cluster="1").uncut, "there is nothing to cut for one device"


def test_what_jit_compiles_again_too_is_not_held_against_the_plan(devices: list[Any]) -> None:
    """A Python number that comes back with a type: the second step is another one, with a plan or without."""

    def step(rate: Any, x: jax.Array) -> Any:
        return jnp.float32(rate) * 0.5, x * rate

    args = 0.5, jnp.ones((8, 16))
    found = verify(shardplan.plan(step, *args, cluster="2"), step, args, devices=devices)
    assert (found.recompiles, found.single_recompiles, found.passed) == (1, 1, True)
    assert found.retyped == ("rate (weak to strong)",)
    assert not replace(found, single_recompiles=0).passed
    assert "because of rate (weak to strong)" in verified_text(found.json)


def test_the_single_device_step_has_the_types_that_were_planned(devices: list[Any]) -> None:
    """A weakly typed array does not widen what it meets; a strongly typed one would."""

    def step(weak: jax.Array, x: jax.Array) -> jax.Array:
        return weak * x

    args = jnp.full((8, 16), 1.0), jnp.ones((8, 16), "bfloat16")
    made = shardplan.plan(step, *args, cluster="2")
    (row,) = Single(jax.jit(step), devices[0], StateFeedback(made.traced.in_tree, (None,), [True, False], [True, False], 1)).run(
        [np.array(x) for x in args]
    )
    assert [x.dtype for x in row] == [made.traced.out_shapes[0].dtype] == ["bfloat16"]


def test_a_step_of_empty_arrays_has_nothing_to_compare_and_passes(devices: list[Any]) -> None:
    args = (jnp.ones((0, 16)),)
    found = verify(shardplan.plan(lambda x: x * 2, *args, cluster="2"), lambda x: x * 2, args, devices=devices)
    assert (found.numbers, found.compared, found.passed) == (0, 0, True)


def test_integers_that_were_only_shapes_are_named(devices: list[Any]) -> None:
    def step(w: jax.Array, tokens: jax.Array, mask: jax.Array, empty: jax.Array) -> jax.Array:
        return w + w[tokens].sum() * mask.sum() + empty.sum()

    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((8, 4), "float32"), ((8,), "int32"), ((4,), "bool"), ((0,), "int32"))]
    plan = shardplan.plan(step, *shapes, cluster="2")
    assert verify(plan, step, shapes, steps=1, devices=devices).zeros == ("tokens", "mask")
    real = [jnp.zeros(x.shape, x.dtype) for x in shapes]
    assert verify(plan, step, real, steps=1, devices=devices).zeros == ()


def test_a_second_run_counts_anew(planned: tuple[Any, Any, tuple[Any, ...]], devices: list[Any]) -> None:
    plan, step, args = planned
    leaves, tree = jax.tree.flatten(args)
    sharded = Sharded(plan, plan.jit(step, devices[:4]), devices[:4], loop_of(plan.traced, tree, 2))
    host = [on_host(x) for x in leaves]
    for _ in range(2):
        sharded.run(host)
        assert (len(sharded.states), sharded.moved, sharded.recompiles) == (1, [], 0)
