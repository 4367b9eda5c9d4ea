"""The figures of a simulated step: the tasks of each stream over time, and how they differ from the plan's figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardplan.simulate.engine import NONE, Contention
from shardplan.simulate.tasks import Label


@dataclass(frozen=True, slots=True)
class PlannedFigures:
    """The figures of the plan that a timeline is compared with: seconds of one step, bytes of one device."""

    step_time_s: float
    compute_s: float
    communication_s: float
    peak_bytes: int
    memory_limit: int
    devices: int
    time_model: str
    backend: str


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Simulated:
    """One simulated step of n tasks on one device; all devices run alike.

    - Each task runs from ``start_s`` to ``end_s`` [n], and takes ``seconds`` [n] alone. ``stream`` and ``label`` [n] are indices
      into ``streams`` and ``labels`` (-1: the task only joins others). ``communicates`` [n] marks collectives; ``hidden_s`` [n]
      is the time in which the device computes beside a collective.
    - ``times`` [n] is the number of loop iterations that a task stands for; its seconds are those of all of them.
    - ``critical_path`` has the tasks that determine when the step ends, in order of time. ``busy_s`` has the busy seconds of each
      stream by name, ``exposed_s`` the seconds in which the device communicates and does not compute.
    - The device holds ``memory_bytes`` [m] from ``memory_at_s`` [m] on.
    """

    step_time_s: float
    overlap: bool
    contention: Contention
    streams: tuple[str, ...]
    kinds: tuple[str, ...]
    busy_s: Mapping[str, float]
    exposed_s: float
    critical_path: NDArray[np.int64]
    labels: tuple[Label, ...]
    label: NDArray[np.int32]
    stream: NDArray[np.int32]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    seconds: NDArray[np.float64]
    communicates: NDArray[np.bool_]
    times: NDArray[np.int64]
    hidden_s: NDArray[np.float64]
    memory_at_s: NDArray[np.float64]
    memory_bytes: NDArray[np.float64]
    priced: PlannedFigures

    def __len__(self) -> int:
        return len(self.start_s)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} tasks: {self.step_time_s:.3g} s a step, {self.exposed_s:.3g} s exposed>"

    @property
    def peak_bytes(self) -> int:
        """The most bytes that the device holds at once."""
        return int(self.memory_bytes.max(initial=0.0))

    @property
    def compute_s(self) -> float:
        """Seconds of all tasks that compute, each alone."""
        return float(self.seconds[~self.communicates].sum())

    @property
    def communication_s(self) -> float:
        """Seconds of all collectives, each alone."""
        return float(self.seconds[self.communicates].sum())

    @property
    def slowed_s(self) -> float:
        """The seconds, over all tasks, by which contention lengthens them."""
        on = self.stream != NONE
        return float((self.end_s - self.start_s)[on].sum() - self.seconds[on].sum())

    @property
    def overlapped_s(self) -> float:
        """The seconds saved because streams run at once."""
        return sum(self.busy_s.values()) - self.step_time_s


_INSTANT_S = 1e-9
"""Less than this is rounding."""


def top_exposed(shown: Simulated, count: int = 5) -> list[tuple[Label, float, int]]:
    """The labels whose collectives are exposed longest, in all: (label, exposed seconds, executions in a step)."""
    own = np.flatnonzero(shown.communicates)
    exposed = (shown.end_s - shown.start_s - shown.hidden_s)[own]
    total = np.bincount(shown.label[own], exposed, len(shown.labels))
    times = np.bincount(shown.label[own], shown.times[own], len(shown.labels))
    order = np.argsort(-total, kind="stable")[:count]
    return [(shown.labels[n], float(total[n]), int(times[n])) for n in order.tolist() if total[n] > _INSTANT_S]


def timeline_json(shown: Simulated) -> dict[str, Any]:
    """The figures of a timeline as JSON values, and the reasons why they differ from the plan's.

    The items of ``difference`` add up to the simulated step less the priced one.
    """
    priced = shown.priced
    path = shown.critical_path
    slow = shown.end_s - shown.start_s
    return {
        "step_time_s": shown.step_time_s,
        "overlap": shown.overlap,
        "contention": {"compute": shown.contention.compute, "communication": shown.contention.communication},
        "tasks": int(shown.times[shown.stream != NONE].sum()),
        "compute_s": shown.compute_s,
        "communication_s": shown.communication_s,
        "exposed_s": shown.exposed_s,
        "peak_bytes": shown.peak_bytes,
        "streams": [
            {"name": name, "kind": kind, "busy_s": shown.busy_s[name]}
            for name, kind in zip(shown.streams, shown.kinds, strict=True)
        ],
        "critical_path": {
            "tasks": len(path),
            "compute_s": float(slow[path][~shown.communicates[path]].sum()),
            "communication_s": float(slow[path][shown.communicates[path]].sum()),
        },
        "exposed": [
            {"name": x.name, "source": x.source, "bytes": x.nbytes, "axes": list(x.axes), "times": times, "exposed_s": exposed_s}
            for x, exposed_s, times in top_exposed(shown)
        ],
        "priced": {
            "step_time_s": priced.step_time_s,
            "compute_s": priced.compute_s,
            "communication_s": priced.communication_s,
            "peak_bytes": priced.peak_bytes,
            "time_model": priced.time_model,
            "backend": priced.backend,
        },
        "difference": {
            "compute_not_run_s": shown.compute_s - priced.compute_s,
            "communication_not_run_s": shown.communication_s - priced.communication_s,
            "contention_s": shown.slowed_s,
            "overlap_s": -shown.overlapped_s,
            "time_model_s": priced.compute_s + priced.communication_s - priced.step_time_s,
        },
    }
