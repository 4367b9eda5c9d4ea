"""The delta simulation gives the timeline of a full simulation, whatever changes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.mesh import Cluster
from shardplan.placement.bounds import Loads
from shardplan.placement.configurations import Configuration, random_configuration
from shardplan.placement.device_topology import TICK_S, machine_of
from shardplan.placement.mcmc import layers_of
from shardplan.placement.operators import Edge, Operator, OperatorGraph, OperatorLoop
from shardplan.placement.placement_problem import PlacementProblem
from shardplan.placement.simulation import Engine, Simulation
from shardplan.placement.starts import random_strategy
from shardplan.simulate.engine import Stream, TaskGraph, simulate
from tests.placement.problems import problem

LONG = [pytest.param(*case, marks=pytest.mark.slow) for case in (("gpt", "flexflow-p100:1"), ("rnn", "flexflow-k80:2"))]
CASES = [("mlp", "flexflow-k80:1"), ("rnn", "2x2"), ("mlp", "2x4"), *LONG]
UNEQUAL = [("mlp", "unequal"), ("rnn", "unequal")]


def _check_equal(simulation: Simulation, whole: Simulation) -> None:
    assert whole.full(simulation.strategy) == simulation.ticks
    a, b = simulation.times(), whole.times()
    for field in dataclasses.fields(a):
        np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name), err_msg=field.name)


def _change_at_random(
    given_: PlacementProblem, simulation: Simulation, draw: np.random.Generator, *, bounded: bool = False
) -> int | None:
    operators, machine = given_.graph.operators, given_.machine
    i = int(draw.integers(len(operators)))
    layer = next(own for own in layers_of(given_.graph) if i in own)
    chosen = random_configuration(operators[i], machine.cluster.shape, draw, machine.absent)
    changed = dict.fromkeys(layer if draw.random() < 0.5 else (i,), chosen)
    return simulation.change(changed, int(simulation.ticks * 1.02)) if bounded else simulation.change(changed)


@pytest.mark.parametrize(("model", "cluster"), [*CASES, *UNEQUAL])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_delta_and_full_simulation_give_the_same_timeline(model: str, cluster: str, seed: int) -> None:
    _check_changes(problem(model, cluster), seed)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "cluster"), [*CASES, *UNEQUAL, ("gpt", "unequal")])
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_thousands_of_changes_give_the_timeline_of_a_full_simulation(model: str, cluster: str, seed: int) -> None:
    _check_changes(problem(model, cluster), seed)


def _check_changes(here: PlacementProblem, seed: int) -> None:
    """Eight changes, some of them taken back, and a full simulation after each."""
    draw = np.random.default_rng(seed)
    simulation, whole = here.simulation("python"), here.simulation("python")
    simulation.full(random_strategy(here, draw))
    for _ in range(8):
        _change_at_random(here, simulation, draw)
        _check_equal(simulation, whole)
        if draw.random() < 0.3:
            simulation.undo()
            _check_equal(simulation, whole)


@pytest.mark.parametrize(("model", "cluster"), [*CASES[1:3], UNEQUAL[1]])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_change_is_given_up_only_where_it_takes_too_long(model: str, cluster: str, seed: int) -> None:
    here = problem(model, cluster)
    draw = np.random.default_rng(seed)
    simulation, whole = here.simulation("python"), here.simulation("python")
    simulation.full(random_strategy(here, draw))
    for _ in range(10):
        before = simulation.ticks
        ticks = _change_at_random(here, simulation, draw, bounded=True)
        exact = whole.full(simulation.strategy)
        assert exact == ticks if ticks is not None else exact > int(before * 1.02)
        if ticks is None:
            simulation.undo()
            _check_equal(simulation, whole)


def test_a_copy_that_nobody_reads_delays_nobody() -> None:
    """The producer is cut over a loop that does not split its tensor; the copy on the slow device has no reader."""
    operators = tuple(Operator(name, "", (OperatorLoop("i", 2, "A"),), ((), (), ())) for name in ("producer", "consumer"))
    edges = (Edge(0, 1, (2,), 1, (-1,), (-1,), gradient=False),)
    machine = machine_of(Cluster.load("2"), np.array([1.0, 0.1]))
    simulation = Simulation(
        OperatorGraph(operators, edges, ()), machine, [{(1,): (20, 0, 0), (2,): (10, 0, 0)}, {(1,): (50, 0, 0)}]
    )
    simulation.full([Configuration((1,), (0,)), Configuration((1,), (0,))])
    assert simulation.change({0: Configuration((2,), (0, 1))}, 100) == 100
    assert simulation.change({0: Configuration((2,), (0, 1))}, 99) is None


def test_bounds_are_taken_back_with_a_change() -> None:
    here, draw = problem("rnn", "2x2"), np.random.default_rng(11)
    simulation, fresh = here.simulation("python"), here.simulation("python")
    strategy = random_strategy(here, draw)
    simulation.full(strategy)
    for _ in range(10):
        _change_at_random(here, simulation, draw)
        simulation.undo()
    fresh.full(strategy)
    np.testing.assert_array_equal(simulation.bounds(), fresh.bounds())


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_step_is_shorter_than_the_load_of_a_device(seed: int) -> None:
    here = problem("rnn", "2x2")
    strategy = random_strategy(here, np.random.default_rng(seed))
    simulation = here.simulation("python")
    assert simulation.full(strategy) >= Loads(here, strategy).ticks.max()


@pytest.mark.parametrize("engine", ["python", pytest.param("numba", marks=pytest.mark.slow)])
def test_a_pool_that_fills_up_is_built_again(engine: Engine) -> None:
    if engine == "numba":
        pytest.importorskip("numba")
    here = problem("mlp", "2x2")
    draw = np.random.default_rng(7)
    simulation, whole = here.simulation(engine), here.simulation("python")
    simulation.full(random_strategy(here, draw))
    for _ in range(600):
        _change_at_random(here, simulation, draw)
    assert simulation.builder.pool.top < 20_000
    _check_equal(simulation, whole)


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_the_timeline_is_that_of_the_step_simulator(model: str, cluster: str) -> None:
    """The engine of `shardplan.simulate`, which knows nothing of operators, runs the same tasks and arcs at the same times."""
    here = problem(model, cluster)
    simulation = here.simulation("python")
    simulation.full(random_strategy(here, np.random.default_rng(2)))
    pool, s = simulation.builder.pool, simulation.structure
    pairs: list[tuple[int, int]] = []
    for b, g in enumerate(s.sources.tolist()):
        for place in range(int(pool.count[g])):
            at = int(pool.pointer[b]) + place
            pairs += [(int(pool.base[g]) + place, int(t)) for t in pool.arcs[pool.arcs[at] : pool.arcs[at + 1]]]
    arcs = np.array(sorted(pairs, key=lambda pair: pair[1]), np.int64)
    n = pool.top
    graph = TaskGraph(
        tuple(Stream(str(k), "compute", fifo=True) for k in range(here.machine.count + len(here.machine.links))),
        np.asarray(pool.work[:n] * TICK_S, np.float64),
        pool.stream[:n].astype(np.int32),
        np.concatenate([[0], np.cumsum(np.bincount(arcs[:, 1], minlength=n))]),
        arcs[:, 0],
        np.argsort(np.argsort(pool.key[:n])),
    )
    run = simulate(graph, engine="python")
    np.testing.assert_array_equal(np.rint(run.start_s / TICK_S), pool.end[:n] - pool.work[:n])
    assert run.seconds == pytest.approx(simulation.seconds, rel=1e-12)
