"""Pins that cannot hold: the error names the fewest that are in conflict, and lifting any one of them helps."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardplan
from models import mlp
from shardplan.mesh import Cluster
from shardplan.search.memory import liveness as memory
from shardplan.search.strategy.pins import for_pins, pinned_domains, smallest_conflict
from shardplan.verify.verify import verify
from tests.search import steps

STEP, ARGS = mlp.train_step(layers=2)
KERNEL = "layer_0/kernel"


def refused(pins: dict[str, P], *, cluster: str = "2x4", **options: Any) -> shardplan.PinError:
    with pytest.raises(shardplan.PinError) as caught:
        shardplan.plan(STEP, *ARGS, cluster=cluster, pins=pins, **options)
    return caught.value


@given(st.sets(st.sets(st.sampled_from("abcdef"), min_size=1).map(frozenset), max_size=5))
def test_a_conflict_is_in_conflict_and_no_part_of_it_is(clashes: set[frozenset[str]]) -> None:
    def holds(some: Any) -> bool:
        return not any(clash <= set(some) for clash in clashes)

    found = smallest_conflict("abcdef", holds)
    assert bool(found) == bool(clashes)
    if found:
        assert not holds(found)
        assert all(holds([i for i in found if i != left]) for left in found)


def test_only_the_two_pins_that_contradict_each_other_are_named() -> None:
    pins = {
        "batch/*": P("node"),
        "state/params/*kernel": P("gpu"),
        "state/params/layer_1/bias": P(),
        f"state/params/{KERNEL}": P(None, "gpu"),
    }
    error = refused(pins)
    assert error.pins == ("state/params/*kernel", f"state/params/{KERNEL}")
    assert f"both match state/params/{KERNEL}" in str(error)
    for lifted in error.pins:
        shardplan.plan(STEP, *ARGS, cluster="2x4", pins={k: v for k, v in pins.items() if k != lifted})


def test_state_that_takes_turns_shares_one_layout_and_both_are_named() -> None:
    """Each comes back in place of the other: no copy in between could have another layout."""
    pins = {"a": P("gpu"), "b": P(None, "gpu"), "c": P()}
    with pytest.raises(shardplan.PinError, match="the first matches a, the second b, and these two share one layout") as caught:
        shardplan.plan(lambda a, b, c: (b, a, c * 2), *[jax.ShapeDtypeStruct((8, 8), "float32")] * 3, cluster="2x4", pins=pins)
    assert caught.value.pins == ("a", "b")


def product(a: Any, b: Any) -> Any:
    return a + b, jnp.sin(a) * b, a @ b


def gradient(a: Any, b: Any) -> Any:
    return a - jax.grad(lambda a: jnp.sum(jax.checkpoint(lambda a: jnp.tanh(a * b) @ b)(a) ** 2))(a), b * 2


def scanned(a: Any, b: Any) -> Any:
    return jax.lax.scan(lambda c, r: (c + r * a.sum(), c * b), a, jnp.ones((3, 8, 8)))


def chosen(a: Any, b: Any) -> Any:
    return jax.lax.cond(a[0, 0] > 0, lambda: a + b, lambda: a * b)


@pytest.mark.parametrize("objective", ["time", "bytes"])
@pytest.mark.parametrize("step", [product, gradient, scanned, chosen], ids=lambda f: f.__name__)
def test_arguments_that_meet_in_one_op_may_be_pinned_differently(step: Any, objective: str, eager: Any, tmp_path: Path) -> None:
    """One of them is resharded on the way, at a price; saved and read again it is the same plan."""
    args = (np.arange(64.0, dtype=np.float32).reshape(8, 8) / 64, np.ones((8, 8), np.float32) / 4)
    pins = {"a": P("node", "gpu"), "b": P("gpu", "node")}
    plan = shardplan.plan(step, *args, cluster=eager, pins=pins, objective=objective, factors={})
    assert {path: plan.specs_by_path[path] for path in pins} == pins
    assert plan.communication_bytes > 0
    assert plan.lower_bound_s <= plan.step_time_s * (1 + 1e-9)
    found = verify(plan, step, args)
    assert found.passed
    assert found.recompiles == 0
    plan.save(tmp_path / "plan.json")
    again = shardplan.load(tmp_path / "plan.json", step, *args)
    assert (again.step_time_s, again.in_specs, again.out_specs) == (plan.step_time_s, plan.in_specs, plan.out_specs)


def test_a_copy_is_made_once_for_all_that_read_it(eager: Any) -> None:
    """Three elementwise ops that read the same two arguments move no more than one does."""
    pins = {"a": P("node", "gpu"), "b": P("gpu", "node")}
    like = jax.ShapeDtypeStruct((64, 64), "float32")
    one = shardplan.plan(lambda a, b: a + b, like, like, cluster=eager, pins=pins)
    three = shardplan.plan(
        lambda a, b: {"sum": a + b, "product": a * b, "most": jnp.maximum(a, b)}, like, like, cluster=eager, pins=pins
    )
    assert 0 < three.communication_bytes <= one.communication_bytes


@pytest.mark.parametrize("one_choice", ["none", "timesteps", "layers"])
def test_moments_may_be_pinned_differently(one_choice: str) -> None:
    mu, nu = f"state/optimizer/0/mu/{KERNEL}", f"state/optimizer/0/nu/{KERNEL}"
    pins = {mu: P("gpu"), nu: P(None, "gpu"), "batch/*": P("node")}
    plan = shardplan.plan(STEP, *ARGS, cluster="2x4", pins=pins, one_choice=one_choice)
    assert plan.specs_by_path[mu] == P("gpu")
    assert plan.specs_by_path[nu] == P(None, "gpu")


def test_pins_that_agree_leave_the_problem_as_it_is() -> None:
    problem = steps.problem(STEP, *ARGS, on=Cluster.load("2x4"))
    agreeing = {f"state/optimizer/0/mu/{KERNEL}": ("gpu",), f"state/optimizer/0/nu/{KERNEL}": (("gpu",), None)}
    assert for_pins(problem, agreeing) is problem


def test_pins_that_agree_may_overlap() -> None:
    plan = shardplan.plan(STEP, *ARGS, cluster="2x4", pins={"state/params/*kernel": P("gpu"), f"*/{KERNEL}": P("gpu", None)})
    assert plan.specs_by_path[f"state/params/{KERNEL}"] == P("gpu")


@pytest.mark.parametrize(
    ("pin", "says"),
    [("no/such/path", "matches no argument"), ("batch/labels", "node, gpu"), ("batch/inputs", "does not divide")],
    ids=["path", "axis", "dim"],
)
def test_a_pin_that_is_wrong_by_itself_is_the_conflict(pin: str, says: str) -> None:
    spec = P("expert") if says == "node, gpu" else P("node")
    error = refused({f"state/params/{KERNEL}": P(), pin: spec}, cluster="3x4" if says == "does not divide" else "2x4")
    assert error.pins == (pin,)
    assert says in str(error)


@pytest.mark.parametrize(
    ("shape", "pin", "says"),
    [
        ((0, 64), P("gpu"), r"splits x \(0, 64\), which has no elements"),
        ((0, 64), P(None, "gpu"), "which has no elements"),
        ((1, 64), P("gpu"), "cuts dim 0 of x .* 2 ways, which does not divide 1; pad it to 2, or leave it whole"),
        ((1, 1), P(None, "gpu"), "a scalar"),
    ],
    ids=str,
)
def test_what_cannot_be_split_is_not_split_by_a_pin(shape: tuple[int, ...], pin: P, says: str) -> None:
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    with pytest.raises(shardplan.PinError, match=says):
        shardplan.plan(lambda x: x + 1, x, cluster="2x2x2", pins={"x": pin})
    whole = shardplan.plan(lambda x: x + 1, x, cluster="2x2x2", pins={"x": P()})
    assert whole.specs_by_path["x"] == P()


# -- levels that are split ---------------------------------------------------------------------------------------------


def _rows(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) @ w))(w)


ROWS = (steps.array(512, 512), steps.array(4096, 512))


def test_a_part_of_a_split_level_can_be_pinned() -> None:
    """Six devices, dims of powers of two: the level is tried whole, and as 2 x 3; ``gpu0`` is an axis of the second alone."""
    plan = shardplan.plan(_rows, *ROWS, cluster="6", pins={"x": P("gpu0")})
    assert plan.axes == {"gpu0": 2, "gpu1": 3}
    assert plan.specs_by_path["x"] == P("gpu0")


def test_a_level_by_name_is_all_its_parts() -> None:
    def step(w: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _rows(w, x), y + 1

    plan = shardplan.plan(step, *ROWS, steps.array(12, 512), cluster="6", pins={"y": P("gpu"), "w": P("gpu0")})
    assert plan.specs_by_path["y"] == P(("gpu0", "gpu1"))
    assert plan.specs_by_path["w"] == P("gpu0")


# -- memory ------------------------------------------------------------------------------------------------------------


def test_pins_that_alone_exceed_the_limit_are_the_fewest_that_do() -> None:
    """Whole, each of four matrices takes 1 MiB; any three of them are more than the limit, two are not."""

    def step(ws: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        for w in ws.values():
            x = jnp.tanh(x @ w)
        return x

    args = {k: steps.array(512, 512) for k in "abcd"}, steps.array(8, 512)
    limit = int(3.5 * 2**20)
    pins = {f"ws/{k}": P() for k in "abcd"} | {"x": P()}
    with pytest.raises(shardplan.MemoryLimitError, match="pins that alone exceed it") as caught:
        shardplan.plan(step, *args, cluster="8", pins=pins, memory_limit=limit)
    assert len(caught.value.pins) == 4, "three matrices fit beside an eighth of the fourth"
    assert not any("'x'" in pin for pin in caught.value.pins)
    for lifted in "abcd":
        fewer = {k: v for k, v in pins.items() if k != f"ws/{lifted}"}
        assert shardplan.plan(step, *args, cluster="8", pins=fewer, memory_limit=limit).peak_bytes <= limit


@pytest.mark.parametrize("shape", ["4", "2x2"])
def test_no_assignment_holds_less_than_the_floor(shape: str) -> None:
    problem = steps.problem(_rows, steps.array(8, 8), steps.array(16, 8), on=Cluster.load(shape))
    live = memory.liveness(problem)
    domains = steps.thinned(problem, assignments=20_000)
    peaks = [memory.profile(problem, live, states, frozenset()).max() for states in itertools.product(*domains)]
    floor = memory.floor_bytes(problem, live, domains)
    assert 0 < floor <= min(peaks)
    pinned = pinned_domains(problem, {"w": ()})
    assert memory.floor_bytes(problem, live, pinned) > memory.floor_bytes(problem, live, problem.domains)
