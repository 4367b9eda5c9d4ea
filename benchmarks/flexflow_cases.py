"""The six models of FlexFlow's evaluation (Jia et al. 2018, section 8, Table 4) as placement problems on its two clusters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import shardplan
from shardplan.frontend.nnx_state import trace_step
from shardplan.graph import flatten
from shardplan.mesh import Cluster
from shardplan.placement.configurations import Strategy
from shardplan.placement.device_topology import machine_of
from shardplan.placement.grouping import operator_graph
from shardplan.placement.placement_problem import PlacementProblem, problem_of
from shardplan.placement.starts import from_plan
from shardplan.shell.target import load_target

PAPER: dict[str, dict[str, Any]] = {
    "alexnet": {"channels": 64, "dense": 4096, "image": 224, "classes": 1000, "batch": 256},
    "inception": {"channels": 32, "blocks": (3, 4, 2), "image": 299, "classes": 1000, "batch": 64},
    "resnet": {"depth": 101, "channels": 64, "image": 224, "classes": 1000, "batch": 64},
    "rnntc": {"layers": 4, "hidden": 1024, "steps": 40, "vocabulary": 18765, "classes": 2, "batch": 64},
    "rnnlm": {"layers": 2, "hidden": 2048, "steps": 40, "vocabulary": 10000, "batch": 64},
    "nmt": {"layers": 2, "hidden": 1024, "steps": 40, "vocabulary": 32000, "batch": 64},
}
"""Sizes as in section 8, the batch that of a device."""
SMALL: dict[str, dict[str, Any]] = {name: {"batch": 4} for name in PAPER}
"""The defaults of the models, to see the benchmark run."""
PAPER_NAMES = {
    "alexnet": "AlexNet",
    "inception": "Inception-v3",
    "resnet": "ResNet-101",
    "rnntc": "RNNTC",
    "rnnlm": "RNNLM",
    "nmt": "NMT",
}
_NO_LIMIT = 1 << 60
"""Bytes that no device has: strategies are searched without a memory limit, so the plan is too."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a cluster. ``steps`` are the unrolled steps of a recurrence, in place of the paper's 40."""

    model: str
    cluster: str
    steps: int
    small: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The options of the model; a batch for all devices."""
        own = dict((SMALL if self.small else PAPER)[self.model])
        own["batch"] *= Cluster.load(self.cluster).size
        return own | ({"steps": self.steps} if self.unrolled else {})

    @property
    def unrolled(self) -> int | None:
        """The unrolled steps of a recurrence; None for other models."""
        return self.steps if "steps" in PAPER[self.model] else None


@cache
def problem(case: Case) -> PlacementProblem:
    """The operators of a training step, and what their parts take. Memory is not limited: the paper's devices held these steps,
    and by the static count of `shardplan.placement.held_bytes` some do not fit.
    """
    program = trace_step(*load_target(f"models.{case.model}:train_step", case.options)).program
    cluster = Cluster.load(case.cluster)
    roomy = replace(cluster, device=replace(cluster.device, memory_bytes=_NO_LIMIT))
    return problem_of(operator_graph(flatten(program), program), machine_of(roomy))


def plan_on_all_devices(case: Case) -> Strategy:
    """The plan of `shardplan.plan` as a strategy."""
    step, args = load_target(f"models.{case.model}:train_step", case.options)
    plan = shardplan.plan(step, *args, cluster=Cluster.load(case.cluster), memory_limit=_NO_LIMIT)
    return from_plan(problem(case), plan._data.choices, plan.factors)
