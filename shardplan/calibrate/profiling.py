"""A profile of the devices at hand: measures kernels, collectives and contention, and fits the cost model's figures to them."""

from __future__ import annotations

import math
import os
import platform as host
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from shardplan.calibrate.cache import Cache, key_of
from shardplan.calibrate.defaults import BOUND, ROUNDS
from shardplan.calibrate.fitting import (
    KernelWork,
    Residual,
    Sample,
    contention_of,
    fit_device,
    fit_links,
    residuals,
    transfer_s,
    work_of,
)
from shardplan.calibrate.measured_kernels import LAUNCHES, Kernel, KernelArgument, kernels, sizes_of
from shardplan.calibrate.measured_transfers import TimedCollective, transfer, transfers
from shardplan.calibrate.timing import Timed, TimedFunction, spread_of, timed
from shardplan.cost.network import Network
from shardplan.errors import CalibrationError, ClusterError
from shardplan.frontend.trace import trace
from shardplan.graph import flatten
from shardplan.ir import Collective, Factor
from shardplan.mesh import Cluster, factors
from shardplan.mesh.devices import build_mesh, detected
from shardplan.mesh.machine import DEFAULT_CONTENTION
from shardplan.mesh.profile import Profile
from shardplan.plans.xla_flags import xla_flags

_HARNESS = 1
"""Part of every cache key: raised whenever a change of kernels or timing makes older measurements invalid."""

Observer = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Calibration:
    """A profile with its evidence.

    ``residuals`` are prediction errors by family, ``kept`` the figures that were not measured, one sentence each. ``spread`` is
    (median, largest, name of the largest) of the measurements' spreads. ``measured`` and ``cached`` count measurements.
    """

    profile: Profile
    residuals: tuple[Residual, ...]
    samples: tuple[Sample, ...]
    kept: tuple[str, ...]
    spread: tuple[float, float, str]
    measured: int
    cached: int


@dataclass(frozen=True, slots=True)
class Bench:
    """The means to measure: a mesh of the cluster's devices, the cache, the number of rounds and the largest accepted spread.

    ``identity`` is the part of cache keys that all measurements share. With ``fresh``, cached measurements are made again.
    """

    cluster: Cluster
    factors: tuple[Factor, ...]
    mesh: Mesh
    identity: Mapping[str, Any]
    cache: Cache | None
    rounds: int
    bound: float
    fresh: bool

    def key(self, what: Any) -> str:
        """The cache key of a measurement that ``what`` (JSON values) identifies on these devices."""
        return key_of({**self.identity, "what": what})

    def seconds(
        self, tasks: Mapping[str, tuple[TimedFunction, Any]], done: Callable[[float], None]
    ) -> tuple[dict[str, Timed], int]:
        """(the seconds of each task by name, how many of them came from the cache).

        Each task comes with the JSON values that identify it on these devices. Measurements whose spread is within the bound go
        to the cache.
        """
        keys = {name: self.key(what) for name, (_, what) in tasks.items()}
        known = self.cache.entries if self.cache is not None and not self.fresh else {}
        missing = [name for name in tasks if keys[name] not in known]
        found = {name: known[keys[name]] for name in tasks if keys[name] in known}
        if missing:
            rows = timed([tasks[name][0] for name in missing], self.mesh, rounds=self.rounds, done=done)
            new = dict(zip(missing, rows, strict=True))
            if self.cache is not None:
                self.cache.add({keys[name]: row for name, row in new.items() if row.spread <= self.bound})
            found |= new
        return {name: found[name] for name in tasks}, len(tasks) - len(missing)


def calibrate(
    *,
    devices: Sequence[Any] | None = None,
    shape: Cluster | None = None,
    cache: Path | None = None,
    fresh: bool = False,
    rounds: int = ROUNDS,
    bound: float = BOUND,
    observer: Observer | None = None,
) -> Calibration:
    """Measures these devices (by default all that JAX has), with all of them busy at once.

    ``shape`` describes the levels of the machine where detection cannot tell them; measured figures replace its own. ``cache``
    is the folder of measurements (None: no cache); ``fresh`` ignores what it holds. ``rounds`` is the number of interleaved
    repeats, ``bound`` the largest median spread that is accepted.

    Raises:
        ClusterError: if the devices have no figures to start from, or ``shape`` has another number of devices.
        CalibrationError: if the repeats spread by more than the bound, the cache cannot be used, or ``rounds`` is less than 3.
    """
    if rounds < 3:
        raise CalibrationError(f"rounds is {rounds}: give 3 or more")
    tell = observer or (lambda what, part: None)
    bench = bench_of(devices, shape, cache, fresh=fresh, rounds=rounds, bound=bound)
    listed, moves = kernels(sizes_of(bench.cluster.device.platform)), transfers(bench.cluster, bench.factors)
    works = {k.name: work_of_kernel(k) for k in listed}
    kernel_times, kernels_cached = bench.seconds(
        {k.name: (TimedFunction(k.function, k.arguments), kernel_text(k)) for k in listed},
        lambda part: tell("measuring kernels", 0.6 * part),
    )
    move_times, moves_cached = bench.seconds(
        {t.name: (_task(t, bench), transfer_text(t, bench)) for t in moves},
        lambda part: tell("measuring collectives", 0.6 + 0.3 * part),
    )
    spread = spread_of({name: t.spread for name, t in {**kernel_times, **move_times}.items()})
    _check_spread(spread, bound)
    measured = _Measured(listed, works, kernel_times, moves, move_times)
    cluster, levels, kept = _fitted(bench, measured, lambda part: tell("measuring contention", 0.9 + 0.1 * part))
    samples = _samples(cluster, bench.factors, measured)
    by_family = residuals(samples)
    profile = Profile(cluster, bench.identity["kind"], levels, _evidence(bench, samples, by_family, kept, spread))
    cached = kernels_cached + moves_cached
    return Calibration(profile, by_family, samples, kept, spread, len(samples) - cached, cached)


@dataclass(frozen=True, slots=True)
class _Measured:
    """The kernels with the work that the planner prices, the collectives, and the measured seconds of both by name."""

    kernels: Sequence[Kernel]
    works: Mapping[str, KernelWork]
    kernel_times: Mapping[str, Timed]
    moves: Sequence[TimedCollective]
    move_times: Mapping[str, Timed]


def _fitted(bench: Bench, measured: _Measured, done: Callable[[float], None]) -> tuple[Cluster, tuple[str, ...], tuple[str, ...]]:
    """(the cluster with the fitted figures, the levels whose links were measured, the figures that were not measured).

    This measures contention too, if there are collectives.
    """
    rows = [(k.family == LAUNCHES, (measured.works[k.name], measured.kernel_times[k.name].seconds)) for k in measured.kernels]
    device, kept_dtypes = fit_device(
        bench.cluster.device, [row for tiny, row in rows if not tiny], [row for tiny, row in rows if tiny]
    )
    cluster, levels = replace(bench.cluster, device=device), ()
    if measured.moves:
        times = [(t, measured.move_times[t.name].seconds) for t in measured.moves]
        cluster, levels = fit_links(cluster, bench.factors, times)
        contention = _contention(replace(bench, cluster=cluster), measured.works, done)
        cluster = replace(cluster, device=replace(cluster.device, contention=contention))
    return cluster, levels, _kept(cluster, levels, kept_dtypes)


def bench_of(
    devices: Sequence[Any] | None,
    shape: Cluster | None,
    cache: Path | None,
    *,
    fresh: bool = False,
    rounds: int = ROUNDS,
    bound: float = BOUND,
) -> Bench:
    """The bench for these devices; arguments as for `calibrate`.

    Raises:
        ClusterError: if the devices have no figures to start from, or ``shape`` has another number of devices.
        CalibrationError: if the cache cannot be used.
    """
    present = list(jax.devices() if devices is None else devices)
    cluster = replace(found := detected(present).cluster, name=f"calibrated-{found.name.removeprefix('detected-')}")
    if shape is not None:
        if shape.size != len(present):
            raise ClusterError(
                f"{shape.name} has {shape.size} devices ({'x'.join(map(str, shape.shape))}), the machine {len(present)}: "
                "give the shape of this machine"
            )
        cluster = replace(cluster, levels=shape.levels, name=f"{cluster.name}-{'x'.join(map(str, shape.shape))}")
    axes = factors(cluster)
    mesh = build_mesh(cluster, axes, {f.name: (i,) for i, f in enumerate(axes)}, present) if axes else Mesh(present, ("device",))
    opened = Cache.opened(cache) if cache is not None else None
    return Bench(cluster, axes, mesh, _identity(present, cluster), opened, rounds, bound, fresh)


def _identity(devices: Sequence[Any], cluster: Cluster) -> dict[str, Any]:
    """The part of cache keys that all measurements on these devices share."""
    kind = str(devices[0].device_kind)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    processor = _processor() if cluster.device.platform == "cpu" else ""
    return {
        "platform": cluster.device.platform,
        "kind": kind,
        "processor": processor,
        "cores": cores if cluster.device.platform == "cpu" else None,
        "shape": [n for n in cluster.shape if n > 1],
        "jax": jax.__version__,
        "harness": _HARNESS,
    }


def _processor() -> str:
    """The name of the host's processor; CPU devices are all called cpu."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or host.processor() or host.machine()


def work_of_kernel(kernel: Kernel) -> KernelWork:
    """The work of a kernel on one device, as the planner prices it."""
    with jax.enable_x64(any(a.dtype == "float64" for a in kernel.arguments)):
        return work_of(flatten(trace(kernel.function, *(a.struct for a in kernel.arguments)).program))


def kernel_text(kernel: Kernel) -> str:
    """The kernel's primitives, parameters, shapes and dtypes."""
    with jax.enable_x64(any(a.dtype == "float64" for a in kernel.arguments)):
        return str(jax.make_jaxpr(kernel.function)(*(a.struct for a in kernel.arguments)))


def _task(move: TimedCollective, bench: Bench) -> TimedFunction:
    return TimedFunction(move.function([bench.factors[i].name for i in move.over]), (move.argument,))


def transfer_text(move: TimedCollective, bench: Bench) -> list[Any]:
    """The collective's kind, the factors that it runs over, and its bytes."""
    return [move.kind.name.lower(), [[bench.factors[i].size, bench.factors[i].level] for i in move.over], move.nbytes]


def _check_spread(spread: tuple[float, float, str], bound: float) -> None:
    middle, worst, name = spread
    if middle > bound:
        raise CalibrationError(
            f"the repeats of one measurement spread by {middle:.0%} (median; {worst:.0%} of {name}), more than the bound of "
            f"{bound:.2g}: the machine is busy; end other programs, repeat more often (--repeats), or accept it (--spread "
            f"{math.ceil(middle * 10 + 1) / 10:g})"
        )


def _contention(bench: Bench, works: Mapping[str, KernelWork], done: Callable[[float], None]) -> float:
    """The contention of a product and an all-reduce over all devices that take about as long as each other."""
    n = sizes_of(bench.cluster.device.platform).square[1]
    operands = (KernelArgument((n, n), "float32"), KernelArgument((n, n), "float32"))
    network, over = Network(bench.cluster, bench.factors), tuple(range(len(bench.factors)))
    alone_s = works[f"{n}x{n}x{n} float32"].seconds(bench.cluster.device)
    tried = [transfer(bench.cluster, bench.factors, Collective.ALL_REDUCE, over, 1 << p) for p in range(10, 31)]
    move = min(tried, key=lambda t: abs(math.log(transfer_s(network, t) / alone_s)))
    send = move.function([f.name for f in bench.factors])
    options = tuple(sorted(xla_flags(bench.cluster).items())) if bench.cluster.device.platform == "gpu" else ()
    tasks = {
        "compute": TimedFunction(lambda a, b: a @ b, operands, options),
        "communication": TimedFunction(send, (move.argument,), options),
        "both": TimedFunction(lambda a, b, x: (a @ b, send(x)), (*operands, move.argument), options),
    }
    what = [n, transfer_text(move, bench), [list(option) for option in options]]
    times, _ = bench.seconds({name: (task, ["contention", name, *what]) for name, task in tasks.items()}, done)
    _check_spread(spread_of({f"{name} for the contention": t.spread for name, t in times.items()}), bench.bound)
    return contention_of(times["compute"].seconds, times["communication"].seconds, times["both"].seconds)


def _samples(cluster: Cluster, axes: tuple[Factor, ...], measured: _Measured) -> tuple[Sample, ...]:
    """Every measured kernel and collective beside the seconds that the fitted figures predict."""
    network = Network(cluster, axes)
    predicted_s = {k.name: measured.works[k.name].seconds(cluster.device) for k in measured.kernels}
    predicted_s |= {t.name: transfer_s(network, t) for t in measured.moves}
    times = {**measured.kernel_times, **measured.move_times}
    return tuple(
        Sample(one.family, one.name, times[one.name].seconds, predicted_s[one.name], times[one.name].spread)
        for one in (*measured.kernels, *measured.moves)
    )


def _kept(cluster: Cluster, levels: Sequence[str], dtypes: Sequence[str]) -> tuple[str, ...]:
    """The figures that were not measured, a sentence each."""
    unmeasured = [level.name for level in cluster.levels if level.name not in levels]
    result = [f"the rate of products of {dtype} is the preset's" for dtype in dtypes]
    result += [f"the link of the level {name!r} is the preset's: it has one child here" for name in unmeasured]
    if not levels:
        contention = f"the contention is the default, {DEFAULT_CONTENTION:g}, and a collective's launch the preset's"
        result.append(f"{contention}: one device has no collectives")
    result.append("the rate of fused attention is the preset's part of that of products")
    result.append("the memory of a device is the preset's")
    return tuple(result)


def _evidence(
    bench: Bench, samples: Sequence[Sample], found: Sequence[Residual], kept: Sequence[str], spread: tuple[float, float, str]
) -> dict[str, Any]:
    return {
        "software": {"jax": jax.__version__, "processor": bench.identity["processor"]},
        "kept": list(kept),
        "spread": {
            "median": spread[0],
            "worst": spread[1],
            "worst_name": spread[2],
            "bound": bench.bound,
            "repeats": bench.rounds,
        },
        "fit": [asdict(one) for one in found],
        "samples": [asdict(sample) for sample in samples],
    }
