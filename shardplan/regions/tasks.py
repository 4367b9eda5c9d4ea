"""The parts of a placed step: pieces (programs of one group), tasks (a piece, once or for each microbatch) and transfers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardplan.collectives.issued import StepCost
from shardplan.dag.pipelines import PassKind
from shardplan.ir import Constant, Factor, Layout, Tensor
from shardplan.mesh import Cluster
from shardplan.regions.assignment import Group
from shardplan.schedule import PlannedProgram, Schedule

Key = tuple[int, int]
"""A value of the step: the number of its tensor, and its microbatch (-1 for a value of the whole step)."""

WHOLE = -1


@dataclass(frozen=True, slots=True)
class GroupMesh:
    """The devices of a group, as a cluster with mesh axes, and the layout of each tensor that enters or leaves its pieces."""

    devices: Group
    cluster: Cluster
    factors: tuple[Factor, ...]
    layouts: Mapping[int, Layout | None]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the mesh axes, slowest first."""
        return tuple(f.name for f in self.factors)


@dataclass(frozen=True, slots=True)
class Piece:
    """A program that a group runs: a schedule on devices' shares, or a program that XLA's partitioner cuts.

    "slice" takes a microbatch out of a stack, "stack" makes a stack of all, "start" makes the starts of accumulators: the value
    ``start`` everywhere. ``reads`` and ``makes`` are tensors of the step. A device needs ``inside_bytes`` beside them as it
    runs. ``kind`` is the pass of a microbatch that a piece of a pipeline computes ("forward" also for cutting the microbatch
    out), ``chunk`` the chunk of layers of that pass.
    """

    name: str
    group: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    own: tuple[PlannedProgram, Schedule] | Literal["slice", "stack", "start"]
    cost: StepCost | None = None
    start: tuple[Constant, ...] = ()
    inside_bytes: int = 0
    kind: PassKind | None = None
    chunk: int = 0

    @property
    def seconds(self) -> float:
        """Predicted seconds of one run."""
        return 0.0 if self.cost is None else self.cost.step_time_s


@dataclass(frozen=True, slots=True)
class Task:
    """One run of a piece, by number, on these values."""

    piece: int
    microbatch: int
    reads: tuple[Key, ...]
    makes: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A value that goes from one group to another, where it has the layout of tensor ``like``."""

    key: Key
    source: int
    target: int
    like: int


@dataclass(frozen=True, slots=True)
class Result:
    """A result of the step: the group that holds it in the end, its value, and the tensor whose layout it has there."""

    group: int
    key: Key
    like: int


@dataclass(frozen=True, slots=True)
class PlacedTaskGraph:
    """All that a placed step does. ``tensors`` are by number; ``inputs`` says in which group each argument is held. A result
    that is None is a literal. ``donated`` are the tensors of arguments whose buffers the step may reuse.
    """

    tensors: tuple[Tensor, ...]
    groups: tuple[GroupMesh, ...]
    pieces: tuple[Piece, ...]
    tasks: tuple[Task, ...]
    transfers: tuple[Transfer, ...]
    inputs: tuple[tuple[int, Key], ...]
    results: tuple[Result | None, ...]
    donated: frozenset[int]
