"""The beam beyond exact tables: its bound holds, it is exact where it says so, and steps too entangled for tables are planned."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardplan
from models import gpt, mlp
from shardplan.constants import CONSTANTS
from shardplan.mesh import Cluster
from shardplan.search.baselines.tofu_premise import everything_cut
from shardplan.search.inference.beam import beam, best, most_promising
from shardplan.search.inference.eliminate import Eliminator, find_order
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem import ops
from shardplan.search.problem.cost_tables import BIG, TableStore, Term
from shardplan.search.problem.pricing import Limits
from tests.machines import launchless
from tests.oracles import ilp
from tests.search import nets, steps
from tests.search.problem.test_terms import Drawn, sums_of_tables


def _cost(store: TableStore, terms: Sequence[Term], assignment: Sequence[int]) -> int:
    return sum(t.constant + int(store.tables[t.table][tuple(assignment[v] for v in t.scope)]) for t in terms)


@settings(max_examples=300)
@given(drawn=sums_of_tables(), entries=st.sampled_from([1, 4, 16, 1000]), width=st.sampled_from([1, 2, 30]))
def test_the_beam_finds_no_less_than_the_minimum_and_bounds_it_from_below(drawn: Drawn, entries: int, width: int) -> None:
    sizes, drawn_terms = drawn
    store = TableStore()
    terms = [Term(scope, *store.intern(table)) for scope, table in drawn_terms]
    order = find_order([t.scope for t in terms], sizes)
    minimum, _ = Eliminator(store).solve(terms, sizes, order)
    found = beam(Eliminator(store), terms, sizes, order, entries=entries, width=width)
    assert min(found.bound, BIG) <= min(minimum, BIG)
    assert found.bound <= found.cost
    if found.cost < BIG:
        assert _cost(store, terms, found.assignment) == found.cost >= minimum
    if order.largest <= entries:
        assert min(found.cost, BIG) == min(minimum, BIG)


def _entangled(variables: int, states: int, seed: int) -> tuple[TableStore, list[Term], list[int]]:
    """A table for every pair of variables."""
    random, store = np.random.default_rng(seed), TableStore()
    pairs = itertools.combinations(range(variables), 2)
    terms = [Term(pair, *store.intern(random.integers(0, 1000, (states, states)))) for pair in pairs]
    return store, terms, [states] * variables


def test_wide_enough_a_beam_proves_the_minimum_with_tables_far_too_small() -> None:
    store, terms, sizes = _entangled(8, 3, seed=1)
    order = find_order([t.scope for t in terms], sizes)
    minimum, _ = Eliminator(store).solve(terms, sizes, order)
    gaps: list[int] = []
    for entries, width in ((9, 1), (81, 20), (243, 3**8)):
        found = beam(Eliminator(store), terms, sizes, order, entries=entries, width=width)
        assert found.bound <= minimum <= found.cost
        gaps.append(found.cost - found.bound)
    assert order.largest == 3**8
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 0 == gaps[-1]


def test_costs_moved_between_parts_raise_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardplan.search.inference import beam as module

    store, terms, sizes = _entangled(7, 3, seed=2)
    order = find_order([t.scope for t in terms], sizes)
    with_ = beam(Eliminator(store), terms, sizes, order, entries=9, width=1).bound
    monkeypatch.setattr(module, "shares", lambda least: list(least))
    without = beam(Eliminator(store), terms, sizes, order, entries=9, width=1).bound
    assert without < with_


def test_where_tables_allow_the_minimum_is_exact_and_beyond_it_is_bounded() -> None:
    step, args = nets.all_to_all(8)
    problem = steps.problem(step, *args, on=Cluster.load("8"))
    solver = Solver(problem, memory.liveness(problem))
    order = solver.order(problem.domains)
    assert order.largest > 10_000_000
    terms, sizes = problem.terms(problem.domains), problem.ops.sizes(problem.domains)
    minimum, _ = solver.eliminator.solve(terms, sizes, order)
    assert best(Eliminator(problem.store), terms, sizes, order).cost == minimum
    found = beam(Eliminator(problem.store), terms, sizes, order, entries=CONSTANTS.beam_part_entries, width=CONSTANTS.beam_width)
    assert found.cost == found.bound == minimum, "the beam proves it"
    narrow = beam(Eliminator(problem.store), terms, sizes, order, entries=1000, width=2)
    assert narrow.bound <= minimum <= narrow.cost < 1.3 * minimum


@pytest.mark.parametrize(
    ("layers", "cluster"),
    [
        pytest.param(12, "8", marks=pytest.mark.slow),
        pytest.param(16, "8", marks=pytest.mark.slow),
        pytest.param(8, "2x4", marks=pytest.mark.slow),
        pytest.param(10, "2x4", marks=pytest.mark.slow),
    ],
)
def test_layers_that_all_read_each_other_are_planned(layers: int, cluster: str) -> None:
    """Proved to be the best, but for ten layers, where collectives cost their messages alone; with launches, nearly."""
    step, args = nets.all_to_all(layers)
    for machine in (launchless(Cluster.load(cluster)), Cluster.load(cluster)):
        plan = shardplan.plan(step, *args, cluster=machine, donate_argnums=0, factors={}, time_model="sum")
        assert plan.exact or plan.gap < 1e-9 or layers == 10 or (machine.device.instruction_s and plan.gap < 0.03)
        assert plan.lower_bound_s <= plan.step_time_s
        data = plan.completed()
        assert plan.exact == (data.searched_s <= (data.bound_s or 0.0) and not data.replaced)
        assert all(plan.step_time_s <= b.step_time_s for b in plan.baselines)


@pytest.mark.parametrize("cluster", ["8", *(pytest.param(shape, marks=pytest.mark.slow) for shape in ("2x4", "2x2x2"))])
def test_an_op_with_many_operands_is_planned(cluster: str) -> None:
    step, args = nets.tables(26)
    plan = shardplan.plan(step, *args, cluster=cluster, donate_argnums=0, backend="specs", factors={}, time_model="sum")
    assert plan.gap < 0.01
    assert plan.exact or cluster == "2x2x2"
    assert all(plan.step_time_s <= b.step_time_s for b in plan.baselines)
    if cluster != "8":  # where the fastest plan is not among the smallest
        limited = shardplan.plan(
            step, *args, cluster=cluster, donate_argnums=0, memory_limit=int(0.9 * plan.peak_bytes), time_model="sum"
        )
        assert limited.peak_bytes <= 0.9 * plan.peak_bytes


@pytest.mark.parametrize("count", [40, pytest.param(70, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"memory_limit": "800KiB"}, marks=pytest.mark.slow), {"objective": "bytes"}], ids=str
)
def test_an_op_with_more_operands_than_an_array_has_axes_is_planned(count: int, options: dict[str, Any], tmp_path: Path) -> None:
    step, args = nets.pieces(count)
    plan = shardplan.plan(step, *args, cluster="2x4", **options)
    assert plan.lower_bound_s <= plan.step_time_s
    assert plan.baselines
    plan.save(tmp_path / "plan.json")
    assert shardplan.load(tmp_path / "plan.json", step, *args).step_time_s == plan.step_time_s


@pytest.mark.slow
def test_a_saved_plan_of_ops_with_many_operands_takes_as_long_as_before(tmp_path: Path) -> None:
    step, args = nets.tables(26)
    plan = shardplan.plan(step, *args, cluster="8", donate_argnums=0)
    assert plan.session.problem.ops.opened(plan.session.problem.domains)
    plan.save(tmp_path / "plan.json")
    again = shardplan.load(tmp_path / "plan.json", step, *args)
    assert again.step_time_s == plan.step_time_s >= plan.lower_bound_s


@pytest.mark.slow
def test_a_bound_that_was_proved_is_kept_when_the_search_is_stopped() -> None:
    step, args = nets.all_to_all(10)

    def interrupt(what: str, _part: float) -> None:
        if what == "search":
            raise KeyboardInterrupt

    problem = steps.problem(step, *args, on=Cluster.load("2x4"))
    best, least_s = Solver(problem, memory.liveness(problem)).bounded("x", problem.domains)
    assert least_s < best.seconds
    plan = shardplan.plan(step, *args, cluster="2x4", donate_argnums=0, observer=interrupt, time_model="sum")
    assert plan.stopped == "interrupted"
    assert plan.lower_bound_s >= least_s


def test_of_equally_promising_assignments_the_first_go_on() -> None:
    each = np.array([[5, 1], [1, 5], [1, 1], [9, 1], [1, 1], [2, 1], [1, 3]])
    states = {0: np.arange(7)}
    rows, own, dropped = most_promising(each, states, 1, (0, 1), [7, 2], 1)
    assert (rows.tolist(), own.tolist(), dropped) == ([0], [1], 1)
    rows, own, _ = most_promising(each, states, 1, (0, 1), [7, 2], 2)
    assert list(zip(rows.tolist(), own.tolist(), strict=True)) == [(0, 1), (1, 0)]


def test_partial_assignments_that_cannot_be_completed_are_said() -> None:
    """Both parts of the first variable's tables allow what no assignment is: found out too late, with one state going on."""
    store = TableStore()
    random = np.random.default_rng(3)
    none = 0
    for _ in range(300):
        pairs = itertools.combinations(range(5), 2)
        tables = [np.where(random.random((2, 2)) < 0.45, BIG, random.integers(0, 9, (2, 2))) for _ in range(10)]
        terms = [Term(pair, *store.intern(table)) for pair, table in zip(pairs, tables, strict=True)]
        order = find_order([t.scope for t in terms], [2] * 5)
        minimum, _ = Eliminator(store).solve(terms, [2] * 5, order)
        found = beam(Eliminator(store), terms, [2] * 5, order, entries=4, width=1)
        none += minimum < BIG <= found.cost
        assert min(found.bound, BIG) <= min(minimum, BIG)
    assert none > 0


@settings(max_examples=40, deadline=None)
@given(recipe=steps.recipes(), data=st.data())
def test_ops_with_a_variable_for_their_strategy_have_the_same_minimum(recipe: steps.Recipe, data: st.DataObject) -> None:
    problem = steps.problem(recipe.step, *recipe.args(), on=steps.cluster())
    domains = data.draw(steps.subdomains(problem, 5))
    groups = data.draw(st.sampled_from([(), ((0, 1),)]))
    cuts = everything_cut(problem).cuts if data.draw(st.booleans()) else {}
    limits = Limits(cuts, groups) if groups or cuts else None

    def minimum(entries: int) -> float:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(ops, "CONSTANTS", replace(CONSTANTS, open_entries=entries))
            opened = problem.ops.opened(domains)
            scopes = {t.scope for t in problem.terms(domains, limits=limits)}
            assert scopes <= {*problem.scopes_on(domains)}  # ops that cost the same have one term
            assert not cuts or scopes == {*problem.scopes_on(domains)}
            assert not opened or entries == 0
            return Solver(problem, memory.liveness(problem)).minimum("x", domains, limits=limits)[1]

    assert minimum(0) == minimum(1 << 17)


@settings(max_examples=40, deadline=None)
@given(recipe=steps.recipes(), data=st.data())
def test_the_least_of_ops_is_that_of_their_tables(recipe: steps.Recipe, data: st.DataObject) -> None:
    problem = steps.problem(recipe.step, *recipe.args(), on=steps.cluster())
    domains = data.draw(steps.subdomains(problem, 4))
    for v in range(len(domains)):
        others = Counter(problem.terms_of(v, domains, ops=False))
        expected = np.zeros(len(domains[v]), np.int64)
        for term in (Counter(problem.terms_of(v, domains)) - others).elements():
            rest = tuple(i for i, u in enumerate(term.scope) if u != v)
            expected = np.minimum(expected + problem.store.tables[term.table].min(axis=rest) + term.constant, BIG)
        assert problem.ops.least(v, domains).tolist() == expected.tolist()


@pytest.mark.slow
def test_a_price_on_bytes_is_charged_to_ops_with_a_variable_for_their_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they hold in each strategy and layout: with the layouts and the fastest strategy known as much as in one table."""
    step, args = nets.tables(3)
    problem = steps.problem(step, *args, on=Cluster.load("2x4"))
    buffers, price = memory.liveness(problem).buffers, 1e-12
    monkeypatch.setattr(ops, "CONSTANTS", replace(CONSTANTS, open_entries=0))
    opened = problem.ops.opened(problem.domains)
    charged = 0
    for n, strategy in opened.items():
        node = problem.graph.nodes[n]
        scope = problem.ops.slots(node)[0]
        terms = {t.scope: t for t in memory.price_terms(problem, memory.liveness(problem), [n], price, problem.domains)}
        columns = [problem.store.tables[terms[strategy, v].table] + terms[strategy, v].constant for v in scope]
        last = tuple((d[-1],) for d in problem.domains)
        table = buffers.table(node, None, last)[1].item()
        base, costs = problem.pricer.strategy_costs(node.costed, *problem.ops.slots(node)[1:], tuple(last[v] for v in scope))
        fastest = int((base + sum(c[:, 0] for c in costs)).argmin())
        assert sum(int(c[fastest, -1]) for c in columns) == pytest.approx(price * table * 1e12, abs=len(scope))
        charged += table > 0
    assert charged > 0


@pytest.mark.slow
def test_equal_ops_in_the_same_variables_share_the_variable_for_their_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A strategy with smaller buffers costs time in every op, not only in that whose term stands for the others."""
    step, args = gpt.train_step(layers=3)
    problem = steps.problem(step, *args, on=Cluster.load("4"), one_choice="layers")
    live = memory.liveness(problem)
    monkeypatch.setattr(ops, "CONSTANTS", replace(CONSTANTS, open_entries=0))
    opened = problem.ops.opened(problem.domains)
    timed = {t.scope for t in problem.terms(problem.domains)}
    others = [n for n in opened if problem.standing_for(n) != n]
    assert others
    for n in others[:8]:
        strategies = {opened[n], opened[problem.standing_for(n)]}
        charged = {t.scope for t in memory.price_terms(problem, live, [n], 1e-12, problem.domains)}
        own = {scope for scope in charged if not strategies.isdisjoint(scope)}
        assert own
        assert own <= timed


def test_the_integer_program_takes_variables_for_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    step, args = mlp.train_step(layers=1)
    problem = steps.problem(step, *args, on=Cluster.load("4"))
    closed = ilp.solve(problem).picoseconds
    monkeypatch.setattr(ops, "CONSTANTS", replace(CONSTANTS, open_entries=0))
    opened = ilp.solve(problem)
    assert closed is not None
    assert opened.picoseconds is not None
    assert opened.picoseconds == closed
    assert len(opened.states) == len(problem.domains)
