"""What a plan says of itself, read off its data."""

from __future__ import annotations

from typing import Any

from shardplan.collectives.issued import PlannedCollective
from shardplan.ir import Factor
from shardplan.mesh import Cluster
from shardplan.plans.data import Argument, PlanData
from shardplan.plans.xla_flags import xla_flags
from shardplan.remat import Remat
from shardplan.search.coarsening.variables import OneChoice
from shardplan.search.inference.anytime import Stopped


class Figures:
    """The fields of a plan that need neither its program nor its search."""

    _data: PlanData

    @property
    def data(self) -> PlanData:
        """Everything that the plan says so far; `completed` adds the bound and the baselines."""
        return self._data

    @property
    def cluster(self) -> Cluster:
        """The cluster that the plan is for."""
        return self._data.cluster

    @property
    def factors(self) -> tuple[Factor, ...]:
        """The factors of the levels: one mesh axis each, slowest first."""
        return self._data.factors

    @property
    def step_time_s(self) -> float:
        """Predicted seconds of one step."""
        return self._data.step_time_s

    @property
    def searched_s(self) -> float:
        """The least price in the search's tables, in which each reader has its own collective and nothing is padded.

        Where a baseline took the place of the search's own plan, it is still that of the latter.
        """
        return self._data.searched_s

    @property
    def compute_s(self) -> float:
        """The seconds of ``step_time_s`` in which devices compute."""
        return self._data.compute_s

    @property
    def communication_s(self) -> float:
        """The seconds in which devices communicate, beside compute or not."""
        return self._data.communication_s

    @property
    def exposed_s(self) -> float:
        """The seconds of communication that cannot hide behind compute."""
        return self._data.exposed_s

    @property
    def serial_s(self) -> float:
        """The seconds of the step if no communication overlapped with compute: an upper bound on ``step_time_s``."""
        return self._data.serial_s

    @property
    def hidden_s(self) -> float:
        """The seconds of the step if one of compute and communication hid the other: a lower bound on ``step_time_s``."""
        return self._data.hidden_s

    @property
    def communication_bytes(self) -> float:
        """Bytes that one device sends in one step, in the ring convention."""
        return self._data.communication_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes that one device holds at any point of a step."""
        return self._data.peak_bytes

    @property
    def memory_limit(self) -> int:
        """The bytes that a device may hold."""
        return self._data.memory_limit

    @property
    def collectives(self) -> tuple[PlannedCollective, ...]:
        """Every collective of one step, in the order of the program."""
        return self._data.collectives

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The leaves of the arguments, with their layouts."""
        return self._data.arguments

    @property
    def objective(self) -> str:
        """What the search minimised: "time" or "bytes"."""
        return self._data.objective

    @property
    def time_model(self) -> str:
        """How ``step_time_s`` adds up: "overlap" (communication hides behind compute where it can) or "sum"."""
        return self._data.time_model

    @property
    def exact(self) -> bool:
        """Whether the search found the optimum of its mesh without a memory limit."""
        return self._data.exact

    @property
    def stopped(self) -> Stopped:
        """What ended the search early: "time budget" or "interrupted"; empty if nothing did."""
        return self._data.stopped

    @property
    def one_choice(self) -> OneChoice:
        """What shares one layout although it could have several: nothing, unrolled timesteps, or equal layers too."""
        return self._data.one_choice

    @property
    def remat(self) -> Remat:
        """What is recomputed in the backward pass."""
        return self._data.remat

    @property
    def trace_s(self) -> float:
        """Measured seconds of tracing."""
        return self._data.trace_s

    @property
    def search_s(self) -> float:
        """Measured seconds of the search."""
        return self._data.search_s

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Numbers of the arguments whose buffers the step may reuse."""
        return self._data.donate_argnums

    @property
    def replicate(self) -> tuple[str, ...]:
        """Primitives without a description that run whole on every device."""
        return self._data.replicate

    @property
    def backend(self) -> str:
        """What runs the plan by default: "explicit" or "specs"."""
        return self._data.backend

    @property
    def time_budget_s(self) -> float | None:
        """The seconds that planning was allowed; None for no limit."""
        return self._data.time_budget_s

    @property
    def operators(self) -> int:
        """Number of ops of the step; ops in bodies count once."""
        return self._data.operators

    @property
    def axes(self) -> dict[str, int]:
        """Mesh axis names and sizes, slowest first."""
        return self._data.axes

    @property
    def matrix(self) -> dict[str, Any]:
        """The parallelism matrix (P2, section 3.1): a row for each purpose (data, fsdp, tensor, sequence, expert, replica) that
        factors serve, a column for each level. Entries multiply to the sizes of both.
        """
        return self._data.matrix

    @property
    def provenance(self) -> dict[str, Any]:
        """How the plan was found: the factorings that were searched, with their seconds and bounds, and what was left out."""
        return self._data.provenance

    @property
    def xla_flags(self) -> dict[str, int]:
        """The flags that the plan counts on where XLA compiles it for GPUs: by name, as `compiler_options` of a compilation."""
        return xla_flags(self.cluster)
