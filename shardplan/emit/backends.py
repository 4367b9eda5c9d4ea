"""The backends: the ways in which a plan is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from jax.sharding import Mesh

from shardplan.emit.explicit import ExplicitEmitter
from shardplan.emit.specs import SpecsEmitter
from shardplan.errors import ShardplanError
from shardplan.ir import Backend
from shardplan.schedule import PlannedProgram, Schedule

REASONS: Mapping[Backend, str] = {
    "explicit": "each device runs its own program, which sends what is planned",
    "specs": "XLA's partitioner follows the PartitionSpecs; it may send other bytes than planned",
}
"""A description of each backend."""
BACKENDS = tuple(REASONS)


def chosen(backend: str) -> Backend:
    """The backend with this name, or the default for "auto".

    Raises:
        ShardplanError: for a backend that does not exist.
    """
    name = checked_backend(backend)
    return "explicit" if name == "auto" else name


def checked_backend(backend: str) -> Backend | Literal["auto"]:
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
