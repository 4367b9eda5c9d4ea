"""`benchmarks/truth.py`: what its rows are priced as, and what is fitted to them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.truth_eager import call_of
from benchmarks.truth_fit import fit
from benchmarks.truth_price import Price, price, scheduled_row
from benchmarks.truth_rows import Row, Sharding, cluster_of, rows
from models import gpt
from shardplan.frontend.nnx_state import trace_step
from shardplan.graph import flatten
from tests.attention import needs_flash

ROWS = {row.id: row for row in rows()[0]}
SMALL = {
    "layers": 2, "width": 256, "heads": 4, "sequence": 128, "vocabulary": 512, "batch": 64, "dtype": "float16", "scan": False,
    "remat": False, "tied": True,
}  # fmt: skip


def small(sharding: Sharding, *, framework: str = "Megatron-LM") -> Row:
    return Row("small", framework, "small", "gpt", SMALL, cluster_of("dgx-a100", 8), sharding, 1, 1.0, None)


def test_rates_that_made_the_seconds_come_back_from_a_tenth_of_the_rows() -> None:
    launch_s, reached = 40e-6, 0.2

    def priced(row: Row) -> Price:
        """A step that the host's launches bound; on H100s with the Triton kernel, one that is attention alone."""
        assert row.measured_s is not None
        attention_s = row.measured_s * reached / row.cluster.device.attention_efficiency if row.attention_kernel else 0.0
        return Price(
            compute_s=attention_s, attention_s=attention_s, tensor_s=0.0, data_s=0.0, hideable_s=0.0, contention=1.3,
            peak_bytes=1.0, launches=0.0 if row.attention_kernel else row.measured_s / launch_s,
        )  # fmt: skip

    measured = [(row, priced(row)) for row in ROWS.values() if row.measured_s]
    rates, launched, attending = fit(measured, lambda p: p.serial_s)
    assert (rates.launch_s, rates.triton_on_h100) == (pytest.approx(launch_s), pytest.approx(reached))
    assert 0 < len(launched) + len(attending) <= len(measured) / 10
    assert {row.framework for row, _ in launched} == {"Megatron-DeepSpeed"}
    assert all("H100" in row.cluster.device.name and row.attention_kernel for row, _ in attending)


def test_rates_of_few_rows_are_not_fitted() -> None:
    few = [(row, price(replace(small(Sharding(data=8)), id=row.id))) for row in [ROWS["vtrain-single-1004"]]]
    rates, launched, attending = fit(few, lambda p: p.serial_s)
    assert (rates.launch_s, rates.triton_on_h100, launched, attending) == (0.0, None, [], [])


@needs_flash
def test_a_slower_attention_kernel_adds_to_compute_alone() -> None:
    fused = replace(small(Sharding(data=8)), options={**SMALL, "fused": True})
    before = price(fused)
    after = before.with_attention(3.0)
    assert 0 < before.attention_s < before.compute_s
    assert after.compute_s - before.compute_s == pytest.approx(2 * before.attention_s)
    assert after.communication_s == before.communication_s


def test_steps_without_compilation_launch_more_kernels_and_take_longer() -> None:
    compiled, eager = (price(small(Sharding(data=8), framework=name)) for name in ("MaxText", "Megatron-LM"))
    assert eager.launches > compiled.launches
    assert eager.compute_s > compiled.compute_s


def test_without_sequence_parallelism_the_residual_stream_stays_whole() -> None:
    """Megatron-LM reduces after each of two products of a layer, and scatters nothing, even where that were faster."""
    wide = replace(small(Sharding(tensor=8)), options={**SMALL, "width": 3072, "heads": 32, "sequence": 2048})

    def kinds(row: Row) -> set[str]:
        stream = 64 * 2048 * 3072 * 2
        return {one.step.kind for one in scheduled_row(row)[0].issued if one.step.nbytes == stream}

    assert kinds(wide) == {"all-reduce"}
    assert "reduce-scatter" in kinds(replace(wide, sharding=Sharding(tensor=8, searched=True)))


def test_each_layers_functions_are_calls_of_their_own_and_gradients_belong_to_them() -> None:
    step, args = gpt.train_step(layers=2, width=64, heads=2, sequence=32, batch=8)
    nodes = flatten(trace_step(step, args, (0,)).program).nodes
    roots = [call_of(node) for node in nodes if node.op.primitive == "rsqrt"]
    assert len(set(roots)) == 5, "two norms in each layer, and the last"
    tanh = {call_of(node) for node in nodes if node.op.primitive == "tanh"}
    assert len(tanh) == 2
    assert tanh <= {call_of(node) for node in nodes if node.backward}
    assert {call_of(node) for node in nodes if node.op.primitive == "sqrt"} == {"optimizer"}
