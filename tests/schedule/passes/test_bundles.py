"""Moves with the same collective travel together, where that saves more than the copies to and from the buffer cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from models import gpt
from shardplan.collectives.issued import StepCost
from shardplan.ir import Collective
from shardplan.mesh import Cluster
from shardplan.planning import choose
from shardplan.planning.choose import Fastest
from shardplan.planning.scheduled import Scheduled, scheduled
from shardplan.report.plan_text import bound_text
from shardplan.schedule import Barrier, Bundle, Move, build, instructions_of, issued, windows
from shardplan.search.inference import anytime
from shardplan.search.session import Session
from shardplan.verify.mutate import DroppingExplicitEmitter
from shardplan.verify.verify import verify
from tests.machines import machine

WEIGHTS = {f"w{n}": jax.random.normal(jax.random.key(n), (32, 32)) / 6 for n in range(5)}
BATCH = jax.random.normal(jax.random.key(9), (64, 32))


def slow_to_start(launch_s: float = 1e-4) -> Cluster:
    """A machine on which a collective takes long to start."""
    slow = machine("2x4:slow")
    return replace(slow, device=replace(slow.device, collective_launch_s=launch_s))


def step(weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        h = x
        for name in sorted(weights):
            h = jnp.tanh(h @ weights[name])
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def planned(spec: Any, cluster: Cluster) -> shardplan.Plan:
    """A plan of which nothing hides: the fewer collectives start, the better."""
    pins = {"weights/*": spec, "x": P("gpu")}
    return shardplan.plan(step, WEIGHTS, BATCH, cluster=cluster, pins=pins, donate_argnums=0, time_model="sum")


def moves(plan: shardplan.Plan, kind: type | tuple[type, ...]) -> list[Any]:
    return [i for i in instructions_of(plan.schedule.body.instructions) if isinstance(i, kind)]


@pytest.mark.parametrize(
    ("spec", "kinds"), [(P(), {Collective.ALL_REDUCE}), (P(None, "gpu"), {Collective.ALL_GATHER, Collective.REDUCE_SCATTER})]
)
def test_small_weights_travel_together(devices: list[Any], spec: Any, kinds: set[str]) -> None:
    plan = planned(spec, slow_to_start())
    bundles = moves(plan, Bundle)
    assert {b.step.kind for b in bundles} >= kinds
    assert max(len(b.moves) for b in bundles) >= len(WEIGHTS)
    assert plan.step_time_s < plan.searched_s
    found = verify(plan, step, (WEIGHTS, BATCH), steps=2)
    assert found.passed, found


def test_biases_travel_together_past_the_matrices_between_them() -> None:
    """The gradient of a matrix gains nothing in a bundle. It comes between the biases of its layer and of the next, and used to
    end the bundle of the former.
    """
    step, args = gpt.train_step(layers=4, width=768, heads=12, batch=8, sequence=1024, vocabulary=4096)
    plan = shardplan.plan(step, *args, cluster="8", donate_argnums=0, factors={})
    scattered = [c for c in plan.collectives if c.kind == Collective.REDUCE_SCATTER]
    small = [c for c in scattered if c.bytes / (1 + len(c.along)) < 1e6]
    assert len(small) == 1
    assert len(small[0].along) > 30
    assert len(scattered) > 8  # the products' large gradients, each behind the rest of the backward pass
    assert plan.step_time_s == pytest.approx(plan.searched_s, rel=0.01)


def test_what_hides_alone_does_not_wait_for_others(devices: list[Any]) -> None:
    """A gradient that is reduced behind the rest of the backward pass stays alone; one that nothing hides is bundled."""
    pins, batch = {"weights/*": P(), "x": P("gpu")}, jnp.concatenate([BATCH, BATCH])
    plan = shardplan.plan(step, WEIGHTS, batch, cluster=slow_to_start(5e-5), pins=pins, donate_argnums=0, factors={})
    reduced = [len(i.moves) if isinstance(i, Bundle) else 1 for i in moves(plan, (Bundle, Move)) if "reduce" in _kind(i)]
    assert 1 in reduced
    assert max(reduced) > 1
    at_once = replace(plan.planned, overlaps=False)  # as if nothing could hide
    together = build(at_once)
    assert len(list(instructions_of(together.body.instructions))) < len(list(instructions_of(plan.schedule.body.instructions)))
    sent = issued(together, at_once, windows(together, at_once))
    cost = StepCost(issued=sent, compute_s=plan.compute_s, contention=slow_to_start().device.contention, host_s=0.0)
    assert plan.step_time_s < cost.step_time_s
    found = verify(plan, step, (WEIGHTS, batch), steps=2)
    assert found.passed, found


def _kind(instruction: Bundle | Move) -> str:
    return instruction.steps[0].kind


def test_leaving_out_a_bundle_is_noticed(devices: list[Any]) -> None:
    plan = planned(P(None, "gpu"), slow_to_start())
    emitter = DroppingExplicitEmitter(plan.planned, plan.mesh(), -1, plan.schedule)
    jax.eval_shape(emitter, *jax.tree.leaves((WEIGHTS, BATCH)))
    assert 0 < len(emitter.exchanges) < 3 * len(WEIGHTS)
    assert not any(verify(plan, step, (WEIGHTS, BATCH), steps=1, drop=n).equal for n in range(len(emitter.exchanges)))


def test_nothing_waits_where_starting_costs_nothing() -> None:
    plan = planned(P(None, "gpu"), slow_to_start(0.0))
    assert moves(plan, Move)
    assert not moves(plan, Bundle)


def test_a_fitting_baseline_that_is_faster_once_bundled_is_the_plan(tmp_path: Path) -> None:
    plan = shardplan.plan(step, WEIGHTS, BATCH, cluster=slow_to_start(2e-4), time_model="sum")
    fitting = [b.step_time_s for b in plan.baselines if b.fits]
    assert plan.step_time_s <= min(fitting) * (1 + 1e-9)
    assert plan.step_time_s < scheduled(_search_alone(plan)).step_time_s
    assert not plan.exact
    text = bound_text(plan.completed())
    assert text.startswith(f"at most {plan.gap:.1%} above the optimum")
    assert text.endswith("; a baseline was chosen: as scheduled it is faster than what the search found")
    plan.save(tmp_path / "plan.json")
    assert shardplan.load(tmp_path / "plan.json", step, WEIGHTS, BATCH).step_time_s == plan.step_time_s


def _search_alone(plan: shardplan.Plan) -> Session:
    """The session with the search's own plan."""
    other = shardplan.plan(step, WEIGHTS, BATCH, cluster=plan.cluster, time_model="sum", backend="specs")
    assert other.searched_s == plan.searched_s
    return other.session


def test_a_plan_that_runs_out_of_time_among_baselines_says_so() -> None:
    session = _search_alone(shardplan.plan(step, WEIGHTS, BATCH, cluster=slow_to_start(), time_model="sum"))
    for deadline, unfinished in ((anytime.now_s() - 1, True), (None, False)):
        fastest = Fastest(session, deadline)
        fastest.among_baselines()
        assert fastest.unfinished == unfinished


def test_the_most_promising_of_the_other_solutions_are_scheduled_first() -> None:
    session = _search_alone(shardplan.plan(step, WEIGHTS, BATCH, cluster=slow_to_start(2e-4), time_model="sum"))
    every = [(scheduled(session.at(s)).step_time_s, session.at(s)) for s in session.rivals.solutions]
    fastest_s, fastest = min(every, key=lambda row: row[0])
    assert fastest_s < scheduled(session).step_time_s
    slowest = max(every, key=lambda row: row[0])[1]
    found = Fastest(session)
    found.among([slowest] * 5 + [fastest])
    assert (found.session, found.run.step_time_s) == (fastest, fastest_s)


def test_in_haste_the_most_promising_other_solution_is_looked_at() -> None:
    """The search's own plan is the slower one as scheduled, where collectives take long to start."""
    plan = shardplan.plan(step, WEIGHTS, BATCH, cluster=slow_to_start(2e-4), time_model="sum")
    whole, alone = plan.session, _search_alone(plan)
    assert scheduled(whole).step_time_s < scheduled(alone).step_time_s
    fastest = Fastest(alone)
    fastest.among([whole], patience=1)
    assert fastest.session is whole


def test_an_interrupt_among_baselines_keeps_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, calls = scheduled, iter(range(9))

    def second_raises(session: Session) -> Scheduled:
        if next(calls):
            raise KeyboardInterrupt
        return whole(session)

    monkeypatch.setattr(choose, "scheduled", second_raises)
    plan = shardplan.plan(step, WEIGHTS, BATCH, cluster=slow_to_start())
    assert plan.stopped == "interrupted"
    assert plan.step_time_s > 0


def test_gradients_wait_for_the_layer_before_to_be_computed_again() -> None:
    """What a remat op of the backward pass made is reduced behind the barrier of the next one."""

    def descend(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            h = x
            for name in sorted(weights):
                h = jax.checkpoint(lambda w, h: jnp.tanh(jnp.sin(h @ w)))(weights[name], h)
            return jnp.mean(h**2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    plan = shardplan.plan(descend, WEIGHTS, BATCH, cluster=machine("2x4:slow"), pins={"weights/*": P(), "x": P(("node", "gpu"))})
    own = list(instructions_of(plan.schedule.body.instructions))
    behind = {r for i in own if isinstance(i, Barrier) for r in i.results}
    moved = [m for i in own if isinstance(i, Move | Bundle) for m in (i.moves if isinstance(i, Bundle) else (i,))]
    reduced = [m for m in moved if m.before.partial]
    assert len(reduced) >= len(WEIGHTS)
    assert sum(m.source in behind for m in reduced) >= len(WEIGHTS) - 1
    assert verify(plan, descend, (WEIGHTS, BATCH), steps=2).passed
