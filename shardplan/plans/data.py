"""A plan as plain data: what it is for, what was chosen, what that costs. It holds no program, no search and no device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shardplan.ir import Choices, Entry, Factor, Layout
from shardplan.mesh import Cluster
from shardplan.remat import Remat
from shardplan.search.coarsening.variables import OneChoice
from shardplan.search.inference.anytime import Stopped


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective that the plan issues, ``times`` a step.

    ``bytes`` are of its operand on one device (of the result for an all-gather), ``wire_bytes`` what a device sends in the ring
    convention, ``seconds`` what the model of the network says: all three of one execution. ``source`` is the user's line.
    ``program`` is the reduction program whose time ``seconds`` is, in P2's words over the cluster's levels; empty where that is
    the collective itself.
    """

    kind: str
    bytes: float
    wire_bytes: float
    axes: tuple[str, ...]
    times: float
    seconds: float
    tensor: str
    source: str
    program: str = ""


@dataclass(frozen=True, slots=True)
class Baseline:
    """A sharding that people use today, scored in the plan's tables: seconds of one step, bytes of one device and step."""

    name: str
    step_time_s: float
    communication_bytes: float
    peak_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class Argument:
    """One leaf of the arguments: its path, its array, and the layout that the plan gives it (None: whole on every device)."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    layout: Layout | None


@dataclass(frozen=True, slots=True)
class PlanData:
    """Everything that a plan says. Seconds are predicted for one step, bytes for one device.

    ``name`` is "plan", or that of the baseline that it is. ``result_layouts`` are those of the leaves of the step's result.
    ``exact``: the plan is the optimum of its mesh where memory has no limit, ``unlimited_s`` the seconds of that optimum where it
    is known. ``stopped`` says what ended the search early ("time budget", "interrupted"; else empty). ``limited``: the ops are
    cut as a baseline or an objective prescribes; ``regather``: no forward copy of a weight is kept for the backward pass.
    ``idle_axes`` says of each axis over which nothing is cut why, ``unknown_trips`` has the source lines of while loops that are
    priced as one iteration. ``trace_s`` and ``search_s`` were measured.

    The last fields are filled when they are first asked for, and before the plan is saved: ``fingerprint`` is of the traced
    step, ``left_out`` names baselines that do not exist here, each with the reason, and ``explanations`` has one text for each
    path and, under ``""``, one for the whole plan.
    """

    name: str
    cluster: Cluster
    factors: tuple[Factor, ...]
    arguments: tuple[Argument, ...]
    result_layouts: tuple[Layout | None, ...]
    operators: int
    choices: Choices = field(repr=False)
    collectives: tuple[Collective, ...] = field(repr=False)
    step_time_s: float
    compute_s: float
    peak_bytes: int
    memory_limit: int
    objective: str
    exact: bool
    unlimited_s: float | None
    stopped: Stopped
    limited: bool
    regather: bool
    remat: Remat
    one_choice: OneChoice
    donate_argnums: tuple[int, ...]
    replicate: tuple[str, ...]
    pins: Mapping[str, tuple[Entry, ...]]
    time_budget_s: float | None
    idle_axes: Mapping[str, str]
    unknown_trips: tuple[str, ...]
    trace_s: float
    search_s: float
    time_model: Literal["sum"] = "sum"
    fingerprint: str | None = None
    lower_bound_s: float | None = None
    baselines: tuple[Baseline, ...] | None = None
    left_out: tuple[tuple[str, str], ...] = ()
    explanations: Mapping[str, str] | None = None

    @property
    def communication_s(self) -> float:
        """The seconds in which devices talk."""
        return sum(c.seconds * c.times for c in self.collectives)

    @property
    def communication_bytes(self) -> float:
        """Bytes that one device sends in one step, in the ring convention."""
        return sum(c.wire_bytes * c.times for c in self.collectives)

    @property
    def gap(self) -> float | None:
        """The part of ``lower_bound_s`` by which the plan lies above it; None where the bound was not asked for."""
        if self.lower_bound_s is None:
            return None
        return max(0.0, self.step_time_s / self.lower_bound_s - 1) if self.lower_bound_s > 0 else 0.0

    @property
    def axes(self) -> dict[str, int]:
        """Mesh axis names and sizes, slowest first."""
        return {f.name: f.size for f in self.factors}

    @property
    def matrix(self) -> dict[str, Any]:
        """The parallelism matrix (P2, section 3.1): one row per mesh axis, one column per level."""
        levels = list(self.cluster.level_names)
        rows = [[f.size if f.level == n else 1 for n in range(len(levels))] for f in self.factors]
        return {"axes": list(self.axes), "levels": levels, "factors": rows}

    @property
    def entries(self) -> dict[str, tuple[Entry, ...]]:
        """By path of each argument the entries of its PartitionSpec."""
        names = tuple(self.axes)
        return {a.path: () if a.layout is None else a.layout.entries(names) for a in self.arguments}
