"""Seconds a proposal of the placement search, by full and by delta simulation, on 4 to 64 devices (FlexFlow, Table 5).

One search, whose proposals are simulated in both ways: a full simulation builds the task graph of a proposal and runs all of it
(Algorithm 1), a delta simulation is the product's own (Algorithm 2, with bounds that end bad proposals early).

    python -m benchmarks.placement [--models rnn,gpt] [--devices 4,16,64] [--proposals 200]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardplan.frontend.nnx_state import trace_step
from shardplan.graph import flatten
from shardplan.mesh import Cluster
from shardplan.placement.configurations import Configuration, Strategy
from shardplan.placement.device_topology import machine_of
from shardplan.placement.grouping import operator_graph
from shardplan.placement.mcmc import ChainLimits, Present, anneal, propose
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
"""Proposals of a search that are simulated in full."""


def _problem(model: str, devices: int) -> PlacementProblem:
    step, args = load_target(f"models.{model}:train_step", {**STEPS[model], "batch": 64 * devices})
    program = trace_step(step, args).program
    return problem_of(operator_graph(flatten(program), program), machine_of(Cluster.load(f"flexflow-k80:{devices // 4}")))


def walks(problem: PlacementProblem, start: Strategy, proposals: int, seed: int = 0) -> tuple[float, float]:
    """Seconds a proposal of one search from a strategy, by full and by delta simulation.

    Both are seconds of this process, for which other processes do not count. A full simulation of `FULL` of the proposals, evenly
    spread over the search, stands for those of all.
    """
    anneal(problem, start, np.random.default_rng(seed + 1), ChainLimits(proposals=3), engine="numba")  # compiles
    sampled, drawn, different = list[Strategy](), 0, 0

    def noted(at: Present) -> dict[int, Configuration]:
        nonlocal drawn, different
        changed = propose(at)
        different += any(at.strategy[i] != own for i, own in changed.items())
        if drawn % max(1, proposals // FULL) == 0:
            sampled.append(tuple(changed.get(i, own) for i, own in enumerate(at.strategy)))
        drawn += 1
        return changed

    began = time.process_time()
    limits = ChainLimits(proposals=proposals, rule=False)
    chain = anneal(problem, start, np.random.default_rng(seed), limits, proposer=noted, engine="numba")
    delta_s = time.process_time() - began
    simulation = problem.simulation("numba")
    began = time.process_time()
    for strategy in sampled:
        simulation.full(strategy)
    full_s = (time.process_time() - began) / len(sampled) * different
    simulation.full(chain.strategy)
    assert simulation.seconds == chain.seconds, "both simulations agree"
    return full_s / drawn, delta_s / drawn


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
