"""Known traps: levels planned apart fall into pure data parallelism, and recursion alone cannot take back what it split first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from models import gpt, wresnet
from shardplan.mesh import Cluster
from shardplan.search.baselines.batch_dims import follow
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem import Extractor, Problem
from shardplan.search.problem.solution import Solution
from shardplan.search.strategy.recursion import recurse
from tests.search import steps
from tests.search.strategy.test_solve import searched


def decoupled(problem: Problem) -> Solution:
    """Each level planned by itself, on the full shapes, and the answers laid over one another.

    Where two levels together split a dim further than it goes, the slower level's answer stands.
    """
    solver = Solver(problem, memory.liveness(problem))
    alone: list[tuple[int, ...]] = []
    for f in range(len(problem.sizes)):
        own = [problem.with_factors(v, None, (f,), d, later=False) for v, d in enumerate(problem.domains)]
        alone.append(solver.minimum("alone", own)[0].states)
    return solver.rate(
        "decoupled", tuple(_over(problem, v, [a[v] for a in alone]) for v in range(len(problem.domains))), {}, False
    )


def _over(problem: Problem, v: int, states: Sequence[int]) -> int:
    """The layout that splits a variable in all of these ways, the slowest factor first; without the last where it is too much."""
    space = problem.resharder.space(problem.coarse.variables[v].shape)
    for n in range(len(states), 0, -1):
        roles = [space.state(s) for s in states[:n]]
        dims = tuple(tuple(f for one, _ in roles for f in one[d]) for d in range(len(roles[0][0])))
        found = space.number((dims, tuple(sorted(f for _, partial in roles for f in partial))))
        if found in problem.domains[v]:
            return found
    raise AssertionError("the first level's own answer is a layout")


def products(problem: Problem, solution: Solution) -> list[tuple[int, ...]]:
    """For each matrix product the loop that each factor cuts, that over the batch called 0 and the others by number from 1."""
    graph = problem.graph
    state = {i for i in graph.feedback if i is not None}
    examples = follow(graph, [t for i, t in enumerate(graph.inputs) if i not in state])
    found: list[tuple[int, ...]] = []
    for n, use in sorted(Extractor(problem).decide(solution).uses.items()):
        node = graph.nodes[n]
        if node.signature.call.primitive == "dot_general":
            batch, _ = examples.loops(node)
            found.append(tuple(0 if loop in batch else loop + 1 for loop in use.loops))
    return found


def data_share(cuts: Sequence[Sequence[int]]) -> float:
    """The share of all cuts that are along the batch."""
    return sum(loop == 0 for cut in cuts for loop in cut) / sum(len(cut) for cut in cuts)


@pytest.mark.parametrize(
    ("shape", "gbps", "width", "rows", "wins", "ways"),
    [
        ("4x4", (50.0, 50.0), 2048, (64, 128), 1.09, 2),
        ("2x4x4", (50.0, 50.0, 50.0), 1024, (64, 128), 1.08, 2),
        ("4x4x4", (50.0, 50.0, 50.0), 2048, (512, 64), 1.06, 2),
        ("2x4x4", (50.0, 100.0, 200.0), 2048, (64, 128), 1.10, 3),
    ],
)
def test_levels_planned_apart_fall_into_data_parallelism(
    shape: str, gbps: tuple[float, ...], width: int, rows: tuple[int, int], wins: float, ways: int
) -> None:
    """On the full shapes every level finds the activations larger than the weights; together they find them cut by the others."""
    batch, sequence = rows
    step, args = gpt.train_step(layers=1, width=width, sequence=sequence, batch=batch, heads=32, vocabulary=1024)
    problem = steps.problem(step, *args, on=steps.cluster(shape, gbps=gbps, gflops=1e5))
    apart, ours = decoupled(problem), searched(problem).best
    trapped, free = products(problem, apart), products(problem, ours)
    assert data_share(trapped) > 0.75
    assert data_share(free) < data_share(trapped) - 0.15
    most = max(len(set(cut)) for cut in free)
    assert most == ways, "products are cut along so many loops"
    assert sum(len(set(cut)) >= 2 for cut in free) > len(free) / 2
    assert apart.seconds > ours.seconds * wins


def test_levels_planned_apart_are_right_where_data_parallelism_is() -> None:
    """The oracle is not blind: where the batch is large it finds the plan."""
    step, args = gpt.train_step(layers=1, width=512, sequence=64, batch=2048, heads=64, vocabulary=1024)
    problem = steps.problem(step, *args, on=steps.cluster("4x4", gbps=(100.0, 100.0), gflops=1e5))
    apart, ours = decoupled(problem), searched(problem).best
    assert data_share(products(problem, ours)) == 1
    assert ours.seconds <= apart.seconds < ours.seconds * 1.005


@pytest.mark.parametrize("depth", [50, pytest.param(152, marks=pytest.mark.slow)])
def test_recursion_alone_loses_on_wide_residual_nets(depth: int) -> None:
    """What the nodes take first suits them alone: WResNet over 8x8."""
    step, args = wresnet.train_step(depth=depth, width=2, image=224, batch=64, classes=1000)
    problem = steps.problem(step, *args, on=Cluster.load("8x8"))
    joint = searched(problem)
    alone = recurse(Solver(problem, memory.liveness(problem)), problem.domains).solution
    assert joint.exact
    assert alone.seconds > joint.best.seconds * 1.03
