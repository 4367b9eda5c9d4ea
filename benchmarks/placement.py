"""Seconds a proposal of the placement search, by full and by delta simulation, on 4 to 64 devices (FlexFlow, Table 5).

Both walks draw the same proposals and accept the same ones. The full walk builds the task graph of each proposal and runs all of
it (Algorithm 1); the delta walk is the product's own (Algorithm 2, with bounds that end bad proposals early).

    python -m benchmarks.placement [--models rnn,gpt] [--devices 4,16,64] [--proposals 200]
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardplan.frontend.nnx_state import trace_step
from shardplan.graph import flatten
from shardplan.mesh import Cluster
from shardplan.placement.configurations import Strategy
from shardplan.placement.device_topology import machine_of
from shardplan.placement.grouping import operator_graph
from shardplan.placement.mcmc import BETA, Limits, anneal, neighbours_of, propose
from shardplan.placement.placement_problem import PlacementProblem, problem_of
from shardplan.placement.starts import data_parallel
from shardplan.report.tables import table
from shardplan.shell.target import load_target, use_cpu

# The batch is 64 for each device, as in FlexFlow, section 8.
STEPS: dict[str, dict[str, Any]] = {
    "mlp": {"layers": 6, "width": 4096},
    "wresnet": {"depth": 101, "width": 1, "image": 224},
    "rnn": {"layers": 2, "hidden": 1024, "steps": 40, "vocabulary": 32768},
    "gpt": {"layers": 12, "width": 1024, "heads": 16, "sequence": 512, "vocabulary": 32768},
}
FULL = 12
"""Proposals of the full walk: each takes the same time."""


def _problem(model: str, devices: int) -> PlacementProblem:
    step, args = load_target(f"models.{model}:train_step", {**STEPS[model], "batch": 64 * devices})
    program = trace_step(step, args).program
    return problem_of(operator_graph(flatten(program), program), machine_of(Cluster.load(f"flexflow-k80:{devices // 4}")))


def walks(problem: PlacementProblem, start: Strategy, proposals: int, seed: int = 0) -> tuple[float, float]:
    """Seconds a proposal of a full walk and of a delta walk from a strategy."""
    anneal(problem, start, np.random.default_rng(seed + 1), Limits(proposals=3), engine="numba")  # compiles
    full_s, accepted = _full_walk(problem, start, min(FULL, proposals), seed)
    first = anneal(problem, start, np.random.default_rng(seed), Limits(proposals=min(FULL, proposals)), engine="numba")
    assert first.accepted == len(accepted), "both walks accept the same proposals"
    limits = Limits(proposals=proposals, rule=False)
    chain = anneal(problem, start, np.random.default_rng(seed), limits, engine="numba")
    return full_s, chain.elapsed_s / chain.proposals


def _full_walk(problem: PlacementProblem, start: Strategy, proposals: int, seed: int) -> tuple[float, list[int]]:
    """Seconds a proposal, and the proposals that were accepted."""
    draw, simulation, neighbours = np.random.default_rng(seed), problem.simulation("numba"), neighbours_of(problem)
    strategy = list(start)
    cost, spent, accepted = simulation.full(strategy), 0.0, list[int]()
    for n in range(proposals):
        i, chosen = propose(problem, strategy, neighbours, draw)
        slack = -math.log(1.0 - draw.random()) / (BETA * len(strategy))
        if chosen == strategy[i]:
            continue
        began = time.perf_counter()
        ticks = simulation.full([*strategy[:i], chosen, *strategy[i + 1 :]])
        spent += time.perf_counter() - began
        if ticks <= cost + int(cost * slack):
            strategy[i], cost = chosen, ticks
            accepted.append(n)
    return spent / proposals, accepted


def row(model: str, devices: int, proposals: int) -> Sequence[object]:
    """One row of the table."""
    problem = _problem(model, devices)
    full_s, delta_s = walks(problem, data_parallel(problem), proposals)
    simulation = problem.simulation("numba")
    simulation.full(data_parallel(problem))
    ms = (f"{full_s * 1e3:.1f} ms", f"{delta_s * 1e3:.2f} ms", f"{full_s / delta_s:.1f}x")
    return (model, devices, len(problem.graph.operators), simulation.builder.pool.tasks, *ms)


def main() -> None:
    """Prints the table."""
    options = argparse.ArgumentParser(description="Delta and full simulation of proposals.")
    options.add_argument("--models", default=",".join(STEPS))
    options.add_argument("--devices", default="4,16,64")
    options.add_argument("--proposals", type=int, default=200)
    given = options.parse_args()
    use_cpu()
    rows = [
        row(model, int(devices), given.proposals) for model in given.models.split(",") for devices in given.devices.split(",")
    ]
    headers = ("model", "devices", "operators", "tasks", "full", "delta", "full / delta")
    print(table(headers, rows))


if __name__ == "__main__":
    main()
