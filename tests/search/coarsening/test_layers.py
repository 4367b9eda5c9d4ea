"""One choice for equal layers: found by their ops alone, equal in the plan, and what it gives up."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardplan
from models import gpt, llama, mlp, rnn
from shardplan.frontend.trace import trace
from shardplan.graph import flatten
from shardplan.search.coarsening import coarsen
from shardplan.search.coarsening.layers import repeats
from shardplan.search.strategy.pins import all_or_none_pinned
from shardplan.shell.cli import main
from tests.search import steps

SMALL: dict[str, Any] = {"width": 128, "sequence": 32, "batch": 32}


def graph_of(step: Any, args: Any) -> Any:
    return flatten(trace(step, *args).program)


@pytest.mark.parametrize("factory", [pytest.param(gpt, marks=pytest.mark.slow), llama], ids=["gpt", "llama"])
def test_every_layer_of_an_unrolled_model_is_found_once_in_each_pass(factory: Any) -> None:
    """Blocks forward and backward; the same ones whatever the depth."""
    found = [{p for _, p in repeats(graph_of(*factory.train_step(layers=n)))} for n in (3, 5)]
    assert found[0] == found[1]
    assert len(found[0]) == 2
    covered = [len({j for i, p in repeats(graph_of(*factory.train_step(layers=n))) for j in (i, i + p)}) for n in (3, 5)]
    assert covered[1] - covered[0] == 2 * sum(found[0]), "two layers more: twice a block of each pass more"


def test_what_does_not_repeat_is_no_layer() -> None:
    def step(a: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ a) @ b)

    assert repeats(graph_of(step, (steps.array(8, 16), steps.array(16, 4), steps.array(4, 8)))) == []


def test_the_update_of_one_parameter_after_another_is_no_layer() -> None:
    def step(ws: list[jax.Array]) -> list[jax.Array]:
        return [w - 0.1 * (w + jnp.sin(w)) for w in ws]

    graph = graph_of(step, ([steps.array(8, 8)] * 4,))
    assert repeats(graph) == []
    assert len(coarsen(graph, "layers").variables) == 4


@pytest.mark.parametrize("cluster", [pytest.param("2x4", marks=pytest.mark.slow), "8"])
@pytest.mark.parametrize("factory", [gpt, pytest.param(llama, marks=pytest.mark.slow)], ids=["gpt", "llama"])
def test_equal_layers_lie_alike(factory: Any, cluster: str) -> None:
    options = {"layers": 3, **({k: v for k, v in SMALL.items() if factory is gpt})}
    step, args = factory.train_step(**options)
    plan = shardplan.plan(step, *args, cluster=cluster, donate_argnums=0, one_choice="layers")
    specs: dict[str, set[Any]] = {}
    for path, spec in plan.specs_by_path.items():
        if re.search(r"/\d+/", path):
            specs.setdefault(re.sub(r"/(blocks|layers)/\d+/", "/*/", path), set()).add(spec)
    assert len(specs) > 10
    assert all(len(found) == 1 for found in specs.values())
    coarse = plan.session.problem.coarse
    for n, p in repeats(plan.session.problem.graph):
        a, b = (plan.session.decisions.uses.get(i) for i in (n, n + p))
        if a is not None and b is not None and coarse.of[plan.session.problem.graph.nodes[n].outputs[0]] >= 0:
            assert a.needs == b.needs


@pytest.mark.slow
def test_what_one_choice_gives_up_is_little() -> None:
    """On a transformer of three layers: at most 2% of a step, and about a third of the layouts to choose."""
    step, args = gpt.train_step(layers=3, **SMALL)
    free, shared = (shardplan.plan(step, *args, cluster="2x4", donate_argnums=0, one_choice=c) for c in ("timesteps", "layers"))
    assert shared.searched_s <= free.searched_s * 1.02
    counts = [len(p.session.problem.coarse.variables) for p in (free, shared)]
    assert counts[1] < 0.5 * counts[0]


def deep(limit: float, **options: Any) -> shardplan.Plan:
    """The plan of six layers."""
    step, args = gpt.train_step(**{**SMALL, "layers": 6})
    return shardplan.plan(step, *args, cluster="2x4", donate_argnums=0, memory_limit=limit, **options)


@pytest.mark.slow
def test_the_planner_ties_equal_layers_where_there_are_many_and_memory_costs_nothing() -> None:
    roomy, shared, free = deep(2**40), deep(2**40, one_choice="layers"), deep(2**40, one_choice="timesteps")
    assert roomy.one_choice == "layers"
    assert (roomy.flat_in_specs, roomy.step_time_s) == (shared.flat_in_specs, shared.step_time_s)
    assert roomy.step_time_s <= free.step_time_s * 1.002


@pytest.mark.slow
def test_where_memory_is_short_each_layer_may_lie_in_its_own_way() -> None:
    """The plan is no slower than either search alone."""
    limit = 0.75 * deep(2**40).peak_bytes
    short, shared, free = deep(limit), deep(limit, one_choice="layers"), deep(limit, one_choice="timesteps")
    assert short.peak_bytes <= limit
    assert short.searched_s <= min(shared.searched_s, free.searched_s) * 1.002


@pytest.mark.slow
def test_an_interrupt_of_the_search_of_single_layers_leaves_the_plan_of_tied_ones() -> None:
    step, args = gpt.train_step(**{**SMALL, "layers": 6})
    told: list[float] = []

    def interrupts(_what: str, part: float) -> None:
        told.append(part)
        if part > 0.5:
            raise KeyboardInterrupt

    # without a limit, the plan holds 31.6 MB
    plan = shardplan.plan(step, *args, cluster="4", donate_argnums=0, memory_limit=23_700_000, observer=interrupts)
    assert (plan.one_choice, plan.stopped, plan.exact) == ("layers", "interrupted", False)
    assert told == sorted(told)


def test_a_pin_of_one_layer_binds_no_other() -> None:
    step, args = gpt.train_step(**{**SMALL, "layers": 6})
    graph = graph_of(step, args)
    tied = coarsen(graph, "layers")
    assert all_or_none_pinned(graph, tied, {})
    assert all_or_none_pinned(graph, tied, {"state/0/blocks/*/mlp/up/kernel": ()})
    assert not all_or_none_pinned(graph, tied, {"state/0/blocks/0/mlp/up/kernel": ()})
    assert not all_or_none_pinned(graph, tied, {"*": (), "state/0/blocks/0/*": ()})


@pytest.mark.slow
def test_few_layers_are_not_tied() -> None:
    step, args = gpt.train_step(**{**SMALL, "layers": 2})
    assert shardplan.plan(step, *args, cluster="2x4", donate_argnums=0).one_choice == "timesteps"


def test_timesteps_share_one_choice_unless_that_is_turned_off() -> None:
    step, args = rnn.train_step(layers=1, hidden=32, steps=4, batch=16)
    counts = {c: len(coarsen(graph_of(step, args), c).variables) for c in ("none", "timesteps", "layers")}
    assert counts["none"] > counts["timesteps"]
    assert counts["timesteps"] >= counts["layers"]
    plans = {c: shardplan.plan(step, *args, cluster="4", one_choice=c) for c in ("none", "timesteps")}
    assert plans["none"].exact
    assert plans["none"].searched_s <= plans["timesteps"].searched_s * (1 + 1e-6)


def test_a_plan_keeps_what_shared_one_choice(tmp_path: Any) -> None:
    step, args = mlp.train_step(layers=4)
    made = shardplan.plan(step, *args, cluster="2x4", one_choice="layers")
    made.save(tmp_path / "plan.json")
    again = shardplan.load(tmp_path / "plan.json", step, *args)
    assert again.session.problem.coarse.one_choice == "layers"
    assert (again.flat_in_specs, again.step_time_s) == (made.flat_in_specs, made.step_time_s)


def test_a_plan_with_one_choice_runs_and_is_equal() -> None:
    from shardplan.verify.verify import verify

    step, args = mlp.train_step(layers=4, concrete=True)
    plan = shardplan.plan(step, *args, cluster="2x2", one_choice="layers", memory_limit=2**40)
    assert verify(plan, step, args, devices=jax.devices()[:4]).equal


def test_another_word_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        shardplan.ShardplanError, match="unsupported one_choice 'blocks': use 'none', 'timesteps' or 'layers', or 'auto'"
    ):
        shardplan.plan(*mlp.train_step()[:1], *mlp.train_step()[1], cluster="4", one_choice="blocks")
    assert main(["plan", "models.mlp:train_step", "--cluster", "4", "--one-choice", "blocks"]) == 2
    assert "unsupported one_choice 'blocks'" in capsys.readouterr().err
