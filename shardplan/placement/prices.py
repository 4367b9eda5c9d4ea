"""Seconds of an operator's parts, for each phase and each way to cut it: the roofline of `shardplan.cost` over its ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardplan.placement.configurations import degrees_of
from shardplan.placement.device_topology import TICK_S, DeviceTopology
from shardplan.placement.operators import Labels, Operator, OpWork
from shardplan.search.problem.compute_prices import shared_compute_s

Degrees = NDArray[np.int64]  # [cuts, loops]
Floats = NDArray[np.float64]


@dataclass(slots=True)
class PartPrices:
    """Ticks of the parts of operators on a device of speed 1, memoised: equal operators share a table."""

    machine: DeviceTopology
    _tables: dict[object, dict[tuple[int, ...], tuple[int, int, int]]] = field(
        default_factory=dict[object, dict[tuple[int, ...], tuple[int, int, int]]]
    )

    def table(self, operator: Operator) -> dict[tuple[int, ...], tuple[int, int, int]]:
        """For each degrees of the operator's loops, the ticks of one part in the forward pass, backward pass and update."""
        key = (tuple(loop.extent for loop in operator.loops), *(tuple(map(_key, works)) for works in operator.works))
        if key not in self._tables:
            choices = degrees_of(operator, self.machine.count)
            degrees = np.array(choices, np.int64).reshape(len(choices), len(operator.loops))
            phases = [sum((self._seconds(w, degrees) for w in works), np.zeros(len(choices))) for works in operator.works]
            ticks = np.rint(np.stack(phases, axis=1) / TICK_S).astype(np.int64)
            self._tables[key] = dict(zip(choices, map(tuple, ticks.tolist()), strict=True))
        return self._tables[key]

    def _seconds(self, work: OpWork, degrees: Degrees) -> Floats:
        operands, results = ([share_of(labels, degrees) for labels in side] for side in (work.operands, work.results))
        ways = {v: degrees[:, n] for v, n in work.cut}
        part = share_of(work.divides, degrees)
        each = shared_compute_s(work.signature, self.machine.cluster.device, part, operands, results, ways)
        if not work.reduces:
            return each * work.times
        share = results[0] if results else np.ones(len(degrees))
        return each * work.times + self._exchange(work.exchanged * share, np.prod(degrees[:, list(work.reduces)], axis=1))

    def _exchange(self, nbytes: Floats, parts: NDArray[np.int64]) -> Floats:
        """The seconds in which a ring of so many neighbouring devices reduces a result of which each device has a term."""
        last = np.minimum(parts, self.machine.count) - 1
        ring = np.concatenate([[0.0], np.cumsum(np.diagonal(self.machine.latency_s, 1))])[last]
        slowest = np.concatenate([[np.inf], np.minimum.accumulate(np.diagonal(self.machine.bytes_per_s, 1))])[last]
        wire = 2 * (parts - 1) / parts
        return np.where(parts > 1, wire * (ring + nbytes / slowest) + self.machine.cluster.device.instruction_s, 0.0)


def share_of(loops: Labels | Sequence[int], degrees: Degrees) -> Floats:
    """[cuts]: the fraction of a tensor that a part has, or of the arithmetic, that these loops divide."""
    own = [n for n in dict.fromkeys(loops) if n >= 0]
    return 1.0 / np.prod(degrees[:, own], axis=1) if own else np.ones(len(degrees))


def _key(work: OpWork) -> tuple[object, ...]:
    return work.signature.id, work.times, work.operands, work.results, work.cut, work.divides, work.reduces, work.exchanged
