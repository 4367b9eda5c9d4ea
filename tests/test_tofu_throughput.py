"""Tofu's alternatives of `benchmarks/tofu_throughput.py`, on cases with known answers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from benchmarks.tofu_blocks import Kernel, Trace, trace_of
from benchmarks.tofu_models import UNBOUNDED, Model, largest_batch, on_one_gpu
from benchmarks.tofu_placement import layers_of, makespan_s, placed
from benchmarks.tofu_swapping import Swapped, swapped
from benchmarks.tofu_throughput import small_batch

TINY = Model("RNN", 2, 1)


@dataclass(frozen=True, slots=True)
class Reads:
    """Weights of 10 bytes that kernels of a second read in turn."""

    count: int

    @property
    def trace(self) -> Trace:
        return Trace(tuple(Kernel(1.0, (i,), ()) for i in range(self.count)), (10.0,) * self.count, self.count)


@cache
def tiny() -> Any:
    return on_one_gpu(TINY, 2)


def test_what_fits_is_not_swapped() -> None:
    assert swapped(Reads(3).trace, 30.0, 1.0) == Swapped(3.0, 0.0, 0.0)


def test_no_step_runs_in_less_than_its_largest_kernel_needs() -> None:
    assert swapped(Reads(3).trace, 9.0, 1.0) is None


@pytest.mark.parametrize(("policy", "loads"), [("lru", 3), ("farthest", 1)])
def test_weights_read_in_turn_are_loaded_and_dropped(policy: Any, loads: int) -> None:
    """Two of three weights fit: the least recently used is always the next, the one needed last is loaded every other time."""
    result = swapped(Reads(3).trace, 20.0, 10.0, policy)
    assert result is not None
    assert (result.in_bytes, result.out_bytes) == (10.0 * loads, 0.0)


@pytest.mark.parametrize(("bytes_per_s", "seconds"), [(10.0, 3.0), (5.0, 6.0)])
def test_loads_run_ahead_of_kernels(bytes_per_s: float, seconds: float) -> None:
    """A load of a second hides behind a kernel; loads of two seconds are all that counts."""
    result = swapped(Reads(3).trace, 20.0, bytes_per_s, "lru")
    assert result is not None
    assert result.seconds == seconds


def test_a_block_that_was_written_is_copied_out() -> None:
    trace = Trace((Kernel(1.0, (0,), (0,)), Kernel(1.0, (1,), ())), (10.0, 10.0), 2)
    assert swapped(trace, 10.0, 10.0) == Swapped(5.0, 20.0, 10.0)  # in, kernel, out, in, kernel: nothing overlaps


def test_dead_blocks_make_room() -> None:
    """Of a chain of four values two are alive at once."""
    links = tuple(Kernel(1.0, (i - 1,) if i else (), (i,)) for i in range(4))
    assert swapped(Trace(links, (10.0,) * 4, 0), 20.0, 1.0) == Swapped(4.0, 0.0, 0.0)


@pytest.mark.parametrize("most", [1, 5, 16, 63, 64, 100])
def test_the_largest_batch_is_the_largest_power_of_two_that_fits(most: int) -> None:
    assert largest_batch(lambda batch: batch <= most, 64) == 2 ** (min(most, 64).bit_length() - 1)


def test_no_batch_fits() -> None:
    assert largest_batch(lambda _: False, 64) is None


@pytest.mark.slow
def test_small_batch_takes_all_of_the_memory() -> None:
    limit = on_one_gpu(TINY, 64).peak_bytes
    assert small_batch(TINY, limit).batch == 64
    assert small_batch(TINY, 1e6).samples_per_s is None


def test_a_pipeline_of_layers_waits_for_values_and_their_transfer() -> None:
    """Layers on two GPUs, two time steps: the second layer begins a kernel and a transfer after the first."""
    first, second = Kernel(1.0, (), (0,), 0), Kernel(1.0, (0,), (1,), 0)
    trace = Trace((first, Kernel(1.0, (0,), (2,), 1), second, Kernel(1.0, (1, 2), (3,), 1)), (10.0,) * 4, 0)
    assert makespan_s(trace, (0, 1), 2, bytes_per_s=10.0, latency_s=0.0) == pytest.approx(4.0)
    assert makespan_s(trace, (0, 1), 2, bytes_per_s=10.0, latency_s=1.0) == pytest.approx(6.0)
    assert makespan_s(trace, (0, 0), 2, bytes_per_s=10.0, latency_s=1.0) == pytest.approx(4.0)


def test_the_layers_of_an_rnn_cost_alike() -> None:
    plan = tiny()
    seconds = [0.0] * TINY.depth
    for layer, own in zip(layers_of(plan.session.graph, TINY.depth), plan.planned.op_seconds, strict=True):
        seconds[max(0, layer)] += own
    assert max(seconds) < 1.25 * min(seconds)  # the embedding and the head are beside them


def test_layers_on_one_gpu_take_the_time_of_the_plan() -> None:
    plan = tiny()
    alone = placed(plan, TINY.depth, 1, bytes_per_s=1.0, latency_s=0.0)
    assert alone.seconds == pytest.approx(plan.step_time_s)
    apart = placed(plan, TINY.depth, 2, bytes_per_s=21e9, latency_s=1e-5)
    assert apart.seconds < alone.seconds
    assert apart.peak_bytes < alone.peak_bytes


def test_a_trace_holds_what_the_plan_holds() -> None:
    plan = tiny()
    alone = placed(plan, TINY.depth, 1, bytes_per_s=1.0, latency_s=0.0)
    assert alone.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.1)
    result = swapped(trace_of(plan), UNBOUNDED, 1e9)
    assert result is not None
    assert (result.in_bytes, result.out_bytes) == (0.0, 0.0)
    assert result.seconds == pytest.approx(plan.step_time_s)
