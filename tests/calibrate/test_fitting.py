"""Figures that made the seconds come back from them, and what the model cannot price does not move them."""

from __future__ import annotations

import random
from dataclasses import replace

import jax
import pytest

from shardplan.calibrate.fitting import Sample, contention_of, fit_device, fit_links, rate_of, residuals, transfer_s, work_of
from shardplan.calibrate.measured_kernels import ACCELERATOR, CPU, LAUNCHES, kernels
from shardplan.calibrate.measured_transfers import transfers
from shardplan.calibrate.profiling import work_of_kernel
from shardplan.cost.network import Network
from shardplan.frontend.trace import trace
from shardplan.graph import flatten
from shardplan.mesh import Cluster, Device, factors

TRUE = Device("true", {"float32": 3e10, "bfloat16": 5e10, "float16": 2e10, "float64": 1e10}, 6e9, 2**33, 5e-6, 0.7, 0.5)
LISTED = kernels(CPU)
WORKS = [work_of_kernel(k) for k in LISTED]


def fitted(seconds: list[float]) -> Device:
    rows = list(zip(LISTED, WORKS, seconds, strict=True))
    base = Cluster.load("cpu").device
    measured = [(w, s) for k, w, s in rows if k.family != LAUNCHES]
    return fit_device(base, measured, [(w, s) for k, w, s in rows if k.family == LAUNCHES])[0]


def test_the_rates_that_made_the_seconds_come_back() -> None:
    device = fitted([w.seconds(TRUE) for w in WORKS])
    for dtype in TRUE.flops_per_s:
        assert rate_of(device, dtype) == pytest.approx(rate_of(TRUE, dtype), rel=0.01)
    reached = device.memory_bytes_per_s * device.memory_efficiency
    assert reached == pytest.approx(TRUE.memory_bytes_per_s * TRUE.memory_efficiency, rel=0.01)
    assert device.launch_s == pytest.approx(TRUE.launch_s, rel=0.05)


def test_the_rates_of_a_gpu_come_back_through_its_tiles() -> None:
    """Skinny and small products are among the kernels: their seconds say less of the rate than their flops do."""
    gpu = Cluster.load("dgx-h100").device
    true = replace(gpu, flops_per_s={dtype: gpu.flops_per_s[dtype] for dtype in TRUE.flops_per_s})
    rows = [(kernel, work_of_kernel(kernel)) for kernel in kernels(ACCELERATOR)]
    plain = replace(true, compute_units=None)
    assert max(work.seconds(true) / work.seconds(plain) for _, work in rows) > 1.1
    measured, launches = (
        [(work, work.seconds(true)) for kernel, work in rows if (kernel.family == LAUNCHES) == tiny] for tiny in (False, True)
    )
    device, _ = fit_device(true, measured, launches)
    assert device.compute_units == 132
    for dtype in true.flops_per_s:
        assert rate_of(device, dtype) == pytest.approx(rate_of(true, dtype), rel=0.01)


def test_fused_attention_stays_behind_products_by_the_factor_of_the_preset() -> None:
    preset, device = Cluster.load("cpu").device, fitted([w.seconds(TRUE) for w in WORKS])
    factor = preset.attention_efficiency / preset.flops_efficiency
    assert device.attention_efficiency / device.flops_efficiency == pytest.approx(factor)


def test_noise_and_kernels_that_nothing_prices_move_the_rates_little() -> None:
    rng = random.Random(0)
    seconds = [w.seconds(TRUE) * rng.uniform(0.8, 1.25) for w in WORKS]
    slow = [30 * s if "gradient of the filter" in k.name else s for k, s in zip(LISTED, seconds, strict=True)]
    device = fitted(slow)
    assert rate_of(device, "float32") == pytest.approx(rate_of(TRUE, "float32"), rel=0.15)


def test_a_dtype_that_was_not_measured_keeps_its_rate() -> None:
    rows = [(k, w) for k, w in zip(LISTED, WORKS, strict=True) if "float16" not in k.name]
    base = Cluster.load("cpu").device
    measured = [(w, w.seconds(TRUE)) for k, w in rows if k.family != LAUNCHES]
    device, kept = fit_device(base, measured, [(w, w.seconds(TRUE)) for k, w in rows if k.family == LAUNCHES])
    assert set(kept) == {"bfloat16", "float16"}
    assert rate_of(device, "float16") == pytest.approx(rate_of(base, "float16"))


def test_without_collectives_their_launch_is_still_the_presets() -> None:
    base = replace(Cluster.load("cpu").device, launch_s=3e-5, collective_launch_s=None)
    rows = list(zip(LISTED, WORKS, strict=True))
    measured, chains = ([(w, w.seconds(TRUE)) for k, w in rows if (k.family == LAUNCHES) == tiny] for tiny in (False, True))
    device, _ = fit_device(base, measured, chains)
    assert device.launch_s == pytest.approx(TRUE.launch_s, rel=0.05)
    assert device.instruction_s == base.instruction_s == 3e-5


def test_the_work_of_a_loop_is_that_of_all_its_iterations() -> None:
    def steps(n: int) -> float:
        traced = trace(
            lambda x, w: jax.lax.fori_loop(0, n, lambda _, y: y @ w, x), *[jax.ShapeDtypeStruct((64, 64), "float32")] * 2
        )
        return work_of(flatten(traced.program)).seconds(replace(TRUE, launch_s=0.0))

    product_s = 2 * 64**3 / rate_of(TRUE, "float32")
    assert steps(20) - steps(10) == pytest.approx(10 * product_s, rel=0.01)


@pytest.mark.parametrize("kind", ["switch", "bus", "ring"])
def test_the_links_that_made_the_seconds_come_back(kind: str) -> None:
    base = Cluster.load("2x4")
    speeds = ((2e9, 4e-5), (3e10, 2e-6))
    levels = tuple(
        replace(level, kind=kind, rails=1, bandwidth_bytes_per_s=b, latency_s=s, ring_efficiency=1.0, tree_efficiency=1.0)
        for level, (b, s) in zip(base.levels, speeds, strict=True)
    )
    true = replace(base, levels=levels, device=replace(base.device, collective_launch_s=1.5e-5))
    wrong = {"bandwidth_bytes_per_s": 1e10, "latency_s": 1e-6, "ring_efficiency": 0.6, "tree_efficiency": 0.5}
    guess = replace(true, levels=tuple(replace(level, **wrong) for level in levels))
    axes = factors(true)
    moves = transfers(true, axes)
    found, names = fit_links(guess, axes, [(t, transfer_s(Network(true, axes), t)) for t in moves])
    assert names == ("node", "gpu")
    for t in moves:
        assert transfer_s(Network(found, axes), t) == pytest.approx(transfer_s(Network(true, axes), t), rel=0.03)
    assert [level.bandwidth_bytes_per_s for level in found.levels] == pytest.approx([2e9, 3e10], rel=0.05)
    assert [(level.ring_efficiency, level.tree_efficiency) for level in found.levels] == [(1.0, 1.0)] * 2


def test_contention_is_what_overlapping_work_pays() -> None:
    for c in (1.0, 1.3, 2.0):
        for compute_s, communication_s in ((1.0, 1.0), (1.0, 3.0), (5.0, 2.0)):
            shorter, longer = sorted((compute_s, communication_s))
            assert contention_of(compute_s, communication_s, c * shorter + longer - shorter) == pytest.approx(c)
    assert contention_of(1.0, 1.0, 0.9) == 1.0  # noise: nobody is faster in company


def test_residuals_name_the_worst_of_each_family() -> None:
    rows = [Sample("a", "x", 1.0, 1.1, 0.0), Sample("a", "y", 1.0, 0.25, 0.0), Sample("b", "z", 2.0, 2.0, 0.0)]
    first, second = residuals(rows)
    assert (first.family, first.samples, first.worst_name) == ("a", 2, "y")
    assert first.worst == pytest.approx(-0.75)
    assert first.median == pytest.approx((0.1 + 0.75) / 2)
    assert (second.median, second.worst) == (0.0, 0.0)
