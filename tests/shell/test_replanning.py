"""A plan made again for another cluster: no slower than the old layouts there, and a run that goes on computes the same."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.cost import OVERLAP
from shardplan.mesh import Cluster, factors
from shardplan.planning.wanted import Wanted
from shardplan.plans.inherited import inherited, matched, step_time_s


def train_step(batch: int = 64, width: int = 64) -> tuple[Any, Any]:
    """Two layers with momentum, and their arguments."""

    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        def loss_of(w: Any) -> jax.Array:
            return jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"] - jnp.sin(x)) ** 2)

        loss, slopes = jax.value_and_grad(loss_of)(state["w"])
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, state["velocity"], slopes)
        w = jax.tree.map(lambda a, v: a - 0.1 * v, state["w"], velocity)
        return {"w": w, "velocity": velocity, "steps": state["steps"] + 1}, loss

    up, down, x = (jax.random.normal(jax.random.key(n), s) for n, s in enumerate(((width, 96), (96, width), (batch, width))))
    w = {"up": up / 8, "down": down / 8}
    return step, ({"w": w, "velocity": jax.tree.map(jnp.zeros_like, w), "steps": jnp.zeros((), jnp.int32)}, x)


def smaller(cluster: Cluster, nodes: int) -> Cluster:
    """A cluster with other nodes, all else as it is."""
    return replace(cluster, levels=(cluster.levels[0].resized(nodes), *cluster.levels[1:]))


def slower(cluster: Cluster, part: float) -> Cluster:
    """A cluster whose nodes are joined by slower links."""
    level = cluster.levels[0]
    return replace(
        cluster,
        levels=(replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * part), *cluster.levels[1:]),
    )


@pytest.fixture
def planned(eager: Any) -> tuple[shardplan.Plan, Any, Any]:
    step, args = train_step()
    return shardplan.plan(step, *args, cluster=eager, donate_argnums=0), step, args


def old_layouts_s(plan: shardplan.Plan, cluster: Cluster) -> float:
    """The seconds of a plan's layouts on another cluster."""
    data = plan.data
    wanted = Wanted(data.memory_limit, frozenset(plan.donated_leaves), {}, None, lambda *_: None, OVERLAP, timed=OVERLAP)
    return step_time_s(inherited(data, plan.program, cluster, wanted, None)[0])


def test_factors_match_from_the_fastest_level_up() -> None:
    old = Cluster.load("4x8")
    parts = factors(old, {"gpu": (2, 4)})
    two = matched(old, parts, Cluster.load("2x8"))
    assert two is not None
    assert ([f.size for f in two.factors], two.of) == ([2, 2, 4], (0, 1, 2))
    four = matched(old, parts, Cluster.load("4"))
    assert four is not None
    assert ([f.size for f in four.factors], four.of) == ([4], (None, None, 0)), "the major part of the level is gone"
    more = matched(old, parts, Cluster.load("2x4x8"))
    assert more is not None
    assert ([f.size for f in more.factors], more.of) == ([2, 4, 2, 4], (1, 2, 3))
    assert matched(old, parts, Cluster.load("4x6")) is None


def test_the_old_layouts_on_the_old_cluster_are_the_old_plan(planned: tuple[shardplan.Plan, Any, Any]) -> None:
    plan, _, _ = planned
    assert any(plan.flat_in_specs), "something is cut"
    assert old_layouts_s(plan, plan.cluster) == pytest.approx(plan.step_time_s)


@pytest.mark.parametrize("change", [lambda c: smaller(c, 1), lambda c: smaller(c, 4), lambda c: slower(c, 0.01)])
def test_the_new_plan_is_no_slower_than_the_old_layouts(planned: tuple[shardplan.Plan, Any, Any], change: Any) -> None:
    plan, step, args = planned
    cluster = change(plan.cluster)
    new = shardplan.replan(plan, cluster)
    assert new.step_time_s <= old_layouts_s(plan, cluster) * (1 + 1e-9)
    assert new.step_time_s <= shardplan.plan(step, *args, cluster=cluster, donate_argnums=0).step_time_s * (1 + 1e-9)
    assert new.cluster == cluster
    assert new.traced is plan.traced
    assert new.donate_argnums == plan.donate_argnums
    assert new.lower_bound_s <= new.step_time_s


def test_old_layouts_win_where_a_search_without_time_finds_worse(eager: Any) -> None:
    """Three levels, and hardly any time: the search itself ends at its first plan."""
    three = replace(eager, levels=(replace(eager.levels[0], name="rack"), *eager.levels))
    step, args = train_step()
    plan = shardplan.plan(step, *args, cluster=three)
    new = shardplan.replan(plan, slower(three, 0.5), time_budget_s=1e-6)
    assert new.step_time_s <= old_layouts_s(plan, slower(three, 0.5)) * (1 + 1e-9)
    text = new.explain()
    assert text


def test_a_loaded_plan_is_replanned_too(planned: tuple[shardplan.Plan, Any, Any], tmp_path: Path) -> None:
    plan, step, args = planned
    plan.save(tmp_path / "plan.json")
    loaded = shardplan.load(tmp_path / "plan.json", step, *args)
    new, other = (shardplan.replan(p, smaller(plan.cluster, 1)) for p in (loaded, plan))
    assert new.flat_in_specs == other.flat_in_specs
    new.save(tmp_path / "new.json")
    assert shardplan.load(tmp_path / "new.json", step, *args).flat_in_specs == new.flat_in_specs


def test_options_are_those_of_the_old_plan_while_they_hold(eager: Any, caplog: pytest.LogCaptureFixture) -> None:
    step, args = train_step()
    pins = {"*w/up": P("gpu"), "*w/down": P("node")}
    plan = shardplan.plan(step, *args, cluster=eager, pins=pins, memory_limit="1GiB", time_model="sum", backend="specs")
    one = replace(eager, levels=eager.levels[1:])
    with caplog.at_level(logging.WARNING, "shardplan"):
        new = shardplan.replan(plan, one)
    assert new.pins == {"*w/up": P("gpu")}
    assert "a pin of the old plan is dropped" in caplog.text
    assert (new.memory_limit, new.time_model, new.backend) == (plan.memory_limit, "sum", "specs")
    assert new.specs_by_path["state/w/up"] == P("gpu")
    assert shardplan.replan(plan, one, pins={}).pins == {}
    by_axes = shardplan.plan(step, *args, cluster=eager, axes={"data": 2, "tensor": 4})
    with caplog.at_level(logging.WARNING, "shardplan"):
        assert shardplan.replan(by_axes, one).fixed_axes == {}
    assert "data=2, tensor=4 of the old plan do not make 4 devices" in caplog.text
    assert shardplan.replan(by_axes, slower(eager, 0.5)).fixed_axes == {"data": 2, "tensor": 4}


def test_a_step_in_microbatches_is_replanned_in_as_many(eager: Any) -> None:
    step, args = train_step()
    plan = shardplan.plan(step, *args, cluster=eager, microbatches=4)
    new = shardplan.replan(plan, smaller(eager, 1))
    assert new.microbatches == plan.microbatches


def test_what_cannot_be_replanned_is_refused() -> None:
    step, args = train_step()
    with pytest.raises(shardplan.ReshardError, match="plan is a str"):
        shardplan.replan("plan.json", "4")  # pyright: ignore[reportArgumentType]
    plan = shardplan.plan(step, *args, cluster="2x4")
    with pytest.raises(shardplan.MemoryLimitError):
        shardplan.replan(plan, "4", memory_limit=10)
    with pytest.raises(shardplan.ClusterError):
        shardplan.replan(plan, 4)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["explicit", "specs"])
@pytest.mark.parametrize("donated", [(), (0,)])
def test_a_run_goes_on_after_a_node_is_lost_and_one_is_added(eager: Any, backend: str, donated: tuple[int, ...]) -> None:
    """Losses equal to those of one device, on 2x4, then on the second node alone, then on 3x4."""
    step, (state, batch) = train_step(96, 96)
    one, expected = jax.tree.map(jnp.copy, state), list[float]()
    alone = jax.jit(step)
    for _ in range(9):
        one, loss = alone(one, batch)
        expected.append(float(loss))

    plan = shardplan.plan(step, state, batch, cluster=eager, backend=backend, donate_argnums=donated)
    lost = shardplan.replan(plan, smaller(eager, 1))
    grown = shardplan.replan(lost, smaller(eager, 3))
    runs = ((plan, jax.devices()[:8]), (lost, jax.devices()[4:8]), (grown, jax.devices()[4:16]))
    losses, before = list[float](), None
    for now, devices in runs:
        assert any(now.flat_in_specs), "something is cut"
        state = (
            now.put((state, batch), mesh=now.mesh(devices))[0]
            if before is None
            else shardplan.reshard(state, before, now, devices=devices)
        )
        run, before = now.jit(step, devices), now
        for _ in range(3):
            state, loss = run(state, batch)
            losses.append(float(loss))
        assert run.cache_size() == 1, "the state arrives as the step returns it"
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    for a, b in zip(*map(jax.tree.leaves, (state, one)), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("offload", ["none", ["*/velocity/*"]], ids=["on devices", "velocities in host memory"])
def test_a_checkpoint_is_restored_in_the_layouts_of_another_plan(eager: Any, offload: Any, tmp_path: Path) -> None:
    """The recipe of docs/replanning.md."""
    step, args = train_step()
    plan = shardplan.plan(step, *args, cluster=eager, donate_argnums=0, offload=offload)
    state = plan.put(args)[0]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)

    new = shardplan.replan(plan, smaller(plan.cluster, 1))
    mesh = new.mesh(jax.devices()[4:8])
    shapes = jax.eval_shape(lambda s: s, args[0])
    target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, new.in_shardings(mesh)[0])
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", target)

    for a, b, s in zip(*map(jax.tree.leaves, (restored, args[0], new.in_shardings(mesh)[0])), strict=True):
        assert a.sharding.is_equivalent_to(s, a.ndim)
        assert a.sharding.memory_kind == s.memory_kind
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(restored)}
    assert kinds == ({"device"} if offload == "none" else {"device", "pinned_host"})


def test_what_stays_in_host_memory_is_decided_anew() -> None:
    """Alone on two devices, the moments fit nowhere else."""

    def step(state: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        g = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(state["w"])
        m, v = 0.9 * state["m"] + g, 0.9 * state["v"] + g * g
        return {"w": state["w"] - 0.1 * m / (jnp.sqrt(v) + 1e-3), "m": m, "v": v}

    w, x = jax.ShapeDtypeStruct((2048, 2048), "float32"), jax.ShapeDtypeStruct((256, 2048), "float32")
    state, options = dict.fromkeys("wmv", w), {"donate_argnums": 0, "memory_limit": "35MiB"}
    plan = shardplan.plan(step, state, x, cluster="1x8", offload="auto", **options)
    assert not plan.offloaded
    again = shardplan.replan(plan, "1x2")
    assert again.offloaded == shardplan.plan(step, state, x, cluster="1x2", offload="auto", **options).offloaded
    assert again.offloaded
    assert again.peak_bytes <= again.memory_limit
    with pytest.raises(shardplan.MemoryLimitError):
        shardplan.replan(plan, "1x2", offload="none")
    alone = shardplan.plan(step, state, x, cluster="1x2", donate_argnums=0)
    assert shardplan.replan(alone, "1x2", offload=["*/m"]).offloaded == {0}
    assert shardplan.replan(again, "1x8").offloaded == frozenset()


def squares(w: jax.Array, x: jax.Array) -> Any:
    """The gradient of weights that the step does not return, so that no argument may stay in host memory."""

    def loss(w: jax.Array) -> jax.Array:
        hidden = x
        for n in range(len(w)):
            hidden = jnp.tanh(hidden @ w[n])
        return jnp.sum(hidden**2)

    return jax.grad(loss)(w)


SQUARES = jax.ShapeDtypeStruct((8, 64, 64), "float32"), jax.ShapeDtypeStruct((8192, 64), "float32")


@pytest.mark.parametrize("option", ["offload", "remat"])
def test_a_plan_fits_only_by_what_is_asked_for(option: str) -> None:
    """The old layouts are of a program that recomputes or has activations in host memory: no plan without it."""
    free = shardplan.plan(squares, *SQUARES, cluster="1x2")
    auto: dict[str, Any] = {option: "auto"}
    none: dict[str, Any] = {option: "none"}
    limit = free.peak_bytes * 4 // 5
    plan: Any = shardplan.plan(squares, *SQUARES, cluster="1x2", memory_limit=limit, traced=free.traced, **auto)
    assert plan.data.remat.parts
    assert bool(plan.data.hosted) == (option == "offload")
    with pytest.raises(shardplan.MemoryLimitError):
        shardplan.replan(plan, "1x2", **none)
    again: Any = shardplan.replan(plan, "1x2")
    assert (again.data.hosted, again.data.remat) == (plan.data.hosted, plan.data.remat)
