"""`plan(..., offload=)`: results are those of the step, and state stays in its memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import shardplan
from models import mlp
from shardplan.errors import ClusterError, MemoryLimitError, OffloadError, ShardplanError
from shardplan.schedule import HostCopy
from shardplan.schedule.instructions import Barrier, results_of
from shardplan.verify.verify import verify
from tests.machines import machine
from tests.models.test_factories import TINY, factory

MOMENTS = ["*/mu/*", "*/nu/*"]


def planned(name: str, on: str = "2x4:slow", **options: Any) -> tuple[shardplan.Plan, Any, Any]:
    step, args = factory(name)(**TINY[name], concrete=True)
    return shardplan.plan(step, *args, cluster=machine(on), donate_argnums=0, offload=MOMENTS, **options), step, args


def kinds(tree: Any) -> list[str]:
    return [x.sharding.memory_kind for x in jax.tree.leaves(tree)]


@pytest.mark.quick
@pytest.mark.parametrize("backend", ["explicit", "specs"])
def test_three_steps_are_equal_and_state_stays_in_host_memory(backend: str) -> None:
    plan, step, args = planned("mlp", backend=backend)
    found = verify(plan, step, args, steps=3, backend=backend, devices=jax.devices()[:8])
    assert found.equal, (found.worst, found.unequal)
    if backend == "explicit":
        assert found.passed, found
        assert not found.unmatched
    run, placed = plan.jit(step), plan.put(jax.tree.map(np.asarray, args))
    wanted = [s.memory_kind for s in jax.tree.leaves(plan.in_shardings(plan.mesh()))]
    assert wanted.count("pinned_host") == len(plan.data.offloaded) > 0
    assert kinds(placed) == wanted
    for _ in range(3):
        state, *_ = results = run(*placed)
        assert kinds(results) == [s.memory_kind for s in jax.tree.leaves(plan.out_shardings(plan.mesh()))]
        placed = (state, *placed[1:])
        assert kinds(placed) == wanted
    assert run.cache_size() == 1


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["explicit", "specs"])
def test_gpt_is_equal_with_its_moments_in_host_memory(backend: str) -> None:
    plan, step, args = planned("gpt", backend=backend)
    found = verify(plan, step, args, steps=3, backend=backend, devices=jax.devices()[:8])
    assert found.equal, (found.worst, found.unequal)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_moments_in_host_memory_go_with_microbatches(name: str) -> None:
    alone, _, _ = planned(name)
    plan, step, args = planned(name, memory_limit=int(0.95 * alone.peak_bytes), microbatches=2)
    assert plan.data.offloaded
    assert plan.microbatches.count == 2
    found = verify(plan, step, args, steps=3, devices=jax.devices()[:8])
    assert found.passed, found


@pytest.mark.slow
def test_moments_in_host_memory_go_with_recomputed_activations() -> None:
    limit = planned("gpt")[0].peak_bytes // 2
    with pytest.raises(MemoryLimitError):
        planned("gpt", memory_limit=limit)
    plan, step, args = planned("gpt", memory_limit=limit, remat="auto")
    assert plan.data.offloaded
    assert plan.data.remat.parts
    found = verify(plan, step, args, steps=3, devices=jax.devices()[:8])
    assert found.passed, found


@pytest.mark.quick
def test_each_array_waits_for_a_value_and_for_the_copy_before_it() -> None:
    plan, _, _ = planned("mlp")
    body = plan.schedule.body
    copies = [i for i in body.instructions if isinstance(i, HostCopy)]
    fetched, sent = ([c for c in copies if c.memory == memory] for memory in ("device", "pinned_host"))
    assert len(fetched) == len(sent) == len(plan.data.offloaded)
    barriers = {r: b for b in body.instructions if isinstance(b, Barrier) for r in b.results}
    for before, copy in zip([None, *sent], fetched, strict=False):
        behind = barriers[copy.source].values
        assert behind[0] in barriers or behind[0] in body.parameters
        assert len(behind) == (2 if before is None else 3), "itself, what its reader waits for, the copy that left last"


@pytest.mark.quick
def test_a_plan_with_state_in_host_memory_is_saved_and_loaded(tmp_path: Path) -> None:
    plan, step, args = planned("mlp")
    plan.save(tmp_path / "plan.json")
    loaded = shardplan.load(tmp_path / "plan.json", step, *args)
    assert loaded.data == plan.data
    names = [[(type(i), results_of(i)) for i in one.schedule.body.instructions] for one in (loaded, plan)]
    assert names[0] == names[1]
    state = loaded.init(lambda: args[0])
    assert "pinned_host" in kinds(state)
    assert kinds(state) == [s.memory_kind for s in jax.tree.leaves(plan.in_shardings(plan.mesh())[0])]


@pytest.mark.quick
def test_reports_say_what_lies_in_host_memory() -> None:
    from shardplan.report.json import plan_json
    from shardplan.report.plan_text import plan_text

    plan, _, _ = planned("mlp")
    data = plan.completed()
    assert "host memory" in plan_text(data)
    assert "copies from host memory and back" in plan_text(data)
    assert "In host memory:" in plan.explain()
    found = plan_json(data)
    assert found["host_s"] == data.host_s > 0
    assert found["host_bytes"] == data.host_bytes > 0
    assert all("/mu/" in path or "/nu/" in path for path in found["offloaded"])
    timeline = plan.simulate()
    assert timeline.busy_s["compute"] >= data.compute_s + data.host_s


@pytest.mark.quick
def test_options_that_are_none_are_refused() -> None:
    step, args = mlp.train_step()
    on = machine("2x4:slow")
    assert not shardplan.plan(step, *args, cluster=on, offload=()).data.offloaded
    for wrong in ("always", "", [1], 3):
        with pytest.raises(ShardplanError, match="unsupported offload="):
            shardplan.plan(step, *args, cluster=on, offload=wrong)
    with pytest.raises(OffloadError, match="state/params"):
        shardplan.plan(step, *args, cluster=on, offload=["state/params/*"])
    bare = replace(on, device=replace(on.device, host_bytes_per_s=None))
    with pytest.raises(ClusterError, match=r"device\.host_bytes_per_s"):
        shardplan.plan(step, *args, cluster=bare, offload=MOMENTS)
    with pytest.raises(ShardplanError, match="offload"):
        shardplan.plan(step, *args, cluster=on, offload=MOMENTS, axes={"stage": 2}, microbatches=2)


@pytest.mark.quick
def test_a_new_plan_keeps_what_lies_in_host_memory_and_state_moves_to_it() -> None:
    plan, _, args = planned("mlp")
    smaller = shardplan.replan(plan, machine("4:slow"))
    assert smaller.data.offloaded == plan.data.offloaded
    state = plan.put(jax.tree.map(np.asarray, args))[0]
    there = shardplan.reshard(state, plan, smaller, devices=jax.devices()[:4])
    assert kinds(there) == kinds(state)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(there), strict=True):
        assert np.array_equal(np.asarray(before), np.asarray(after))


@pytest.mark.slow
@pytest.mark.quick
def test_as_little_lies_in_host_memory_as_the_limit_asks_for() -> None:
    step, args = factory("mlp")(**TINY["mlp"])
    on = machine("2x4:slow")
    with pytest.raises(MemoryLimitError) as caught:
        shardplan.plan(step, *args, cluster=on, donate_argnums=0, memory_limit=64)
    smallest = caught.value.smallest_bytes
    plain = shardplan.plan(step, *args, cluster=on, donate_argnums=0, memory_limit=smallest)
    traced = plain.traced
    options: dict[str, Any] = {"cluster": on, "donate_argnums": 0, "traced": traced}
    roomy = shardplan.plan(step, *args, offload="auto", memory_limit=smallest, **options)
    assert not roomy.data.offloaded, "it fits without"
    assert roomy.step_time_s == plain.step_time_s
    with pytest.raises(MemoryLimitError):
        shardplan.plan(step, *args, memory_limit=smallest - 100, **options)
    tight = shardplan.plan(step, *args, offload="auto", memory_limit=smallest - 100, **options)
    assert tight.peak_bytes <= smallest - 100
    every = shardplan.plan(step, *args, offload=MOMENTS, memory_limit=smallest - 100, **options)
    assert tight.data.offloaded < every.data.offloaded, "not all have to"
    assert tight.data.host_s < every.data.host_s
    with pytest.raises(MemoryLimitError, match="with values in host memory") as nothing:
        shardplan.plan(step, *args, offload="auto", memory_limit=64, **options)
    assert nothing.value.offloaded
