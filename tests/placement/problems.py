"""Small placement problems from traced models, each made once."""

from __future__ import annotations

from functools import cache
from typing import Any

from shardplan.frontend.nnx_state import trace_step
from shardplan.graph import flatten
from shardplan.mesh import Cluster
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


@cache
def operators(model: str, **options: Any) -> OperatorGraph:
    """The graph of operators of a model with the options of `MODELS` and these."""
    step, args = load_target(f"models.{model}:train_step", {**MODELS[model], **options})
    program = trace_step(step, args).program
    return operator_graph(flatten(program), program)


@cache
def problem(model: str, cluster: str) -> PlacementProblem:
    """The problem of placing a model on a cluster."""
    return problem_of(operators(model), machine_of(Cluster.load(cluster)))
