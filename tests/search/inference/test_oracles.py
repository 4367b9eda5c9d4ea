"""The search against oracles: every assignment tried with prices summed anew, and an integer program over the search's tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from models import gpt, gpt_linen, llama, mlp, moe, rnn, unet, vit, wresnet
from shardplan.mesh import Cluster
from shardplan.search.inference.bound import Ascent, ascend, narrowed, stars
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem import Extractor, Problem
from tests.oracles import brute, ilp
from tests.search import graphs, steps
from tests.search.inference import narrow
from tests.search.inference.test_optimum import check, optimum
from tests.search.strategy.test_solve import searched

Factory = tuple[Callable[..., Any], tuple[Any, ...]]


def _bounded(problem: Problem, best: brute.Found) -> None:
    """A bound lies above zero and below the best of all assignments, whose states are never ruled out."""
    ascent = Ascent(stars(problem, problem.domains, worst_s=10 * best.seconds))
    assert 0 < ascend(ascent, known_s=best.seconds) <= best.seconds * (1 + 1e-9)
    left = narrowed(ascent, problem.domains, best.seconds * (1 + 1e-9) + 1e-10)
    assert all(s in d for s, d in zip(best.states, left, strict=True))


def _compared(first: int, count: int) -> tuple[Counter[str], int]:
    """(how many of these graphs have each trait, how many optima communicate); each optimum equals that of all assignments."""
    traits: Counter[str] = Counter()
    talking = 0
    for graph in graphs.drawn(first, count):
        assert graphs.FEWEST <= graph.ops <= graphs.MOST
        solution, best = check(graph.problem)
        _bounded(graph.problem, best)
        traits.update(graph.traits)
        talking += bool(Extractor(graph.problem).decide(solution).issued)
    return traits, talking


def test_random_graphs_have_the_optimum_of_all_assignments() -> None:
    traits, talking = _compared(0, 40)
    assert traits.keys() == graphs.TRAITS
    assert talking >= 10


@pytest.mark.slow
def test_five_hundred_random_graphs_have_the_optimum_of_all_assignments() -> None:
    traits, talking = _compared(1000, 500)
    assert min(traits[t] for t in graphs.TRAITS) >= 50
    assert talking >= 100


MODELS: dict[str, Factory] = {
    "mlp": mlp.train_step(),
    "gpt": gpt.train_step(layers=1),
    "gpt_linen": gpt_linen.train_step(layers=1),
    "wresnet": wresnet.train_step(blocks=(1, 1)),
    "rnn": rnn.train_step(),
    "llama": llama.train_step(layers=1),
    "moe": moe.train_step(layers=1),
    "unet": unet.train_step(),
    "vit": vit.train_step(layers=1),
}


@pytest.mark.parametrize("model", MODELS)
def test_one_factor_has_the_optimum_of_the_integer_program(model: str) -> None:
    step, args = MODELS[model]
    problem = steps.problem(step, *args, on=steps.cluster("4", gbps=(1.0,), gflops=100.0))
    answer = ilp.solve(problem, time_limit_s=120)
    assert answer.status == 0, answer.message
    solution, seconds = optimum(problem)
    assert answer.picoseconds == round(seconds * 1e12)
    assert Extractor(problem).decide(solution).issued


@pytest.mark.parametrize("model", ["mlp", pytest.param("gpt", marks=pytest.mark.slow)])
def test_two_factors_have_the_optimum_of_the_integer_program(model: str) -> None:
    step, args = MODELS[model]
    problem = steps.problem(step, *args, on=steps.cluster("2x2", gbps=(1.0, 10.0), gflops=100.0))
    answer = ilp.solve(problem, time_limit_s=120)
    assert answer.status == 0, answer.message
    assert answer.picoseconds == round(searched(problem).best.seconds * 1e12)


@pytest.mark.parametrize("model", ["mlp", *(pytest.param(m, marks=pytest.mark.slow) for m in ("wresnet", "gpt"))])
def test_three_factors_are_within_a_hundredth_of_their_optimum(model: str) -> None:
    """Which is that of the narrowed domains, by elimination and by the integer program."""
    step, args = MODELS[model]
    problem = steps.problem(step, *args, on=Cluster.load("2x2x2"))
    ours = searched(problem).best
    solver = Solver(problem, memory.liveness(problem))
    best, proved = narrow.optimum(solver, problem.domains, ours, entries=1_000_000)
    assert proved
    assert best.seconds <= ours.seconds <= best.seconds * 1.01
    ascent = Ascent(stars(problem, problem.domains, worst_s=4 * ours.seconds))
    assert ascend(ascent, known_s=best.seconds, enough=1e-6) <= best.seconds * (1 + 1e-9)
    few = narrowed(ascent, problem.domains, best.seconds * (1 + 1e-4))
    answer = ilp.solve(problem, few, time_limit_s=120)
    assert answer.status == 0, answer.message
    assert answer.picoseconds == pytest.approx(best.seconds * 1e12, abs=1)
