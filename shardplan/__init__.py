"""A sharding planner for JAX: a training step goes in, a verified sharding comes out.

The data flow: `trace` turns a step into a `Program`; `tdl` describes each op and derives the ways to cut it; `search` picks
one way per op and one layout per tensor, under the costs of `cost`, `mesh` and `collectives`; `emit` runs the plan; `report`
shows it. The names below are imported on first use, so that using an error class or the version does not load JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardplan.versions import jax_version as _jax_version
from shardplan.versions import warn_of_untested as _warn_of_untested

if TYPE_CHECKING:
    from shardplan.collectives.lower import all_reduce
    from shardplan.dag import schedule_dag
    from shardplan.errors import (
        AgreementError,
        ArgumentError,
        AxisError,
        CalibrationError,
        CheckError,
        ClusterError,
        CompilerDiedError,
        DescriptionError,
        DeviceError,
        GroupsError,
        HloError,
        JaxVersionError,
        MemoryLimitError,
        MicrobatchError,
        OffloadError,
        PinError,
        PlacementError,
        PlacementMemoryError,
        PlanFileError,
        ReductionError,
        ReshardError,
        ScheduleError,
        ShardplanError,
        TargetError,
        TraceError,
        UncheckedError,
        UncompiledPrimitiveError,
        UndescribedPrimitiveError,
        UnequalDevicesError,
    )
    from shardplan.mesh import Cluster
    from shardplan.plans.score import Score
    from shardplan.report.sweep import Sweep
    from shardplan.shell.agreement import agree
    from shardplan.shell.api import plan
    from shardplan.shell.loading import load
    from shardplan.shell.parallel import Parallel, parallelize
    from shardplan.shell.place import Placement, place
    from shardplan.shell.placed_plan import PlacedPlan
    from shardplan.shell.plan_of_step import Plan
    from shardplan.shell.registering import register
    from shardplan.shell.replanning import replan
    from shardplan.shell.resharding import reshard, resharding
    from shardplan.shell.score import score
    from shardplan.shell.sweep import sweep

__version__ = "0.1.0"

__all__ = [
    "AgreementError",
    "ArgumentError",
    "AxisError",
    "CalibrationError",
    "CheckError",
    "Cluster",
    "ClusterError",
    "CompilerDiedError",
    "DescriptionError",
    "DeviceError",
    "GroupsError",
    "HloError",
    "JaxVersionError",
    "MemoryLimitError",
    "MicrobatchError",
    "OffloadError",
    "Parallel",
    "PinError",
    "PlacedPlan",
    "Placement",
    "PlacementError",
    "PlacementMemoryError",
    "Plan",
    "PlanFileError",
    "ReductionError",
    "ReshardError",
    "ScheduleError",
    "Score",
    "ShardplanError",
    "Sweep",
    "TargetError",
    "TraceError",
    "UncheckedError",
    "UncompiledPrimitiveError",
    "UndescribedPrimitiveError",
    "UnequalDevicesError",
    "agree",
    "all_reduce",
    "load",
    "parallelize",
    "place",
    "plan",
    "register",
    "replan",
    "reshard",
    "resharding",
    "schedule_dag",
    "score",
    "sweep",
]

_warn_of_untested(_jax_version())

_HOMES = {
    "Cluster": "mesh",
    "Plan": "shell.plan_of_step",
    "Score": "plans.score",
    "Sweep": "report.sweep",
    "agree": "shell.agreement",
    "all_reduce": "collectives.lower",
    "load": "shell.loading",
    "Parallel": "shell.parallel",
    "PlacedPlan": "shell.placed_plan",
    "Placement": "shell.place",
    "parallelize": "shell.parallel",
    "place": "shell.place",
    "plan": "shell.api",
    "register": "shell.registering",
    "replan": "shell.replanning",
    "reshard": "shell.resharding",
    "resharding": "shell.resharding",
    "schedule_dag": "dag",
    "score": "shell.score",
    "sweep": "shell.sweep",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'shardplan' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shardplan.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value
