"""The backends: the ways in which a plan is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from shardplan.emit.explicit import ExplicitEmitter
from shardplan.emit.specs import SpecsEmitter
from shardplan.errors import ShardplanError
from shardplan.schedule import PlannedProgram, Schedule

BACKENDS = ("explicit", "specs")
"""Each device its own program, or constraints that XLA's partitioner follows."""


_WORDS = {
    "explicit": "each device runs its own program, which sends what is planned",
    "specs": "XLA's partitioner follows the PartitionSpecs; it may send other bytes than planned",
}


def chosen(backend: str) -> dict[str, Any]:
    """The fields of `shardplan.plans.PlanData` about the backend of a plan that was made for this one.

    Raises:
        ShardplanError: for a backend that does not exist.
    """
    name = "explicit" if checked_backend(backend) == "auto" else backend
    return {"backend": name, "backend_reason": _WORDS[name]}


def checked_backend(backend: str) -> str:
    """The name of a backend, or "auto", which stands for the one that the plan was made for.

    Raises:
        ShardplanError: for a backend that does not exist.
    """
    if backend not in ("auto", *BACKENDS):
        raise ShardplanError(f"unsupported backend {backend!r}: use 'auto', 'explicit' or 'specs'")
    return backend


def emitter(planned: PlannedProgram, mesh: Mesh, backend: str, schedule: Callable[[], Schedule]) -> Callable[..., list[Any]]:
    """The step on flat arguments under a backend."""
    return ExplicitEmitter(planned, mesh, schedule()) if backend == "explicit" else SpecsEmitter(planned, mesh)
