"""The search against oracles that share none of its tables: every assignment tried on random graphs, the integer program on models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from models import gpt, gpt_linen, llama, mlp, moe, rnn, unet, vit, wresnet
from shardplan.search import Extractor, Problem, ilp, memory
from shardplan.search.solve import Solver
from tests.search import graphs, steps
from tests.search.test_optimum import check

Factory = tuple[Callable[..., Any], tuple[Any, ...]]


def _compared(first: int, count: int) -> tuple[Counter[str], int]:
    """(how many of these graphs have each trait, how many optima communicate); each optimum equals that of all assignments."""
    traits: Counter[str] = Counter()
    talking = 0
    for graph in graphs.drawn(first, count):
        assert graphs.FEWEST <= graph.ops <= graphs.MOST
        solution, _ = check(graph.problem)
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
