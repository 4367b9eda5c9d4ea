"""A plan as plain data: its purpose, its choices, and their costs. It holds no program, no search and no device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from shardplan.collectives.issued import PlannedCollective
from shardplan.constants import CONSTANTS
from shardplan.cost.overlap import SERIAL, Weights
from shardplan.ir import Backend, Choices, Entry, Factor, Layout, Microbatches
from shardplan.mesh import Cluster
from shardplan.offload import HostedValue
from shardplan.plans.codec import Least
from shardplan.plans.xla_flags import xla_flags
from shardplan.remat import Remat
from shardplan.search.coarsening.variables import OneChoice
from shardplan.search.inference.anytime import Stopped
from shardplan.search.problem.solution import Tried
from shardplan.search.strategy.purposes import PURPOSES, Purpose, Shares
from shardplan.search.strategy.unused_axes import REPEATED

TimeModel = Literal["overlap", "sum"]
"""How the seconds of a step add up: communication hides behind compute where it can, or everything takes its turn."""

MemoryKind = Literal["device", "pinned_host"]
"""A memory by JAX's name (`jax.sharding.NamedSharding.memory_kind`)."""

Seconds = Annotated[float, Least(0)]
Bytes = Annotated[int, Least(0)]


@dataclass(frozen=True, slots=True)
class Baseline:
    """A sharding that people use today, priced like the plan: seconds per step and of its compute, bytes per device and step."""

    name: str
    step_time_s: Seconds
    compute_s: Seconds
    communication_bytes: Annotated[float, Least(0)]
    peak_bytes: Bytes
    fits: bool


@dataclass(frozen=True, slots=True)
class Argument:
    """One leaf of the arguments: its path, its array type, its layout in the plan (None: whole on every device), and the memory
    that holds it between steps.
    """

    path: str
    shape: tuple[Annotated[int, Least(0)], ...]
    dtype: str
    nbytes: Bytes
    layout: Layout | None
    memory: MemoryKind = "device"


@dataclass(frozen=True, slots=True)
class TriedPlacement:
    """A way to place the ops of a step that ``placement="auto"`` looked at: its seconds and peak bytes, where it was planned
    whole, and why it was not taken (empty: it was).
    """

    what: str
    step_time_s: Seconds | None
    peak_bytes: Bytes | None
    why_not: str


@dataclass(frozen=True, slots=True)
class PlanData:
    """Everything that a plan says. Seconds are predicted for one step, bytes for one device.

    ``name`` is "plan", or the name of a baseline. ``step_time_s`` counts what the backend sends; ``searched_s`` is the least
    price in the search's tables, in which each reader has its own collective and nothing is padded. ``time_model`` says how
    seconds add up (`shardplan.cost.overlap`), ``weights`` at which weights the search ended, ``company`` how many bytes of each
    pool (`shardplan.cost.overlap.Window`) travel together in its prices (None: all that may). ``host_s`` are the seconds of
    copies from host memory and back.
    ``memory_limit_origin`` says where ``memory_limit`` comes from, if not from the user. ``argument_names`` are the names of the
    step's arguments, with which the paths of their leaves begin; ``result_paths`` and ``result_layouts`` have an item for each
    leaf of the step's result. ``exact``: the search found the optimum of its mesh without a memory limit; ``unlimited_s`` is the
    price of that optimum in the search's tables, if it is known. ``stopped`` says what ended the search early ("time budget",
    "interrupted"; else empty). ``microbatches``: the program runs the batch in so many parts. ``limited``: a baseline or an
    objective prescribes how ops are cut. ``regather``: no forward copy of a weight is kept for the backward pass. ``idle_axes``
    explains each axis over which nothing is cut. ``offload`` has the globs of the arguments that stay in host memory, or "auto";
    ``recompute`` says whether ``remat="auto"`` was asked for. ``unknown_trips`` has the source lines of while loops that are
    priced as one iteration, ``whole_ops`` the ops that run whole on every device, with theirs. ``purposes`` say what each factor
    is for, ``tried`` which factorings were searched, ``fixed_axes`` the sizes of purposes that the user gave.
    ``placements_tried`` is what ``placement="auto"`` looked at, this plan among it. ``backend`` runs the plan by default, and
    ``backend_reason`` says how. ``constants`` are the numbers that decided it (`shardplan.constants`), as literals by name.
    ``trace_s`` and ``search_s`` are measured.

    The last fields are filled on first use, and before the plan is saved. ``fingerprint`` is the fingerprint of the traced step,
    without its numbers; ``marks`` are the marks of its ops (`shardplan.plans.fingerprint`). ``bound_s`` is a lower bound on
    ``searched_s``. ``left_out`` names the baselines that this step does not have, each with the reason. ``explanations`` has a
    text for each path and, under ``""``, one for the whole plan.
    """

    name: str
    cluster: Cluster
    factors: tuple[Factor, ...]
    argument_names: tuple[str, ...]
    arguments: tuple[Argument, ...]
    result_paths: tuple[str, ...]
    result_layouts: tuple[Layout | None, ...]
    operators: int
    choices: Choices = field(repr=False)
    collectives: tuple[PlannedCollective, ...] = field(repr=False)
    step_time_s: Seconds
    searched_s: Seconds
    compute_s: Seconds
    host_s: Seconds
    peak_bytes: Bytes
    memory_limit: Bytes
    memory_limit_origin: str
    objective: Literal["time", "bytes"]
    exact: bool
    unlimited_s: float | None
    stopped: Stopped
    limited: bool
    regather: bool
    microbatches: Microbatches
    remat: Remat
    hosted: tuple[HostedValue, ...]
    offload: tuple[str, ...]
    recompute: bool
    one_choice: OneChoice
    donate_argnums: tuple[Annotated[int, Least(0)], ...]
    replicate: tuple[str, ...]
    pins: Mapping[str, tuple[Entry, ...]]
    time_budget_s: float | None
    idle_axes: Mapping[str, str]
    unknown_trips: tuple[str, ...]
    whole_ops: tuple[str, ...]
    purposes: tuple[Shares, ...]
    tried: tuple[Tried, ...]
    fixed_axes: Mapping[Purpose, int]
    trace_s: Seconds
    search_s: Seconds
    backend: Backend
    backend_reason: str
    constants: Mapping[str, str]
    time_model: TimeModel = "overlap"
    weights: Weights = SERIAL
    company: Mapping[str, float] | None = None
    placements_tried: tuple[TriedPlacement, ...] = ()
    fingerprint: str | None = None
    marks: tuple[str, ...] | None = None
    bound_s: Seconds | None = None
    baselines: tuple[Baseline, ...] | None = None
    left_out: tuple[tuple[str, str], ...] = ()
    explanations: Mapping[str, str] | None = None

    @property
    def replaced(self) -> bool:
        """Whether a baseline took the place of the search's solution, because it is faster as scheduled."""
        return self.limited and self.objective == "time" and not self.fixed_axes

    @property
    def argument_types(self) -> dict[str, str]:
        """The type of each argument, by path: ``{"params/up": "float32[512, 2048]"}``."""
        return {a.path: f"{a.dtype}{list(a.shape)}" for a in self.arguments}

    @property
    def communication_s(self) -> float:
        """The seconds in which devices communicate."""
        return sum(c.seconds * c.times for c in self.collectives)

    @property
    def exposed_s(self) -> float:
        """The seconds of communication that cannot hide behind compute."""
        return self.communication_s - sum(c.hideable_s * c.times for c in self.collectives)

    @property
    def serial_s(self) -> float:
        """The seconds of the step if no communication overlapped with compute: an upper bound."""
        return self.compute_s + self.communication_s + self.host_s

    @property
    def hidden_s(self) -> float:
        """The seconds of the step if one of compute and communication hid the other entirely: a lower bound."""
        return max(self.compute_s, self.communication_s) + self.host_s

    @property
    def xla_flags(self) -> dict[str, int]:
        """The flags that the plan counts on where XLA compiles it for GPUs: by name, as `compiler_options` of a compilation. A
        plan without collectives counts on none.
        """
        return xla_flags(self.cluster) if self.collectives else {}

    @property
    def offloaded(self) -> frozenset[int]:
        """The arguments in host memory, by number."""
        return frozenset(i for i, a in enumerate(self.arguments) if a.memory == "pinned_host")

    @property
    def host_bytes(self) -> int:
        """Bytes of a device's arguments in host memory."""
        return self.argument_bytes("pinned_host")

    def argument_bytes(self, memory: MemoryKind) -> int:
        """Bytes of a device's arguments in one memory, between steps."""
        sizes = [f.size for f in self.factors]
        own = [a for a in self.arguments if a.memory == memory]
        ways = [1 if a.layout is None else math.prod(sizes[f] for f in a.layout.used) for a in own]
        return sum(a.nbytes // n for a, n in zip(own, ways, strict=True))

    @property
    def communication_bytes(self) -> float:
        """Bytes that one device sends in one step, in the ring convention."""
        return sum(c.wire_bytes * c.times for c in self.collectives)

    @property
    def gap(self) -> float | None:
        """How far ``step_time_s`` lies above ``lower_bound_s``, as a fraction of that; None if the bound is not known."""
        bound_s = self.lower_bound_s
        return None if bound_s is None else self.step_time_s / bound_s - 1 if bound_s > 0 else 0.0

    @property
    def lower_bound_s(self) -> float | None:
        """A lower bound on ``step_time_s``, if it is known: what readers share may take less than the search's own bound."""
        return None if self.bound_s is None else min(self.bound_s, self.step_time_s)

    @property
    def changed_constants(self) -> dict[str, tuple[str, str]]:
        """The constants that differ today: (the plan's, today's) by name, "none" where one of them does not have it."""
        today = CONSTANTS.literals
        pairs = {n: (self.constants.get(n, "none"), today.get(n, "none")) for n in sorted({*self.constants, *today})}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    @property
    def repeated(self) -> dict[str, int]:
        """The axes along which all devices do the same work, with their sizes."""
        return {name: self.axes[name] for name, text in self.idle_axes.items() if REPEATED in text}

    @property
    def uncut(self) -> bool:
        """Whether no array is cut: each of several devices does the work of the whole step."""
        return math.prod(self.repeated.values()) == math.prod(self.axes.values()) > 1

    @property
    def axes(self) -> dict[str, int]:
        """Mesh axis names and sizes, slowest first."""
        return {f.name: f.size for f in self.factors}

    @property
    def matrix(self) -> dict[str, Any]:
        """The parallelism matrix (P2, section 3.1): a row for each purpose that factors serve, a column for each level.

        The entries of a row multiply to the size of its axis, those of a column to the size of its level.
        """
        levels = range(len(self.cluster.levels))
        own = {p: [f for f, shares in zip(self.factors, self.purposes, strict=True) if shares[0][0] == p] for p in PURPOSES}
        rows = {p: [math.prod(f.size for f in some if f.level == n) for n in levels] for p, some in own.items() if some}
        return {"axes": list(rows), "levels": list(self.cluster.level_names), "factors": list(rows.values())}

    @property
    def provenance(self) -> dict[str, Any]:
        """How the plan was found: each factoring that the search came to, with its seconds in the search's tables and a lower
        bound on them, or the reason why it was left out.
        """
        names = self.cluster.level_names
        rows = [
            {
                "factors": {names[n]: [f.size for f in t.factors if f.level == n] for n in sorted({f.level for f in t.factors})},
                **{key: value for key, value in asdict(t).items() if key != "factors"},
            }
            for t in self.tried
        ]
        return {"factorings": rows}

    @property
    def entries(self) -> dict[str, tuple[Entry, ...]]:
        """The entries of each argument's PartitionSpec, by path."""
        names = tuple(self.axes)
        return {a.path: () if a.layout is None else a.layout.entries(names) for a in self.arguments}
