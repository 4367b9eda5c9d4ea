"""Small placement problems from traced models, each made once."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from shardplan.frontend.nnx_state import trace_step
from shardplan.graph import flatten
from shardplan.mesh import Cluster, SingleDevice, SingleLink
from shardplan.placement.device_topology import machine_of
from shardplan.placement.grouping import operator_graph
from shardplan.placement.operators import OperatorGraph
from shardplan.placement.placement_problem import PlacementProblem, problem_of
from shardplan.shell.target import load_target

MODELS: dict[str, dict[str, Any]] = {
    "mlp": {},
    "lenet": {},
    "rnnlm": {},
    "gpt": {"layers": 1},
    "rnn": {"layers": 1, "steps": 3},
    "wresnet": {"depth": 50},
    "two_tower": {},
}


UNEQUAL = replace(
    Cluster.load("2x3"),
    single_devices=(SingleDevice(1, speed=0.5), SingleDevice(2, absent=True), SingleDevice(4, speed=0.7)),
    single_links=(SingleLink((0, 4), 2e9, 3e-6),),
)
"""A machine with slow devices, one that is absent, and a link of its own."""


@cache
def operators(model: str, **options: Any) -> OperatorGraph:
    """The graph of operators of a model with the options of `MODELS` and these."""
    step, args = load_target(f"models.{model}:train_step", {**MODELS[model], **options})
    program = trace_step(step, args).program
    return operator_graph(flatten(program), program)


@cache
def problem(model: str, cluster: str) -> PlacementProblem:
    """The problem of placing a model on a cluster, or on the "unequal" one."""
    return problem_of(operators(model), machine_of(UNEQUAL if cluster == "unequal" else Cluster.load(cluster)))
