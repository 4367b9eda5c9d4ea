"""Pipelines whose groups run two chunks of layers each: the same numbers, and chosen where they are faster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardplan
from models import gpt, mlp
from shardplan.dag.pipelines import folded, looped
from shardplan.mesh import Cluster
from shardplan.placement.device_topology import DeviceTopology
from shardplan.planning.planner import Made
from shardplan.regions import group_plans
from shardplan.regions.dispatch import dispatched
from shardplan.regions.issues import Dispatch, Issue
from shardplan.regions.schedules import started, waiting_tasks
from shardplan.regions.tasks import PlacedTaskGraph
from shardplan.regions.virtual_stages import most_in_flight, two_chunks
from shardplan.shell import placements
from shardplan.shell.placed_plan import PlacedPlan
from shardplan.verify.verify import verify
from tests.machines import machine
from tests.regions.test_pipelines import equal_stages


def residual(layers: int = 8, width: int = 16, batch: int = 32) -> tuple[Any, tuple[Any, ...]]:
    def step(weights: list[jax.Array], x: jax.Array) -> Any:
        def loss(weights: list[jax.Array]) -> jax.Array:
            y = x
            for w in weights:
                y = y + jnp.tanh(y @ w)
            return jnp.mean(y**2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value

    draw = np.random.default_rng(0)
    weights = [jnp.asarray(draw.normal(size=(width, width)) / 4, jnp.float32) for _ in range(layers)]
    return step, (weights, jnp.asarray(draw.normal(size=(batch, width)), jnp.float32))


def near() -> Cluster:
    """Two slow devices with a fast link."""
    return machine("2:eager")


def pipeline(step: Any, args: Any, microbatches: int, **axes: int) -> PlacedPlan:
    plan = shardplan.plan(step, *args, cluster=near(), axes={"stage": 2, **axes}, microbatches=microbatches, donate_argnums=(0,))
    return cast(PlacedPlan, plan)


@pytest.fixture(scope="module")
def chosen() -> PlacedPlan:
    return pipeline(*residual(), microbatches=2)


def test_two_chunks_are_chosen_where_they_are_faster(chosen: PlacedPlan) -> None:
    one = pipeline(*residual(), microbatches=2, chunk=1)
    assert one.chunks == looped(2, 1)
    assert chosen.chunks == folded(2)
    assert chosen.step_time_s < one.step_time_s
    assert len(chosen.groups) == len(one.groups) == 2
    assert "2 stages of 2 chunks" in chosen.explain()


@pytest.mark.parametrize("missing", [looped(2, 2), folded(2)])
def test_chunks_that_are_asked_for_are_planned_in_the_order_that_fits(
    missing: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = placements.chunked_plan

    def chunked(asked: Any, program: Any, groups: Any, chunks: tuple[int, ...]) -> PlacedPlan:
        if chunks == missing:
            raise shardplan.MemoryLimitError(1, 2)
        return real(asked, program, groups, chunks)

    monkeypatch.setattr(placements, "chunked_plan", chunked)
    plan = pipeline(*residual(4), microbatches=2, chunk=2)
    assert plan.chunks in {looped(2, 2), folded(2)} - {missing}


def test_an_interrupt_of_the_second_order_of_chunks_keeps_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    real = placements.chunked_plan

    def chunked(asked: Any, program: Any, groups: Any, chunks: tuple[int, ...]) -> PlacedPlan:
        if chunks == folded(2):
            raise KeyboardInterrupt
        return real(asked, program, groups, chunks)

    monkeypatch.setattr(placements, "chunked_plan", chunked)
    plan = pipeline(*residual(4), microbatches=2, chunk=2)
    assert (plan.chunks, plan.stopped) == (looped(2, 2), "interrupted")


def test_an_interrupt_of_chunks_that_are_slower_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = placements.chunked_plan

    def chunked(asked: Any, program: Any, groups: Any, chunks: tuple[int, ...]) -> PlacedPlan:
        plan = real(asked, program, groups, chunks)
        return plan.chosen_among((), "interrupted") if chunks == folded(2) else plan

    monkeypatch.setattr(placements, "chunked_plan", chunked)
    monkeypatch.setattr(placements, "_step_s", lambda plan: plan.chunks == folded(2))
    plan = pipeline(*residual(4), microbatches=2, chunk=2)
    assert (plan.chunks, plan.stopped) == (looped(2, 2), "interrupted")


def test_an_interrupt_of_one_stage_cuts_all_later_ones_short(monkeypatch: pytest.MonkeyPatch) -> None:
    real, limited = group_plans.planned, list[bool]()

    def planned(program: Any, searcher: Any, origin: str, *, recompute: bool) -> Made:
        limited.append(searcher.wanted.deadline is not None)
        made = real(program, searcher, origin, recompute=recompute)
        return replace(made, stopped="interrupted") if len(limited) == 1 else made

    monkeypatch.setattr(group_plans, "planned", planned)
    step, args = residual(4)
    plan = shardplan.plan(step, *args, cluster=machine("4:eager"), axes={"stage": 4, "chunk": 1}, microbatches=4)
    assert limited == [False, True, True, True]
    assert cast(PlacedPlan, plan).stopped == "interrupted"


def test_a_chunk_runs_its_passes_on_its_group(chosen: PlacedPlan) -> None:
    own = [p for p in chosen.placed.graph.pieces if p.kind is not None and not isinstance(p.own, str)]
    assert all(p.group == chosen.chunks[p.chunk] for p in own)
    passes = [(p.kind, p.chunk) for p in own if p.group == 1]
    assert passes == [
        ("forward", 1), ("forward", 2), ("backward", 2), ("weight", 2), ("backward", 1), ("weight", 1)
    ]  # fmt: skip
    assert {p.kind for p in own if p.chunk == 0} == {"forward", "both"}


def test_a_pipeline_in_chunks_trains_as_on_one_device(chosen: PlacedPlan) -> None:
    assert verify(chosen, *residual()).passed


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [4, 8])
def test_a_transformer_in_chunks_trains_as_on_one_device(microbatches: int) -> None:
    step, args = gpt.train_step(concrete=True, layers=4)
    plan = pipeline(step, args, microbatches, chunk=2)
    assert len(plan.chunks) == 4
    assert verify(plan, step, args).passed


def test_a_plan_in_chunks_comes_back_from_its_file(chosen: PlacedPlan, tmp_path: Path) -> None:
    step, args = residual()
    chosen.save(tmp_path / "plan.json")
    loaded = cast(PlacedPlan, shardplan.load(tmp_path / "plan.json", step, *args))
    assert loaded.chunks == chosen.chunks
    assert loaded.step_time_s == chosen.step_time_s
    assert [p.name for p in loaded.placed.graph.pieces] == [p.name for p in chosen.placed.graph.pieces]


@pytest.mark.parametrize(
    ("axes", "message"),
    [({"stage": 2, "chunk": 0}, "chunk=0 is no number of chunks"), ({"data": 2, "chunk": 2}, "chunk=2 .* give 'stage' too")],
    ids=str,
)
def test_chunks_that_cannot_be_are_refused(axes: dict[str, int], message: str) -> None:
    step, args = residual()
    with pytest.raises(shardplan.ClusterError, match=message):
        shardplan.plan(step, *args, cluster=near(), axes=axes, microbatches=4)


def test_more_chunks_than_equal_blocks_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    step, args = mlp.train_step(layers=6)  # the first layer and the last one have other shapes
    shardplan.plan(step, *args, cluster="4", axes={"stage": 2, "chunk": 2}, microbatches=4)
    assert not caplog.records
    shardplan.plan(step, *args, cluster="4", axes={"stage": 2, "chunk": 3}, microbatches=4)
    (one,) = caplog.records
    assert "has 4 equal blocks in a row, and 6 chunks may cut through them" in one.message
    assert one.message.endswith("compare plan.step_time_s with chunk=2")


def as_it_comes(graph: PlacedTaskGraph, devices: DeviceTopology) -> Dispatch:
    """The dispatch of tasks as soon as they can start."""
    return Dispatch(tuple(Issue(w.what, at, at + w.seconds) for w, at in started(waiting_tasks(graph, devices))))


@pytest.mark.parametrize(("count", "chunks"), [(2, folded(2)), (64, None)])
def test_chunks_are_tried_where_the_bubble_is_long(count: int, chunks: tuple[int, ...] | None) -> None:
    graph, devices = equal_stages(2, count)
    assert two_chunks(graph, as_it_comes(graph, devices), devices) == chunks


def test_microbatches_in_flight_are_those_of_the_dispatch() -> None:
    graph, devices = equal_stages(2, 4)
    assert most_in_flight(graph, dispatched(graph, devices, 0)) == 1
    assert most_in_flight(graph, dispatched(graph, devices)) == 2
    assert most_in_flight(graph, as_it_comes(graph, devices)) == 4
