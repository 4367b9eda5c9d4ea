"""The search over factorings: it finds the best of all of them, is never worse than over whole levels, and says what it tried."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import shardplan
from models import gpt, mlp
from shardplan.constants import CONSTANTS
from shardplan.cost import TIME
from shardplan.ir import Factor
from shardplan.mesh import Cluster, factors
from shardplan.mesh.machine import Interconnect, LinkKind
from shardplan.planning import candidate_problem
from shardplan.planning.factorings import best_of_factorings, refined
from shardplan.planning.splits import alike, levels_of, splits
from shardplan.planning.wanted import Wanted
from shardplan.search.inference import bound
from shardplan.search.inference.bound import least_s
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem import Problem
from shardplan.search.problem.pricing import Limits
from tests.machines import machine
from tests.models.test_factories import TINY, each_tiny, factory
from tests.search import steps

SMALL = ("4", "6", "8", "9", "12", "2x4", "3x4", "4x2", "2x6")


PLACES: dict[str, tuple[str, tuple[LinkKind, ...]]] = {
    "ring of 8": ("8", ("ring",)),
    "ring of 6": ("6", ("ring",)),
    "two domains": ("8", ("ring",)),
    "bus of 8": ("8", ("bus",)),
    "torus": ("3x4", ("ring", "ring")),
    "rails": ("2x4", ("switch", "switch")),
    "islands": ("2x2x2", ("switch", "switch", "switch")),
    "rings on a switch": ("2x4", ("switch", "ring")),
}
"""Machines on which devices of one level are not alike: sizes of levels, and what joins the children of each."""


def placed(where: str, gbps: float) -> Cluster:
    """One of `PLACES`, its slowest level of ``gbps``, each further one four times faster."""
    shape, kinds = PLACES[where]
    base = steps.cluster(shape, gbps=tuple(gbps * 4**i for i in range(len(kinds))))
    levels = [replace(level, kind=kind) for level, kind in zip(base.levels, kinds, strict=True)]
    if where == "two domains":
        levels[0] = replace(levels[0], also=Interconnect("pcie", 4, gbps * 0.25e9, 2e-9))
    if where == "rails":
        levels[0] = replace(levels[0], rails=4)
    return replace(base, levels=tuple(levels))


def products(n: int) -> Iterator[tuple[int, ...]]:
    """Every ordered product of divisors that makes a number."""
    if n == 1:
        yield ()
    for first in range(2, n + 1):
        if n % first == 0:
            yield from ((first, *rest) for rest in products(n // first))


def all_factorings(cluster: Cluster) -> list[tuple[Factor, ...]]:
    levels = [level for level in cluster.levels if level.size > 1]
    parts = itertools.product(*(products(level.size) for level in levels))
    return [factors(cluster, {level.name: own for level, own in zip(levels, one, strict=True)}) for one in parts]


def wanted(over: tuple[Factor, ...] | None = None) -> Wanted:
    return Wanted(10**15, frozenset(), {}, None, lambda _what, _part: None, TIME, over)


@pytest.mark.parametrize("kind", ["ring", "switch"])
def test_every_ordered_product_is_reached_by_splits(kind: LinkKind) -> None:
    """On a switch, where all places are alike, one of those with equal parts; each refines the one that it is split from."""
    cluster = Cluster.load("2x12")
    cluster = replace(cluster, levels=tuple(replace(level, kind=kind, rails=1) for level in cluster.levels))
    reached = {factors(cluster)}
    waiting = list(reached)
    while waiting:
        coarse = waiting.pop()
        for one in splits(cluster, coarse, [(1.0, (24,))]):
            seams = {(f.level, f.stride) for f in one}
            assert seams > {(f.level, f.stride) for f in coarse}
            if one not in reached:
                reached.add(one)
                waiting.append(one)
    every = [of for of in all_factorings(cluster) if len(of) <= 4]
    if kind == "ring":
        assert reached == set(every)
    assert {alike(cluster, one) for one in reached} == {alike(cluster, one) for one in every}
    assert len({alike(cluster, one) for one in every}) < len(every) or kind == "ring"
    assert levels_of(cluster, factors(cluster, {"gpu": (3, 4)})) == {"node": (2,), "gpu": (3, 4)}


@pytest.mark.slow
@settings(max_examples=40)
@given(recipe=steps.recipes(), shape=st.sampled_from(SMALL), gbps=st.sampled_from([1.0, 10.0, 100.0]))
def test_the_best_of_all_factorings_is_found(recipe: steps.Recipe, shape: str, gbps: float) -> None:
    """Every layout of every factoring, by exact elimination, itself held to all assignments elsewhere."""
    check_against_every_factoring(recipe, steps.cluster(shape, gbps=(gbps, 100.0)))


@settings(max_examples=24)
@given(recipe=steps.recipes(), where=st.sampled_from(sorted(PLACES)), gbps=st.sampled_from([2.0, 10.0, 50.0]))
@pytest.mark.slow
def test_the_best_placement_is_found(recipe: steps.Recipe, where: str, gbps: float) -> None:
    """Where it matters which devices form a group: every layout of every factoring holds every placement of a level's parts."""
    check_against_every_factoring(recipe, placed(where, gbps))


def check_against_every_factoring(recipe: steps.Recipe, cluster: Cluster) -> None:
    """Holds the search to the exact minimum over all layouts of all ordered factorings."""
    whole = steps.problem(recipe.step, *recipe.args(), on=cluster)
    least = math.inf
    for of in all_factorings(cluster):
        problem = Problem(whole.graph, whole.coarse, cluster, of, like=whole)
        solver = Solver(problem, memory.liveness(problem))
        assume(solver.order(problem.domains).largest <= 3_000_000)
        solution, seconds = solver.minimum("optimum", problem.domains)
        assert solution.seconds >= least_s(problem) * (1 - 1e-9)
        least = min(least, seconds)
    problem, outcome = best_of_factorings(whole.graph, whole.coarse, cluster, wanted(), {})
    assert outcome.best.seconds == pytest.approx(least, rel=2e-6, abs=2 * problem.rounding_s)


@pytest.mark.parametrize("name", each_tiny())
def test_a_finer_factoring_is_never_worse(name: str) -> None:
    """A plan over whole levels costs the same over their parts, where it is a start: for every model."""
    step, args = factory(name)(**TINY[name])
    cluster = machine("2x8:slow")
    whole = steps.problem(step, *args, on=cluster)
    found = best_of_factorings(whole.graph, whole.coarse, cluster, wanted(factors(cluster)), {})
    for split in ({"gpu": (2, 4)}, {"gpu": (4, 2)}, {"gpu": (2, 2, 2)}):
        fine = Problem(whole.graph, whole.coarse, cluster, factors(cluster, split), like=found[0])
        solver = Solver(fine, memory.liveness(fine))
        for start, one in zip(refined(fine, found), dict.fromkeys([found[1].best, found[1].free]), strict=True):
            assert all(s in d for s, d in zip(start.states, fine.domains, strict=True))
            alike = Limits(groups=(tuple(f for f, factor in enumerate(fine.factors) if factor.level == 1),))
            again = solver.rate("plan", start.states, fine.regathered(start.keep), start.regather, alike)
            assert again.seconds == pytest.approx(one.seconds, rel=1e-9, abs=2 * fine.rounding_s)
            assert again.peak_bytes == pytest.approx(one.peak_bytes, rel=1e-9)
            free = solver.rate("plan", start.states, fine.regathered(start.keep), start.regather)
            assert free.seconds <= one.seconds * (1 + 1e-9) + 2 * fine.rounding_s


@pytest.mark.slow
def test_the_plan_says_which_factorings_were_tried() -> None:
    step, args = gpt.train_step(layers=1, width=64, heads=4, batch=4, sequence=32, vocabulary=128)
    told: list[float] = []
    plan = shardplan.plan(step, *args, cluster=machine("8:slow"), time_model="sum", observer=lambda _, part: told.append(part))
    rows = plan.provenance["factorings"]
    assert rows[0]["factors"] == {"gpu": [8]}
    assert {tuple(row["factors"]["gpu"]) for row in rows} >= {(8,), (2, 2, 2)}
    searched = [row for row in rows if row["seconds"] is not None]
    assert all(row["bound_s"] <= row["seconds"] * (1 + 1e-9) for row in searched)
    own = {"gpu": [f.size for f in plan.factors]}
    assert [row["seconds"] for row in searched if row["factors"] == own] == [pytest.approx(plan.searched_s)]
    assert told == sorted(told)
    alone = shardplan.plan(step, *args, cluster=machine("8:slow"), factors={"gpu": 8}, time_model="sum")
    assert alone.axes == {"gpu": 8}
    assert plan.step_time_s < alone.step_time_s
    parts = shardplan.plan(step, *args, cluster=machine("8:slow"), factors={"gpu": (2, 2, 2)})
    assert list(parts.axes.values()) == [2, 2, 2]


def test_an_interrupt_ends_the_search_of_all_factorings() -> None:
    """Twelve devices begin as 12 and as 4x3; the first is stopped, the second is not begun."""
    step, args = mlp.train_step(width=2048, batch=4096)
    told: list[str] = []

    def interrupt(what: str, _part: float) -> None:
        told.append(what)
        if what == "search" and told.count("search") == 1:
            raise KeyboardInterrupt

    plan = shardplan.plan(step, *args, cluster="12", observer=interrupt, donate_argnums=0)
    assert plan.stopped == "interrupted"
    assert [row["seconds"] is None for row in plan.provenance["factorings"]] == [False]
    assert "tables" not in told[told.index("search") :]


def test_a_factoring_that_a_shard_map_forbids_is_left_out_with_the_reason() -> None:
    mesh = jax.sharding.AbstractMesh((8,), ("gpu",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        h = jax.shard_map(lambda b: b * 2, mesh=mesh, in_specs=PartitionSpec("gpu"), out_specs=PartitionSpec("gpu"))(x)
        return jnp.tanh(h @ w)

    array = jax.ShapeDtypeStruct((256, 256), "float32")
    rows = shardplan.plan(step, array, array, cluster="8").provenance["factorings"]
    reasons = {str(row["why"]) for row in rows if row["seconds"] is None}
    assert reasons
    assert all("shard_map" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gpu": (2, 2)}, "makes 4, the level has 8"),
        ({"gpus": (2, 4)}, "no level 'gpus'"),
        ({"gpu": (1, 8)}, "a part of 1 cuts nothing"),
        ({"gpu": "2x4"}, "give the sizes"),
        ({"gpu": (0, 8)}, "give the sizes"),
        ([2, 4], "not a mapping"),
    ],
)
def test_factors_that_are_none_of_a_cluster(given: Any, said: str) -> None:
    step, args = mlp.train_step()
    with pytest.raises(shardplan.ClusterError, match=said):
        shardplan.plan(step, *args, cluster="8", factors=given)


def test_more_layouts_than_can_be_searched_are_refused() -> None:
    step, args = gpt.train_step(**TINY["gpt"])
    with pytest.raises(shardplan.ClusterError, match=r"over 6 factors .* has \d+ layouts, and at most 5000"):
        shardplan.plan(step, *args, cluster="64", donate_argnums=0, factors={"gpu": (2,) * 6})


def test_a_factoring_with_too_many_layouts_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    step, args = mlp.train_step(**TINY["mlp"])
    monkeypatch.setattr(candidate_problem, "CONSTANTS", replace(CONSTANTS, most_layouts=10))
    plan = shardplan.plan(step, *args, cluster=machine("8:slow"))
    assert len(plan.factors) == 2
    said = {len(row["factors"]["gpu"]): row["why"] for row in plan.provenance["factorings"]}
    assert "at most 10 can be searched" in said[3]
    assert not said[1]


def test_where_its_tables_are_too_large_the_bound_is_that_of_the_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    step, args = mlp.train_step(**TINY["mlp"])
    plan = partial(shardplan.plan, step, *args, cluster=machine("2x2x2:slow"), donate_argnums=0, factors={"gpu": 2})
    tight = plan()
    assert bound.entries(tight.session.problem, tight.session.problem.domains) > 1000
    assert least_s(tight.session.problem) < tight.lower_bound_s < tight.step_time_s * (1 + 1e-9)
    monkeypatch.setattr(bound, "CONSTANTS", replace(CONSTANTS, bound_entries=1000))
    loose = plan()
    assert 0 < least_s(loose.session.problem) == loose.lower_bound_s < tight.lower_bound_s
