"""Plans under a memory limit against every assignment that keeps to it, and the parts of the repair one by one."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from models import mlp
from shardplan.constants import CONSTANTS
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem.problem import Problem
from shardplan.search.strategy import memory_pricing as within
from shardplan.search.strategy import repair, solve
from shardplan.search.strategy.solve import Outcome
from tests.search import steps


def searched(problem: Problem, domains: Any, limit: int) -> Outcome:
    return solve.search(
        problem, limit=limit, donated=frozenset(), domains=domains, deadline=None, observer=lambda _what, _part: None
    )


def rated(problem: Problem, domains: Any) -> list[tuple[float, int]]:
    """(seconds, peak bytes) of every assignment, with every choice of the weights' copies that are kept."""
    solver = Solver(problem, memory.liveness(problem))
    found: list[tuple[float, int]] = []
    views = problem.backward_views
    for states in itertools.product(*domains):
        for again in itertools.product((0.0, math.inf), repeat=len(views)):
            s = solver.rate("x", states, dict(zip(views, again, strict=True)), False)
            found += [(s.seconds, s.peak_bytes)] if s.seconds < 1000 else []
    return found


def drawn(count: int) -> Iterator[Problem]:
    rng = random.Random(5)
    names = ["dot", "dot", "dot", "tied", "add", "multiply", "inner", "transpose", "scan"]
    for _ in range(count):
        weights = tuple((rng.choice((8, 16)), rng.choice((8, 16))) for _ in range(rng.randint(1, 3)))
        moves = tuple((rng.choice(names), rng.randint(0, 7), rng.randint(0, 7)) for _ in range(rng.randint(3, 6)))
        recipe = steps.Recipe(rng.choice((8, 16)), rng.choice((8, 16)), weights, moves, trained=True)
        on = steps.cluster(rng.choice(["4", "2x2"]), gbps=(rng.choice([0.3, 3.0]), 3.0))
        yield steps.problem(recipe.step, *recipe.args(), on=on)


def against_all(count: int, assignments: int) -> tuple[list[float], list[float]]:
    """(gaps to the constrained optimum, infinite where nothing was found; gaps of the smallest), of drawn steps.

    The assignments are those with every op at its fastest: a baseline, whose ops are cut as it says, may hold less.
    """
    gaps: list[float] = []
    smallest: list[float] = []
    for problem in drawn(count):
        domains = steps.thinned(problem, assignments=assignments)
        everything = rated(problem, domains)
        peaks = sorted({peak for _, peak in everything})
        if len(peaks) < 3:
            continue
        fastest = min(everything)
        for limit in {peaks[0], peaks[len(peaks) // 8], peaks[len(peaks) // 4], peaks[len(peaks) // 2]}:
            best = min(seconds for seconds, peak in everything if peak <= limit)
            if limit < fastest[1]:
                found = searched(problem, domains, limit).best
                assert found.limits or found.seconds >= best * (1 - 1e-9) or not found.fits(limit)
                gaps.append(found.seconds / best - 1 if found.fits(limit) else math.inf)
        least = searched(problem, domains, 1).smallest
        assert least is not None
        assert least.limits or least.peak_bytes >= peaks[0]
        assert searched(problem, domains, least.peak_bytes).best.fits(least.peak_bytes), "the limit that is named is met"
        smallest.append(least.peak_bytes / peaks[0] - 1)
    return gaps, smallest


def check(gaps: list[float], smallest: list[float], optimal: float) -> None:
    assert sum(g < 1e-9 for g in gaps) >= optimal * len(gaps)
    assert sum(math.isinf(g) for g in gaps) <= 0.02 * len(gaps)
    assert sum(g for g in gaps if g < math.inf) <= 0.02 * len(gaps)
    assert sum(s < 1e-9 for s in smallest) >= 0.95 * len(smallest)
    assert max(smallest) <= 0.1


@pytest.mark.slow
def test_the_plan_within_a_limit_is_mostly_the_best_of_all_assignments_that_fit() -> None:
    gaps, smallest = against_all(100, 400)
    assert len(gaps) > 30
    check(gaps, smallest, 0.85)


@pytest.mark.slow
def test_the_same_of_more_and_larger_steps() -> None:
    gaps, smallest = against_all(800, 600)
    check(gaps, smallest, 0.85)


# -- parts -------------------------------------------------------------------------------------------------------------


def _branches(ws: dict[str, jax.Array], xs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Equal parts that nothing connects: a price on bytes moves all of them at once."""
    return {k: jnp.tanh(xs[k] @ ws[k]) @ ws[k] for k in ws}


def _equal_branches() -> Problem:
    args = {k: steps.array(64, 64) for k in "abcd"}, {k: steps.array(64, 64) for k in "abcd"}
    return steps.problem(_branches, *args, on=steps.cluster("4", gbps=(1.0,), gflops=10_000.0))


def test_of_equal_parts_as_many_are_fast_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _equal_branches()
    fastest = searched(problem, problem.domains, 2**60).best
    least = searched(problem, problem.domains, 1).smallest
    assert least is not None
    limits = [int(least.peak_bytes + part * (fastest.peak_bytes - least.peak_bytes)) for part in (0.3, 0.55, 0.8)]
    repaired = [searched(problem, problem.domains, limit).best for limit in limits]
    monkeypatch.setattr(repair, "faster", lambda *_: None)
    monkeypatch.setattr(within, "CONSTANTS", replace(CONSTANTS, repairs=0))
    priced = [searched(problem, problem.domains, limit).best for limit in limits]
    for limit, a, b in zip(limits, repaired, priced, strict=True):
        assert a.peak_bytes <= limit
        assert a.seconds <= b.seconds
    assert any(a.seconds < b.seconds * 0.95 for a, b in zip(repaired, priced, strict=True))
    assert [a.seconds for a in repaired] == sorted((a.seconds for a in repaired), reverse=True)


def test_the_parts_in_which_two_solutions_differ_are_worth_what_they_are_worth_together() -> None:
    problem = _equal_branches()
    solver = Solver(problem, memory.liveness(problem))
    fast, _ = solver.minimum("x", problem.domains)
    slow = searched(problem, problem.domains, 1).smallest
    assert slow is not None
    parts = repair._parts(solver, slow, fast)  # pyright: ignore[reportPrivateUsage]
    assert sorted(v for part in parts for v in part) == [
        v for v, (a, b) in enumerate(zip(slow.states, fast.states, strict=True)) if a != b
    ]
    gains = [slow.seconds - repair._with(solver, slow, fast, part).seconds for part in parts]  # pyright: ignore[reportPrivateUsage]
    assert len(parts) == 4
    assert sum(gains) == pytest.approx(slow.seconds - fast.seconds)


def test_what_a_change_saves_is_what_it_saves() -> None:
    """The seconds of single and paired changes, added up from the tables around them, are those of the whole plan."""
    step, args = mlp.train_step(layers=2, width=64)
    problem = steps.problem(step, *args, on=steps.cluster("2x2"))
    solver = Solver(problem, memory.liveness(problem))
    start = solver.rate("x", tuple(d[len(d) // 2] for d in problem.domains), {}, False)
    domains = steps.thinned(problem, assignments=10**9)
    own = [tuple(sorted({*d, s})) for d, s in zip(domains, start.states, strict=True)]
    count = 0
    for group in repair._neighbours(solver, own):  # pyright: ignore[reportPrivateUsage]
        for saved, variables, states in repair._gains(solver, own, start, group)[:2]:  # pyright: ignore[reportPrivateUsage]
            made = list(start.states)
            for v, s in zip(variables, states, strict=True):
                made[v] = s
            again = {v: math.inf for v in problem.backward_views if v not in start.keep}
            assert problem.seconds(made, again) == pytest.approx(start.seconds - saved / 1e12)
            count += len(variables) > 1
    assert count > 10


@pytest.mark.parametrize(("few", "again"), [(0, False), (CONSTANTS.few_entries, True)], ids=["unproved", "proved"])
def test_nothing_is_searched_within_a_limit_where_another_problem_is_better(
    few: int, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the best without a limit is proved: then the tables are small."""
    args = {"a": steps.array(64, 64)}, {"a": steps.array(64, 64)}
    problem = steps.problem(_branches, *args, on=steps.cluster("2x2x2", gbps=(1.0, 2.0, 4.0), gflops=10_000.0))
    free = searched(problem, problem.domains, 2**60).best
    limits: list[int] = []
    real = solve.Descent.within

    def within_limit(self: Any, limit: int) -> Any:
        limits.append(limit)
        return real(self, limit)

    monkeypatch.setattr(solve, "CONSTANTS", replace(CONSTANTS, few_entries=few))
    monkeypatch.setattr(solve.Descent, "within", within_limit)
    given: dict[str, Any] = {"donated": frozenset(), "domains": problem.domains, "deadline": None, "observer": lambda *_: None}
    found = solve.search(problem, limit=free.peak_bytes - 1, worth_s=free.seconds * 0.99, **given)
    assert bool(limits) == again
    if not again:
        assert not found.best.fits(free.peak_bytes - 1)
        solve.search(problem, limit=free.peak_bytes - 1, worth_s=free.seconds * 1.01, **given)
        assert limits, "this one may still win"
