"""Figures of the cost model from measured seconds: least squares on relative errors.

The fitted model is the planner's own: `whole_compute_s` prices the ops of a kernel as the search does, and `Network` prices the
collectives. A residual is the logarithm of predicted over measured seconds: to first order the relative error, and the same for
half as for double. The loss is Cauchy's: residuals beyond `_SOFT` count less and less, so a kernel that the model prices badly
hardly changes the figures of the others.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from shardplan.calibrate.measured_transfers import TimedCollective
from shardplan.cost.compute import rated
from shardplan.cost.network import Network
from shardplan.graph import Graph
from shardplan.graph.nodes import Signature
from shardplan.ir import Factor
from shardplan.mesh import Cluster, Device
from shardplan.search.problem.compute_prices import whole_compute_s

_SOFT = 0.3
"""The residual at which the loss begins to flatten: a third too slow or too fast."""
_FAST = 1e30
"""A rate (flops or bytes per second) at which work costs nothing."""


@dataclass(frozen=True, slots=True)
class KernelWork:
    """The work of a kernel, as the planner prices it: signatures of ops with the number of executions of each.

    ``dtypes`` are those of its matrix products.
    """

    ops: tuple[tuple[Signature, float], ...]
    dtypes: frozenset[str]

    def seconds(self, device: Device) -> float:
        """The predicted seconds on a device."""
        return sum(times * whole_compute_s(signature, device) for signature, times in self.ops)


def work_of(graph: Graph) -> KernelWork:
    """The work of a graph that runs on one device, uncut."""
    counts: Counter[int] = Counter()
    signatures: dict[int, Signature] = {}
    for node in graph.nodes:
        signatures[node.costed.id] = node.costed
        counts[node.costed.id] += node.weight  # pyright: ignore[reportArgumentType] - times may be fractions
    products = [s.call for s in signatures.values() if s.contracts]
    dtypes = frozenset(next((d for d in call.dtypes if d), "float32") for call in products)
    return KernelWork(tuple((signatures[i], float(n)) for i, n in sorted(counts.items())), dtypes)


@dataclass(frozen=True, slots=True)
class Residual:
    """The prediction errors of one family of kernels.

    ``median`` is the median of absolute relative errors, ``worst`` the largest relative error with its sign (as a ratio, so half
    and double are equally bad), and ``worst_name`` its kernel.
    """

    family: str
    samples: int
    median: float
    worst: float
    worst_name: str


@dataclass(frozen=True, slots=True)
class Sample:
    """Measured and predicted seconds of one kernel or collective; ``spread`` is that of `Timed`."""

    family: str
    name: str
    seconds: float
    predicted_s: float
    spread: float

    @property
    def error(self) -> float:
        """The relative error: predicted over measured seconds, less one."""
        return self.predicted_s / self.seconds - 1


def residuals(samples: Sequence[Sample]) -> tuple[Residual, ...]:
    """The errors of each family, in the order in which the samples name the families."""
    families: dict[str, list[Sample]] = {}
    for sample in samples:
        families.setdefault(sample.family, []).append(sample)
    result: list[Residual] = []
    for family, own in families.items():
        worst = max(own, key=lambda s: (abs(np.log(s.predicted_s / s.seconds)), s.name))
        result.append(Residual(family, len(own), statistics.median(abs(s.error) for s in own), worst.error, worst.name))
    return tuple(result)


def fit_device(
    base: Device, measured: Sequence[tuple[KernelWork, float]], launches: Sequence[tuple[KernelWork, float]]
) -> tuple[Device, tuple[str, ...]]:
    """(the device whose rates predict the measured seconds best, the dtypes whose peaks are still those of ``base``).

    ``measured`` pairs the work of kernels with their seconds, ``launches`` that of chains of tiny kernels. A launch takes the
    median, over those chains, of the seconds of one kernel. The model's rates are a peak times an efficiency. The peak is the
    best rate that any single kernel reached (in the tiles of ``base``, if it has any), and the efficiency is the fitted rate over
    that peak (for products, the median over dtypes).
    """
    dtypes = sorted({dtype for work, _ in measured for dtype in work.dtypes})
    free = _Rates(dict.fromkeys(dtypes, _FAST), _FAST, 1.0)
    launch_s = statistics.median(seconds / work.seconds(free.device(base)) for work, seconds in launches)
    best = _Rates.best(base, measured, dtypes, launch_s)
    fitted = _Rates.of(
        _least_squares(best.logs(), lambda x: _Rates.of(x, dtypes, launch_s).errors(base, measured)), dtypes, launch_s
    )
    efficiency = statistics.median(fitted.flops[d] / best.flops[d] for d in dtypes)
    kept = tuple(d for d in base.flops_per_s if d not in dtypes)
    device = replace(
        base,
        # the rates of dtypes that were not measured stay what they were
        flops_per_s={
            **{d: base.flops_per_s[d] * base.flops_efficiency / efficiency for d in kept},
            **{d: fitted.flops[d] / efficiency for d in dtypes},
        },
        flops_efficiency=float(efficiency),
        # no attention kernel is measured: it stays behind products by the factor of the preset
        attention_efficiency=min(1.0, float(efficiency) * base.attention_efficiency / base.flops_efficiency),
        memory_bytes_per_s=best.memory,
        memory_efficiency=fitted.memory / best.memory,
        launch_s=launch_s,
        collective_launch_s=base.instruction_s,
    )
    return device, kept


@dataclass(frozen=True, slots=True)
class _Rates:
    """The fitted parameters of a device: effective flops per second by dtype and bytes per second; and a launch's seconds."""

    flops: Mapping[str, float]
    memory: float
    launch_s: float

    @staticmethod
    def of(logs: NDArray[np.float64], dtypes: Sequence[str], launch_s: float) -> _Rates:
        """The rates from their logarithms [dtypes + 1]: those of the dtypes in order, then that of memory."""
        values = np.exp(logs).tolist()
        return _Rates(dict(zip(dtypes, values[:-1], strict=True)), values[-1], launch_s)

    def logs(self) -> NDArray[np.float64]:
        """The logarithms [dtypes + 1] of the rates: those of the dtypes in order, then that of memory."""
        return np.log([*(self.flops[d] for d in sorted(self.flops)), self.memory])

    @staticmethod
    def best(base: Device, measured: Sequence[tuple[KernelWork, float]], dtypes: Sequence[str], launch_s: float) -> _Rates:
        """The best rates that any kernel reached. No kernel is faster, so the fit starts at this upper edge."""
        free = _Rates(dict.fromkeys(dtypes, _FAST), _FAST, 0.0)
        flops, memory = dict.fromkeys(dtypes, 0.0), 0.0
        for work, seconds in measured:
            for dtype in work.dtypes:
                one = replace(free, flops={**free.flops, dtype: 1.0})
                flops[dtype] = max(flops[dtype], work.seconds(one.device(base)) / seconds)
            memory = max(memory, work.seconds(replace(free, memory=1.0).device(base)) / seconds)
        return _Rates(flops, memory, launch_s)

    def device(self, base: Device) -> Device:
        """A device with exactly these rates."""
        return replace(
            base,
            flops_per_s=self.flops,
            flops_efficiency=1.0,
            memory_bytes_per_s=self.memory,
            memory_efficiency=1.0,
            launch_s=self.launch_s,
        )

    def errors(self, base: Device, measured: Sequence[tuple[KernelWork, float]]) -> NDArray[np.float64]:
        """The residual of each kernel [kernels]."""
        device = self.device(base)
        return np.log([work.seconds(device) / seconds for work, seconds in measured])


def fit_links(
    cluster: Cluster, factors: Sequence[Factor], measured: Sequence[tuple[TimedCollective, float]]
) -> tuple[Cluster, tuple[str, ...]]:
    """(the cluster whose links and collective launch predict the measured seconds best, the names of the levels measured).

    The fitted bandwidths are those that collectives reach, so the efficiencies of the measured levels are 1.
    """
    levels = sorted({factors[i].level for transfer, _ in measured for i in transfer.over})
    reached = replace(
        cluster,
        levels=tuple(
            replace(level, ring_efficiency=1.0, tree_efficiency=1.0) if i in levels else level
            for i, level in enumerate(cluster.levels)
        ),
    )

    def with_links(logs: NDArray[np.float64]) -> Cluster:
        """The cluster with the figures of these logarithms [2 levels + 1]: bandwidths, latencies, and a collective's launch."""
        values = np.exp(logs).tolist()
        links = dict(zip(levels, zip(values[: len(levels)], values[len(levels) : -1], strict=True), strict=True))
        return replace(
            reached,
            levels=tuple(
                replace(level, bandwidth_bytes_per_s=links[i][0], latency_s=links[i][1]) if i in links else level
                for i, level in enumerate(reached.levels)
            ),
            device=replace(reached.device, collective_launch_s=values[-1]),
        )

    def errors(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        """The residual of each collective [collectives]."""
        network = Network(with_links(logs), tuple(factors))
        return np.log([transfer_s(network, t) / seconds for t, seconds in measured])

    shortest = min(seconds for _, seconds in measured)
    fastest = {i: max(t.nbytes / s for t, s in measured if any(factors[f].level == i for f in t.over)) for i in levels}
    start = np.log([*(fastest[i] for i in levels), *(shortest / 20 for _ in levels), shortest / 2])
    return with_links(_least_squares(start, errors)), tuple(cluster.levels[i].name for i in levels)


def transfer_s(network: Network, transfer: TimedCollective) -> float:
    """The predicted seconds of one execution of a collective."""
    return float(network.seconds(transfer.kind, transfer.over, transfer.nbytes))


def _least_squares(start: NDArray[np.float64], errors: Callable[[Any], NDArray[np.float64]]) -> NDArray[np.float64]:
    # figures may move by a factor of 10,000 either way: further, they no longer matter to any sample
    span = np.log(1e4)
    return least_squares(errors, start, bounds=(start - span, start + span), loss="cauchy", f_scale=_SOFT).x


def contention_of(compute_s: float, communication_s: float, both_s: float) -> float:
    """The factor c by which compute and communication slow each other, from the seconds of each alone and of both together.

    While both run, each takes c times as long. The shorter one ends after ``c * shorter``; the longer one then has
    ``longer - shorter`` left. So ``both = c * shorter + longer - shorter``. Noise may put c below 1; then the result is 1.

    >>> contention_of(2.0, 3.0, 5.0), contention_of(2.0, 3.0, 3.0)
    (2.0, 1.0)
    """
    shorter, longer = sorted((compute_s, communication_s))
    return max(1.0, 1 + (both_s - longer) / shorter)


def rate_of(device: Device, dtype: str) -> float:
    """Flops per second that matrix products of a dtype reach."""
    return device.flops_per_s[rated(device, dtype)] * device.flops_efficiency
