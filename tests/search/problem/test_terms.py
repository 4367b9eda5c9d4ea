"""Tables and elimination: restriction is slicing, equal tables are one, the order is a matter of speed only."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import gpt
from shardplan.mesh import Cluster
from shardplan.search.coarsening.variables import FREE
from shardplan.search.inference.eliminate import Eliminator, Order, find_order
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem import Problem, pricing
from shardplan.search.problem.cost_tables import BIG, Costs, TableStore, Term, picoseconds
from shardplan.search.problem.pricing import table_of, useful
from tests.search import steps

Drawn = tuple[list[int], list[tuple[tuple[int, ...], np.ndarray]]]


@st.composite
def sums_of_tables(draw: st.DrawFn) -> Drawn:
    """Sizes of variables, and tables over some of them, entries infinite among them."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    scopes = draw(st.lists(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=3, unique=True), min_size=1, max_size=8))
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    terms: list[tuple[tuple[int, ...], np.ndarray]] = []
    for scope in scopes:
        table = random.integers(0, 20, [sizes[v] for v in scope]) * 1000
        table[random.random(table.shape) < 0.1] = BIG
        terms.append((tuple(scope), table.astype(np.int64)))
    return sizes, terms


def _added(sizes: list[int], terms: list[tuple[tuple[int, ...], np.ndarray]]) -> np.ndarray:
    total = np.zeros(sizes, np.int64)
    for at in itertools.product(*map(range, sizes)):
        total[at] = min(BIG, sum(int(table[tuple(at[v] for v in scope)]) for scope, table in terms))
    return total


@given(drawn=sums_of_tables())
def test_elimination_finds_the_minimum_and_where_it_is(drawn: Drawn) -> None:
    sizes, terms = drawn
    store = TableStore()
    interned = [Term(scope, *store.intern(table)) for scope, table in terms]
    found, at = Eliminator(store).solve(interned, sizes, find_order([t.scope for t in interned], sizes))
    every = _added(sizes, terms)
    assert min(found, BIG) == int(every.min())
    assert found >= BIG or int(every[tuple(at)]) == found


@given(drawn=sums_of_tables(), data=st.data())
@pytest.mark.slow
def test_every_order_finds_the_same_minimum(drawn: Drawn, data: st.DataObject) -> None:
    sizes, terms = drawn
    store = TableStore()
    interned = [Term(scope, *store.intern(table)) for scope, table in terms]
    scopes = [t.scope for t in interned]
    order = find_order(scopes, sizes)
    shuffled = tuple(data.draw(st.permutations(order.variables)))
    other = Order(shuffled, (), order.largest, order.total)
    one, two = (Eliminator(store).solve(interned, sizes, o)[0] for o in (order, other))
    assert min(one, BIG) == min(two, BIG)


@st.composite
def strategies(draw: st.DrawFn) -> list[np.ndarray]:
    """What strategies cost for each of a few variables in each of its states: infinite now and then."""
    count, seed = draw(st.integers(1, 12)), draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    columns = [random.integers(0, 6, (count, n)) for n in draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))]
    for column in columns:
        column[random.random(column.shape) < 0.15] = BIG
    return columns


def _cheapest(columns: list[np.ndarray]) -> np.ndarray:
    total = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        total = total[..., None] + column.reshape(len(column), *[1] * (total.ndim - 1), -1)
    return np.minimum(total.min(axis=0), BIG)


@given(columns=strategies())
def test_strategies_left_out_are_nowhere_the_cheapest(columns: list[np.ndarray]) -> None:
    axis, kept = useful(columns)
    for state, rows in enumerate(kept.T):
        here = [c[:, [state]] if i == axis else c for i, c in enumerate(columns)]
        assert np.array_equal(_cheapest(here), _cheapest([c[rows] for c in here]))


@given(columns=strategies(), chunk=st.sampled_from([1, 7, 400_000]), many=st.sampled_from([0, 400_000]))
def test_a_table_holds_the_cheapest_strategy_for_every_choice(columns: list[np.ndarray], chunk: int, many: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pricing, "_CHUNK", chunk)
        patched.setattr(pricing, "_MANY", many)
        assert np.array_equal(table_of(columns), _cheapest(columns))


def test_strategies_that_another_beats_are_left_out() -> None:
    _, kept = useful([np.array([[1, 2], [3, 2], [BIG, 1]])])
    assert kept.tolist() == [[True, True], [False, False], [False, True]]
    _, kept = useful([np.array([[1, 2], [BIG, BIG]])])
    assert kept.tolist() == [[True, True], [False, False]]


def test_the_column_that_leaves_the_fewest_sums_is_gone_through() -> None:
    alike, apart = np.array([[5, 5], [5, 5], [5, 5]]), np.array([[0, 9], [9, 0], [9, 9]])
    for columns, best in (([alike, apart], 1), ([apart, alike], 0)):
        axis, kept = useful(columns)
        assert (axis, np.count_nonzero(kept)) == (best, 3)


@given(drawn=sums_of_tables())
def test_the_order_names_each_open_variable_once_and_predicts_its_tables(drawn: Drawn) -> None:
    sizes, terms = drawn
    order = find_order([scope for scope, _ in terms], sizes)
    assert sorted(order.variables) == [v for v, n in enumerate(sizes) if n > 1]
    # run it on paper: a variable meets those that share a table with it, and leaves one table over them
    tables = [{v for v in scope if sizes[v] > 1} for scope, _ in terms]
    total = 0
    for v, around in zip(order.variables, order.neighbours, strict=True):
        mine = [t for t in tables if v in t]
        met = set[int]().union(*mine) - {v}
        assert met == set(around)
        entries = int(np.prod([sizes[u] for u in (v, *met)]))
        assert entries <= order.largest
        total += entries
        tables = [t for t in tables if v not in t] + [met]
    assert total == order.total


@given(drawn=sums_of_tables())
def test_equal_tables_are_one_with_their_minimum_beside_them(drawn: Drawn) -> None:
    _, terms = drawn
    store = TableStore()
    for _, table in terms:
        first, low = store.intern(table)
        again, higher = store.intern(np.where(table >= BIG, BIG, table + 7000))
        assert first == again
        assert higher == low + 7000 or low >= BIG
        kept = store.tables[first]
        assert kept.min() == 0
        assert np.array_equal(np.minimum(kept + low, BIG), np.minimum(table, BIG))


def test_infinite_seconds_are_big_and_survive_being_added() -> None:
    costs = picoseconds(np.array([1.5e-12, 1e-3, np.inf, 1e9]))
    assert costs.tolist() == [2, 10**9, BIG, 10**15]
    assert np.all(np.full(100, BIG, np.int64).sum() > 0)


@settings(max_examples=25)
@given(recipe=steps.recipes(), data=st.data())
def test_a_restriction_is_a_slice(recipe: steps.Recipe, data: st.DataObject) -> None:
    problem = steps.problem(recipe.step, *recipe.args(), on=steps.cluster())
    domains = data.draw(steps.subdomains(problem, 4))
    whole, part = problem.terms(problem.domains), problem.terms(domains)
    for a, b in zip(whole, part, strict=True):
        assert a.scope == b.scope
        own = [[problem.domains[v].index(s) for s in domains[v]] for v in a.scope]
        table = problem.store.tables[a.table][np.ix_(*own)] + a.constant
        assert np.array_equal(np.minimum(table, BIG), np.minimum(problem.store.tables[b.table] + b.constant, BIG))


@pytest.mark.slow
def test_depth_adds_no_tables() -> None:
    """Isomorphic layers share every table, and every elimination of one."""
    tables: list[int] = []
    for layers in (3, 4, 6):
        step, args = gpt.train_step(layers=layers)
        problem = steps.problem(step, *args, on=Cluster.load("2x4"))
        problem.terms(problem.domains)
        tables.append(len(problem.store.tables))
    assert tables[0] == tables[1] == tables[2]


def test_a_term_of_one_variable_alone_is_found_by_it() -> None:
    step, args = gpt.train_step(layers=1)
    problem = steps.problem(step, *args, on=Cluster.load("4"))
    every = problem.terms(problem.domains)
    for v in range(len(problem.domains)):
        mine = summed(problem, [t for t in every if v in t.scope])
        alone = summed(problem, problem.terms_of(v, problem.domains))
        assert mine.keys() == alone.keys()
        assert all(np.array_equal(mine[scope], alone[scope]) for scope in mine)


def summed(problem: Problem, terms: Sequence[Term]) -> dict[tuple[int, ...], Costs]:
    """By scope: the sum of its terms."""
    result: dict[tuple[int, ...], Costs] = {}
    for t in terms:
        costs = problem.store.tables[t.table] + t.constant
        result[t.scope] = np.minimum(result[t.scope] + costs if t.scope in result else costs, BIG)
    return result


def test_ops_that_cost_the_same_in_the_same_variables_are_one_term() -> None:
    """Tied layers cost a multiple of one: the number of terms does not grow with depth, and the sum is that of all."""
    counts: list[int] = []
    for layers in (4, 8):
        step, args = gpt.train_step(layers=layers)
        problem = steps.problem(step, *args, on=Cluster.load("4"), one_choice="layers")
        terms = problem.terms(problem.domains)
        counts.append(len(terms))
        one_by_one = [t for s in problem.summands for t in problem._terms_of(s, problem.domains, {}, None, {})]
        assert len(terms) < len(one_by_one)
        assert sum(t.constant for t in terms) == sum(t.constant for t in one_by_one)
        mine, alone = summed(problem, terms), summed(problem, one_by_one)
        assert mine.keys() == alone.keys()
        assert all(np.array_equal(mine[scope], alone[scope]) for scope in mine)
    assert counts[1] < counts[0] * 1.2


def test_many_times_an_infinite_cost_is_infinite() -> None:
    problem = steps.problem(lambda a, b: a @ b, steps.array(4, 8), steps.array(8, 4), on=Cluster.load("4"))
    table, _ = problem.store.intern(np.array([0, 5, BIG]))
    many = problem._times(Term((0,), table, 7), 10_000)
    assert problem.store.tables[many.table].tolist() == [0, 50_000, BIG]
    assert many.constant == 70_000


@pytest.mark.parametrize("scan", [False, True])
def test_scopes_are_those_of_the_terms(scan: bool) -> None:
    step, args = gpt.train_step(layers=2, scan=scan)
    problem = steps.problem(step, *args, on=Cluster.load("4"))
    assert {*problem.scopes} == {t.scope for t in problem.terms(problem.domains)}
    assert sorted(problem.scopes) == sorted(s.scope for s, times in problem.op_classes.under(None).summands for _ in range(times))
    # the summands are those of the graph: each op that joins variables, each view, each loop link between layouts
    kinds = Counter(s.kind for s in problem.summands)
    coarse = problem.coarse
    joins = [
        n
        for n in coarse.joins
        if any(t >= 0 and coarse.of[t] != FREE for t in (*problem.graph.nodes[n].inputs, *problem.graph.nodes[n].outputs))
    ]
    ends = [(coarse.of[k.source], coarse.of[k.target], k.lift) for k in problem.graph.links]
    assert kinds["op"] == len(joins) > 20
    assert kinds["view"] == sum(v.kind != "stored" for v in coarse.variables) > 0
    assert kinds["link"] == sum(a != FREE and (a != b or lift != 0) for a, b, lift in ends)
    assert (kinds["link"] > 0) == scan


def test_ops_that_may_not_take_the_same_strategies_are_not_alike() -> None:
    step, args = gpt.train_step(layers=4)
    problem = steps.problem(step, *args, on=Cluster.load("4"), one_choice="layers")
    free = problem.op_classes.under(None)
    n = next(n for n, first in free.first.items() if first != n)
    held = pricing.Limits({n: (frozenset({-1}),)})
    both = pricing.Limits({n: (frozenset({-1}),), free.first[n]: (frozenset({-1}),)})
    assert problem.standing_for(n, held) == n != problem.standing_for(n) == problem.standing_for(n, both)
    states = tuple(d[-1] for d in problem.domains)
    for limits in (None, held, both):
        each = [problem._terms_of(s, [(at,) for at in states], {}, limits, {}) for s in problem.summands]
        one_by_one = sum(t.constant + problem.store.tables[t.table].item() for terms in each for t in terms)
        assert problem.seconds(states, {}, limits) == pytest.approx(one_by_one / 1e12)
    assert problem.seconds(states, {}, held) > problem.seconds(states, {})


@pytest.mark.parametrize("shape", ["4", "2x2"])
def test_the_cost_of_a_solution_is_the_sum_of_its_terms(shape: str) -> None:
    problem = _small(shape)
    solver = Solver(problem, memory.liveness(problem))
    solution, seconds = solver.minimum("x", problem.domains)
    keep_s = problem.regathered(solution.keep)
    assert problem.seconds(solution.states, keep_s) == pytest.approx(seconds, abs=1e-15)


def _small(shape: str) -> Problem:
    step, args = gpt.train_step(layers=1)
    return steps.problem(step, *args, on=Cluster.load(shape))
