"""FlexFlow's worked example (Figure 4): a three-layer RNN of two steps on three GPUs, simulated in full and after a change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardplan.mesh import Cluster
from shardplan.placement.configurations import Configuration
from shardplan.placement.device_topology import TICK_S, DeviceTopology, machine_of
from shardplan.placement.operators import Edge, Operator, OperatorGraph, OperatorLoop
from shardplan.placement.simulation import Engine, Simulation

# Figure 4c: (readyTime, startTime) of each task: parts of o1 to o6, then the transfers of each tensor
FULL = {
    "t1:1": (0, 0), "t1:2": (0, 2), "t2:1": (0, 4), "t2:2": (0, 6),
    "t3:1": (3, 3), "t3:2": (5, 5), "t4:1": (7, 7), "t4:2": (9, 9),
    "t5:1": (7, 7), "t6:1": (11, 11),
    "t1:1>t3:1": (2, 2), "t1:2>t3:2": (4, 4), "t2:1>t4:1": (6, 6), "t2:2>t4:2": (8, 8),
    "t3:1>t5:1": (4, 4), "t3:2>t5:1": (6, 6), "t4:1>t6:1": (8, 8), "t4:2>t6:1": (10, 10),
}  # fmt: skip
# Figure 4d: o3 is no longer cut
DELTA = {
    "t1:1": (0, 0), "t1:2": (0, 2), "t2:1": (0, 4), "t2:2": (0, 6),
    "t3:1": (5, 5), "t4:1": (7, 7), "t4:2": (9, 9),
    "t5:1": (9, 9), "t6:1": (11, 12),
    "t1:1>t3:1": (2, 2), "t1:2>t3:1": (4, 4), "t2:1>t4:1": (6, 6), "t2:2>t4:2": (8, 8),
    "t3:1>t5:1": (7, 7), "t4:1>t6:1": (8, 9), "t4:2>t6:1": (10, 10),
}  # fmt: skip
EXECUTE = {"embedding": {2: 2}, "recurrent": {2: 1, 1: 2}, "linear": {1: 3}}


def _example() -> tuple[OperatorGraph, DeviceTopology, list[dict[tuple[int, ...], tuple[int, int, int]]]]:
    kinds = ["embedding", "embedding", "recurrent", "recurrent", "linear", "linear"]
    operators = tuple(Operator(f"o{i + 1}", "", (OperatorLoop("batch", 2, "S"),), ((), (), ())) for i in range(6))
    pairs = ((0, 2), (1, 3), (2, 3), (2, 4), (3, 5))
    edges = tuple(Edge(i, j, (2,), 1, (0,), (0,), gradient=False) for i, j in pairs)
    tables = [{(k,): (ticks, 0, 0) for k, ticks in EXECUTE[kind].items()} for kind in kinds]
    machine = replace(
        machine_of(Cluster.load("3")),
        latency_s=np.zeros((3, 3)),
        bytes_per_s=np.full((3, 3), 1 / TICK_S),
        link=np.arange(9).reshape(3, 3),
        links=tuple(f"xfer {a}>{b}" for a in range(3) for b in range(3)),
    )
    return OperatorGraph(operators, edges, ()), machine, tables


STRATEGY = [Configuration((k,), (d,) * k) for k, d in ((2, 0), (2, 0), (2, 1), (2, 1), (1, 2), (1, 2))]


def _named(simulation: Simulation) -> dict[str, tuple[int, int]]:
    """(readyTime, startTime) of each task by the paper's names; of a transfer, by the parts that it joins."""
    times, found, strategy = simulation.times(), {}, simulation.strategy
    place = times.key & ((1 << 24) - 1)
    for n, group in enumerate(times.group.tolist()):
        if group < 18:
            name = f"t{group // 3 + 1}:{place[n] + 1}"
        else:
            edge = simulation.graph.edges[(group - 18) // 2]
            several = len(strategy[edge.producer].devices), len(strategy[edge.consumer].devices)
            a, b = (1 + int(place[n]) if k > 1 else 1 for k in several)
            name = f"t{edge.producer + 1}:{a}>t{edge.consumer + 1}:{b}"
        found[name] = int(times.ready[n]), int(times.start[n])
    return found


@pytest.mark.parametrize("engine", ["python", "numba"])
def test_the_timelines_are_those_of_the_paper(engine: Engine) -> None:
    if engine == "numba":
        pytest.importorskip("numba")
    graph, machine, tables = _example()
    simulation = Simulation(graph, machine, tables, engine)
    assert simulation.full(STRATEGY) == 14
    assert _named(simulation) == FULL
    assert simulation.change({2: Configuration((1,), (1,))}) == 15
    assert _named(simulation) == DELTA
    simulation.undo()
    assert (simulation.ticks, _named(simulation)) == (14, FULL)


def test_the_delta_simulation_keeps_what_comes_before_the_change() -> None:
    """Figure 4d: the white tasks, those that are ready before the first transfer to o3 ends, are not simulated again."""
    graph, machine, tables = _example()
    simulation = Simulation(graph, machine, tables, "python")
    simulation.full(STRATEGY)
    everything, simulation.ran = simulation.ran, 0
    simulation.change({2: Configuration((1,), (1,))})
    assert everything == 18
    assert simulation.ran == 12  # of 16: all parts of o1 and o2 are kept
