"""Random graphs of 6 to 12 ops, by number: the same number is the same graph everywhere."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardplan.mesh import Cluster
from shardplan.search.coarsening.coarsen import FREE
from shardplan.search.problem.problem import Problem
from tests.search import steps

FEWEST, MOST = 6, 12
TRAITS = frozenset({"fan-out", "diamond", "tuple result", "shared parameter", "scan", "partial sum", "two factors"})
_ASSIGNMENTS = 10_000_000
_CLUSTERS = (("2x2", (3.0, 30.0)), ("2x2", (30.0, 3.0)), ("2x3", (1.0, 10.0)), ("2x2", (100.0, 100.0)), ("4", (3.0,)))


@dataclass(frozen=True)
class Drawn:
    """A graph that was drawn: its recipe, its problem and what is in it."""

    number: int
    recipe: steps.Recipe
    problem: Problem
    ops: int
    traits: frozenset[str]

    def __str__(self) -> str:
        return str(self.number)


def drawn(first: int, count: int) -> Iterator[Drawn]:
    """The first ``count`` graphs, from the seed ``first`` on, that have 6 to 12 ops and whose assignments can all be tried."""
    seed = first
    while count:
        rng = np.random.default_rng(seed)
        shape, gbps = _CLUSTERS[int(rng.integers(len(_CLUSTERS)))]
        found = _draw(seed, rng, steps.cluster(shape, gbps=gbps))
        seed += 1
        if found is not None:
            count -= 1
            yield found


def _draw(seed: int, rng: np.random.Generator, on: Cluster) -> Drawn | None:
    sizes = rng.choice([4, 6, 8, 12], 2)  # two sizes, so that what is drawn often fits together
    pick = lambda: int(rng.choice(sizes))  # noqa: E731
    weights = tuple((pick(), pick()) for _ in range(int(rng.integers(1, 3))))
    names = sorted([*steps.MOVES, "dot", "dot", "dot", "tied"])
    moves = tuple((str(rng.choice(names)), int(rng.integers(8)), int(rng.integers(8))) for _ in range(int(rng.integers(2, 6))))
    recipe = steps.Recipe(pick(), pick(), weights, moves, bool(rng.integers(2)))
    problem = steps.problem(recipe.step, *recipe.args(), on=on)
    ops = _ops(problem)
    if not FEWEST <= ops <= MOST or not 1 < math.prod(len(d) for d in problem.domains) <= _ASSIGNMENTS:
        return None
    return Drawn(seed, recipe, problem, ops, _traits(problem))


def _ops(problem: Problem) -> int:
    """The ops that have anything to choose."""
    of = problem.coarse.of
    return sum(any(t >= 0 and of[t] != FREE for t in (*n.inputs, *n.outputs)) for n in problem.graph.nodes)


def _traits(problem: Problem) -> frozenset[str]:
    """Which of the things that make a graph hard are in it."""
    graph, of = problem.graph, problem.coarse.of
    found: set[str] = set()
    readers: dict[int, set[int]] = {}
    before: dict[int, frozenset[int]] = {}
    for node in graph.nodes:
        alive = [t for t in node.inputs if t >= 0 and of[t] != FREE]
        for t in alive:
            readers.setdefault(t, set()).add(node.id)
        above = [before.get(t, frozenset()) | {t} for t in dict.fromkeys(alive)]
        if any(a & b for i, a in enumerate(above) for b in above[:i]):
            found.add("diamond")
        for t in node.outputs:
            before[t] = frozenset[int]().union(*above)
        if sum(of[t] != FREE for t in node.outputs) > 1:
            found.add("tuple result")
    if any(len(r) > 1 for r in readers.values()):
        found.add("fan-out")
    parameters = {t for t, path in zip(graph.inputs, graph.input_paths, strict=True) if "/" in path}
    if any(t in parameters and len(r) > 1 for t, r in readers.items()):
        found.add("shared parameter")
    if graph.links:
        found.add("scan")
    if any(v.deferred for v in problem.coarse.variables):
        found.add("partial sum")
    if len(problem.sizes) > 1:
        found.add("two factors")
    return frozenset(found)
