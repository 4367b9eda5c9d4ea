"""A sharding that the user wrote, priced beside the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardplan.planning.losses import Loss, Unasked


@dataclass(frozen=True, slots=True)
class MeasuredSharding:
    """The program that XLA's partitioner makes of the step with these shardings of its arguments, compiled for simulated
    devices.

    ``communication_bytes`` and ``raw_communication_bytes`` are on the wire of a device in a step, without and with what the CPU
    compiler adds. ``collectives`` has predicted and measured bytes by kind.
    """

    communication_bytes: float
    raw_communication_bytes: float
    peak_bytes: int
    collectives: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True, repr=False)
class Score:
    """The price of the user's sharding: seconds of a step, bytes of one device, and where it loses against the plan.

    The arguments lie as the user says (``in_specs``, over ``axes``), those without a spec (``replicated``) whole on every device;
    state comes back as it went in. All else is completed as is best for these arguments, as it is for a baseline, so XLA's
    partitioner may do worse: ``measured`` says what it does. ``fits``: the best completion that fits into ``memory_limit`` is
    priced; where none fits, the fastest. ``plan_s``, ``plan_communication_bytes`` and ``plan_peak_bytes`` are the plan's.
    ``losses`` and ``unasked``: see `Loss` and `Unasked`.
    """

    step_time_s: float
    plan_s: float
    communication_bytes: float
    plan_communication_bytes: float
    peak_bytes: int
    plan_peak_bytes: int
    memory_limit: int
    fits: bool
    losses: tuple[Loss, ...]
    unasked: tuple[Unasked, ...]
    axes: Mapping[str, int]
    in_specs: Mapping[str, str]
    replicated: tuple[str, ...]
    measured: MeasuredSharding | None = None

    def __repr__(self) -> str:
        fits = "" if self.fits else ", and does not fit"
        return (
            f"<Score: a step takes {self.step_time_s:.3g} s, {self.step_time_s / self.plan_s:.3g} times the plan's{fits}; "
            f"{len(self.losses)} losses, {len(self.unasked)} collectives that the plan does not have>"
        )

    def to_json(self) -> dict[str, Any]:
        """The score as JSON values."""
        return asdict(self)
