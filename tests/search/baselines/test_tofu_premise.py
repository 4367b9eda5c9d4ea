"""Tofu's objective: bytes on the wire where everything is split, by recursion over the factors (its section 5 and appendix)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardplan
from models import gpt, mlp, rnn, wresnet
from shardplan.cost import BYTES
from shardplan.cost.wire import BYTE_S
from shardplan.frontend.trace import trace
from shardplan.graph import flatten
from shardplan.mesh import Cluster, factors
from shardplan.search.baselines.heuristics import heuristics
from shardplan.search.baselines.tofu_premise import everything_cut, everything_split
from shardplan.search.coarsening import coarsen
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem.cost_tables import BIG
from shardplan.search.problem.pricing import Allowed, Limits
from shardplan.search.problem.problem import Problem
from shardplan.search.problem.solution import Solution
from shardplan.search.strategy.recursion import RecursionResult, recurse
from tests.search.steps import array

TIES = 200
"""Bytes by which equals are told apart: one for each step of a program."""


def solver_of(step: Any, args: Sequence[Any], cluster: str) -> Solver:
    graph = flatten(trace(step, *args).program)
    known = Cluster.load(cluster)
    problem = Problem(graph, coarsen(graph), known, factors(known), objective=BYTES)
    return Solver(problem, memory.liveness(problem), everything_cut(problem))


def like(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def joint(solver: Solver) -> Solution:
    problem = solver.problem
    return solver.minimum("joint", everything_split(problem, problem.domains))[0]


def sent(solution: Solution) -> float:
    return solution.seconds / BYTE_S


def test_a_product_on_four_workers_is_partitioned_as_in_figure_6() -> None:
    """Step 1 by rows fetches half of B for each group, step 2 by columns half of A's rows: a 2 x 2 grid, nothing better."""
    n = 64
    solver = solver_of(lambda a, b: a @ b, (like(n, n), like(n, n)), "2x2")
    problem = solver.problem
    grid = []
    for variable in problem.coarse.variables:
        space = problem.resharder.space(variable.shape)
        grid.append(space.number((((0,), (1,), ()), ())))
    figure = solver.rate("figure 6", tuple(grid), {}, False)
    stepped = recurse(solver, problem.domains)
    assert sent(stepped.solution) == pytest.approx(sent(figure), abs=TIES)
    half = n * n * 4 / 2
    assert added_bytes(stepped, problem.sizes) == pytest.approx((2 * half, 4 * half / 2), abs=TIES)
    assert sent(joint(solver)) == pytest.approx(sent(figure), abs=TIES)


def added_bytes(stepped: RecursionResult, sizes: Sequence[int]) -> tuple[float, ...]:
    """What each step adds over all workers that there are by then (theorem 4's deltas)."""
    totals = [s / BYTE_S * math.prod(sizes[: i + 1]) for i, s in enumerate(stepped.after_s)]
    return tuple(b - a for a, b in zip([0.0, *totals], totals, strict=False))


chains = st.lists(st.sampled_from([16, 32, 64, 128, 256]), min_size=3, max_size=5)


def product(*matrices: jax.Array) -> jax.Array:
    found = matrices[0]
    for m in matrices[1:]:
        found = found @ m
    return found


@settings(max_examples=25, deadline=None)
@given(chains, st.sampled_from(["2x2", "2x2x2", "4x4"]))
def test_a_step_of_the_recursion_costs_no_more_than_the_next(sizes: list[int], cluster: str) -> None:
    """Theorem 4, under its assumptions: equal factors, dims that divide, nothing replicated, no halo."""
    solver = solver_of(product, [like(a, b) for a, b in itertools.pairwise(sizes)], cluster)
    added = added_bytes(recurse(solver, solver.problem.domains), solver.problem.sizes)
    slack = TIES * solver.problem.cluster.size
    assert all(a <= b + slack for a, b in itertools.pairwise(added)), added


@settings(max_examples=25, deadline=None)
@given(chains, st.sampled_from(["2x2", "4x4"]))
@pytest.mark.slow
def test_the_joint_solve_sends_no_more_than_the_recursion(sizes: list[int], cluster: str) -> None:
    """Theorem 5 says no less either, for costs that are sums over the steps; a move priced whole over both can be cheaper."""
    solver = solver_of(product, [like(a, b) for a, b in itertools.pairwise(sizes)], cluster)
    assert sent(joint(solver)) <= sent(recurse(solver, solver.problem.domains).solution) + TIES


@settings(max_examples=25, deadline=None)
@given(chains, st.data())
def test_steps_commute(sizes: list[int], data: st.DataObject) -> None:
    """Theorem 3: two steps of equal size in the other order send as many bytes.

    Each step cuts every product along another loop and splits every tensor along another dim: of blocks within blocks the order
    is part of the layout.
    """
    solver = solver_of(product, [like(a, b) for a, b in itertools.pairwise(sizes)], "2x2")
    problem = solver.problem
    space = problem.resharder.space((8, 8))
    cuts, layouts = {}, []
    for n in problem.coarse.joins:
        cuts[n] = data.draw(st.permutations(range(3)))[:2]
    for _ in problem.coarse.variables:
        layouts.append(tuple(data.draw(st.permutations([(0,), (1,)]))))

    def total(order: int) -> float:
        states = tuple(space.number(((*dims[::order], ()), ())) for dims in layouts)
        limits = Limits({n: tuple(frozenset({v}) for v in loops[::order]) for n, loops in cuts.items()})
        return sent(solver.rate("", states, {}, False, limits))

    assert total(1) == pytest.approx(total(-1), abs=TIES)


def test_under_the_premise_every_tensor_is_stored_once() -> None:
    step, args = mlp.train_step(batch=64, width=64)
    plan = shardplan.plan(step, *args, cluster="2x4", objective="bytes")
    assert plan.objective == "bytes"
    for spec, leaf in zip(plan.flat_in_specs, jax.tree.leaves(args), strict=True):
        ways = 1
        for entry in spec:
            for axis in () if entry is None else (entry,) if isinstance(entry, str) else entry:
                ways *= plan.axes[axis]
        assert ways == 8 or any(n % 8 for n in leaf.shape) or leaf.ndim == 0


def test_a_plan_for_bytes_sends_no_more_than_one_for_seconds_that_splits_all() -> None:
    step, args = rnn.train_step(layers=2, hidden=64, steps=4, batch=32)
    few = shardplan.plan(step, *args, cluster="8", objective="bytes", factors={})
    rivals = {b.name: b.communication_bytes for b in few.baselines}
    for name in ("AllRow-Greedy", "Spartan", "EqualChop", "ICML18"):
        assert few.communication_bytes <= rivals[name] * (1 + 1e-6), name


@pytest.mark.parametrize("model", [wresnet, gpt])
def test_a_plan_for_bytes_sends_no_more_than_its_search_found(model: Any) -> None:
    """The fastest cuts between the same layouts would send more. Emitted, what readers share is sent once."""
    step, args = model.train_step(batch=8)
    plan = shardplan.plan(step, *args, cluster="8", objective="bytes", factors={}, donate_argnums=0)
    assert plan.communication_bytes <= sent(joint(solver_of(step, args, "8"))) + TIES


def test_equal_chop_splits_one_dim_and_all_row_the_first_that_divides() -> None:
    solver = solver_of(product, [like(64, 32), like(32, 64)], "2x2")
    problem = solver.problem
    found = {r.name: r for r in heuristics(problem)}

    def dims(name: str) -> list[set[tuple[bool, ...]]]:
        spaces = [problem.resharder.space(v.shape) for v in problem.coarse.variables]
        domains = found[name].domains
        return [
            {tuple(bool(fs) for fs in space.state(s)[0][:-1]) for s in domain}
            for space, domain in zip(spaces, domains, strict=True)
        ]

    assert dims("AllRow-Greedy") == [{(True, False)}] * 3
    assert dims("EqualChop") == [{(True, False), (False, True)}] * 3
    assert all(len(domain) == 1 for domain in found["Spartan"].domains)


def test_icml18_never_leaves_a_sum_to_reduce() -> None:
    solver = solver_of(lambda x, w: jnp.sin(x @ w), (like(8, 4096), like(4096, 8)), "2x2")
    problem = solver.problem
    (contraction,) = (n for n in problem.coarse.joins if problem.graph.nodes[n].signature.call.primitive == "dot_general")
    description = problem.graph.nodes[contraction].signature.description
    assert description is not None
    sums = {v for v, info in enumerate(description.loops) if info.reducer is not None}
    by_name = {r.name: r.limits.cuts[contraction] for r in heuristics(problem)}
    assert all(not sums & may for may in by_name["ICML18"])
    assert all(sums & may for may in by_name["EqualChop"])


def test_a_pin_holds_under_the_premise_too() -> None:
    rows = (("rack", "node", "gpu"),)
    for pins in ({"a": P(None, *rows)}, {"a": P(None, *rows), "b": P(None, *rows)}, {"a": P()}):
        plan = shardplan.plan(lambda a, b: a @ b, like(64, 64), like(64, 64), cluster="2x2x2", objective="bytes", pins=pins)
        for path, spec in pins.items():
            assert plan.specs_by_path[path] == spec


LAYOUT_FREE = {
    "a mean of rows": lambda w, x: ((x - x.mean(0)) @ w).sum(),
    "one row written": lambda w, x: jnp.zeros((8, 12)).at[3].set(w[2]) + x.sum(),
    "a key that a loop carries": lambda w, x: jax.lax.scan(
        lambda k, r: (jax.random.split(k)[0], r * jax.random.normal(k, r.shape)), jax.random.key(0), w * x.sum()
    )[1],
    "a loop over rows": lambda w, x: jax.lax.scan(lambda c, r: (c + r.sum(), r * 2), 0.0, x)[1] @ w,
}


@pytest.mark.parametrize("cluster", ["6", "2x3", "2x4", "12", "2x2x2", "2x3x2"])
@pytest.mark.parametrize("name", LAYOUT_FREE)
def test_no_op_is_cut_where_padding_would_be_illegal(name: str, cluster: str) -> None:
    """A dim of 8 is not cut 6 ways, nor one of 12 eight ways: the premise cuts what can be cut, and nothing has no price."""
    plan = shardplan.plan(LAYOUT_FREE[name], like(8, 12), like(16, 8), cluster=cluster, objective="bytes")
    solution, problem = plan.session.solution, plan.session.problem
    assert solution.seconds < BIG / 1e12
    for n, use in plan.session.decisions.uses.items():
        call = problem.graph.nodes[n].signature.call
        placed = [*zip(call.operands, use.needs, strict=True), *zip(call.results, use.gives, strict=True)]
        for shape, layout in placed:
            if layout is not None:
                legal = problem.resharder.legal(shape, pad=True)
                assert legal[problem.resharder.state(shape, layout)], (call.primitive, shape, layout)


def test_limits_on_cuts_leave_those_that_treat_factors_alike() -> None:
    """Each factor may cut one loop of its own: where both are to do the same, the op runs whole rather than in no way."""
    solver = solver_of(lambda a, b: a @ b, (like(8, 8), like(8, 8)), "2x2")
    (node,) = (solver.problem.graph.nodes[n] for n in solver.problem.coarse.joins)
    rows = solver.problem.ops.options(node, Allowed((frozenset({0}), frozenset({1})), ((0, 1),)))
    assert len(rows.loops)
    assert all(a == b for a, b in rows.loops.tolist())


def test_what_nothing_can_cut_is_run_whole_though_it_could_hand_partial_sums_on() -> None:
    def loss(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        looped = jax.lax.scan(lambda c, _: (jnp.tanh(c @ weights["a"]), None), x, None, length=2)[0]
        return (looped**2).sum() + ((x @ weights["b"]) ** 2).sum()

    def step(weights: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))

    args = {"a": array(7, 7), "b": array(7, 1)}, array(8, 7)
    plan = shardplan.plan(step, *args, cluster="2x2x2", objective="bytes")
    assert 0 < plan.step_time_s < 1
    assert [bool(spec) for spec in plan.flat_in_specs] == [False, False, True]
