"""A sharding that the user wrote, priced beside the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardplan.ir import Collective
from shardplan.planning.losses import Loss, Unasked
from shardplan.sizes import counted


@dataclass(frozen=True, slots=True)
class Added:
    """Collectives of one kind at one source line that XLA's partitioner adds to those that were predicted.

    ``tensor`` is the argument that they move, or the op that made the value; ``bytes`` are on the wire of a device in a step.
    """

    kind: Collective
    bytes: float
    source: str
    tensor: str


@dataclass(frozen=True, slots=True)
class Replicated:
    """A value that XLA gathers whole on every device, only to cut it in another way.

    ``tensor`` and ``source`` are as in `Added`, ``bytes`` those that each device receives in a step. ``before`` and ``after`` are
    its specs ("" if unknown). ``involuntary``: XLA says so itself, as "involuntary full rematerialization"; where no
    collective is known for it, ``bytes`` are those of one gather.
    """

    tensor: str
    source: str
    bytes: float
    before: str
    after: str
    involuntary: bool


@dataclass(frozen=True, slots=True)
class MeasuredSharding:
    """The program that XLA's partitioner makes of the step with these shardings of its arguments, compiled for simulated
    devices.

    ``communication_bytes`` and ``raw_communication_bytes`` are on the wire of a device in a step, without and with what the CPU
    compiler adds. ``collectives`` has predicted and measured bytes by kind. ``added`` are the collectives that were not
    predicted, most bytes first, ``replicated`` the values that are gathered only to be cut again, involuntary ones first.
    """

    communication_bytes: float
    raw_communication_bytes: float
    peak_bytes: int
    collectives: Mapping[str, Mapping[str, float]]
    added: tuple[Added, ...] = ()
    replicated: tuple[Replicated, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class Score:
    """The price of the user's sharding: seconds of a step, bytes of one device, and where it loses against the plan.

    The arguments have the user's shardings (``in_specs``, over ``axes``); those without a spec (``replicated``) are whole on
    every device. State comes back in the sharding in which it went in. All other values have the layouts that XLA's partitioner
    infers (``inferred``; where this JAX does not tell them, those that are best): ``inferred_share`` of their bytes do.
    ``best_s`` and ``best_communication_bytes`` are those of the step with the best layouts inside, within ``memory_limit`` if
    any fit. ``plan_s``, ``plan_communication_bytes`` and ``plan_peak_bytes`` are the plan's. ``constraints`` says whether the
    step's own sharding constraints are kept ("keep") or left out ("ignore"). ``losses`` are those of arguments where all else
    is best; ``unasked`` compares what XLA sends with the plan: see `Loss` and `Unasked`.
    """

    step_time_s: float
    plan_s: float
    communication_bytes: float
    plan_communication_bytes: float
    best_s: float
    best_communication_bytes: float
    peak_bytes: int
    plan_peak_bytes: int
    memory_limit: int
    fits: bool
    losses: tuple[Loss, ...]
    unasked: tuple[Unasked, ...]
    axes: Mapping[str, int]
    in_specs: Mapping[str, str]
    replicated: tuple[str, ...]
    constraints: str = "keep"
    inferred: bool = True
    inferred_share: float = 1.0
    measured: MeasuredSharding | None = None

    def __repr__(self) -> str:
        fits = "" if self.fits else ", and does not fit"
        times = f"{self.step_time_s / self.plan_s:.3g} times the plan's" if self.plan_s else f"the plan's {self.plan_s:.3g} s"
        losses, unasked = counted(len(self.losses), "loss", "losses"), counted(len(self.unasked), "collective")
        return f"<Score: a step takes {self.step_time_s:.3g} s, {times}{fits}; {losses}, {unasked} that the plan does not have>"

    def to_json(self) -> dict[str, Any]:
        """The score as JSON values."""
        return asdict(self)
