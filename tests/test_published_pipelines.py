"""`benchmarks/truth_pipelines.py`: the rows with pipelines, what their parts are priced as, and the step that these make."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from benchmarks.truth_pipelines import fit, predicted
from benchmarks.truth_price import price, scheduled_row
from benchmarks.truth_rows import HERE, PipelineRow, Row, Sharding, cluster_of, pipeline_rows, rows
from benchmarks.truth_stages import PASSES, PLACES, Kernel, Parts, Pass, Place, Work, collective_s, launched_s, parts_of, step_of

SMALL = {
    "layers": 2, "width": 256, "heads": 4, "sequence": 128, "vocabulary": 512, "batch": 64, "dtype": "float16", "scan": False,
    "remat": True, "fused": False, "tied": True,
}  # fmt: skip
SHARDING = Sharding(data=2, tensor=2)


def small(framework: str = "Megatron-LM", **options: object) -> Row:
    """A row on the four devices of a stage."""
    return Row("small", framework, "small", "gpt", {**SMALL, **options}, cluster_of("dgx-a100", 4), SHARDING, 8, 1.0, None)


def pipeline(layers: int, stages: int, chunks: int, count: int) -> PipelineRow:
    """A pipeline of such stages."""
    stage = replace(small(layers=layers), microbatches=count)
    return PipelineRow(stage, cluster_of("dgx-a100", 8 * stages), stages, chunks, (count,))


def even(forward_s: float, backward_s: float) -> Parts:
    """Parts of a model that is its layers alone."""
    took: dict[Pass, float] = {"forward": forward_s, "backward": backward_s, "update": 0.0}
    work: dict[tuple[Place, Pass], Work] = {(p, q): () for p in PLACES for q in PASSES}
    work |= {("layers", q): (Kernel(took[q], 0.0, collective=False),) for q in PASSES}
    return Parts(work, dict.fromkeys(PLACES, 0.0))


def test_every_row_with_a_pipeline_is_said_or_left_out_with_a_reason() -> None:
    with (HERE / "measured_steps.csv").open() as file:
        lines = {line["id"]: line for line in csv.DictReader(file) if line["pp"].isdigit() and int(line["pp"]) > 1}
    said, left = pipeline_rows()
    assert {r.stage.id for r in said} | {r.id for r in left} == set(lines)
    assert len(said) + len(left) == len(lines)
    assert {r.stage.id for r in said}.isdisjoint(r.id for r in rows()[0])
    assert all(r.reason and "pipeline" not in r.reason for r in left)
    for row in said:
        line = lines[row.stage.id]
        assert row.stages * row.stage.cluster.size == row.whole.size == int(line["gpus"])
        assert row.stage.sharding.batch_ways * row.stage.sharding.tensor == row.stage.cluster.size
        assert row.stage.options["layers"] % row.chunks == 0
        assert row.chunks == row.stages * (int(line["vp"]) if line["vp"].isdigit() else 1)
        assert all(row.of(count).stage.samples == int(line["global_batch"]) for count in row.counts)


@pytest.mark.parametrize(("chunks", "bubble"), [(4, 3.0), (8, 3.0 / 2), (16, 3.0 / 4)])
def test_the_bubble_is_that_of_the_schedule_that_a_row_names(chunks: int, bubble: float) -> None:
    """1F1B waits for (stages - 1) microbatches, interleaved 1F1B for as many chunks (Narayanan et al. 2021, section 2.2)."""
    row = pipeline(16, 4, chunks, 8)
    step = step_of(
        replace(row, stage=replace(row.stage, options={**row.stage.options, "width": 1, "heads": 1})), even(1e3, 2e3), 0.0
    )
    a_microbatch = 4 * (1e3 + 2e3)
    assert step.compute_s == pytest.approx(8 * a_microbatch)
    assert step.bubble_s == pytest.approx(bubble * a_microbatch, rel=1e-6)


@pytest.mark.parametrize("framework", ["Megatron-LM", "Alpa"])
def test_the_parts_of_two_layers_add_up_to_their_step(framework: str) -> None:
    row = replace(small(framework), microbatches=1)
    parts, whole = parts_of(row), price(row)
    count = {"first": 1, "layers": 2, "last": 1}
    work = [(kernel, count[p]) for (p, _), own in parts.work.items() for kernel in own]
    compute_s = sum(k.seconds * n for k, n in work if not k.collective)
    twice_s = sum(
        k.seconds for k in parts.work["first", "update"]
    )  # most of it is the tied table's, which the last stage has too
    assert compute_s - twice_s == pytest.approx(whole.compute_s, rel=0.05), "but equal values are computed once"
    assert sum(k.seconds * n for k, n in work if k.collective) == pytest.approx(whole.tensor_s)
    assert sum(s * count[p] for p, s in parts.data_s.items()) > whole.data_s


def test_each_part_is_where_and_when_it_runs() -> None:
    """Tensor parallelism reduces twice a layer forward, twice more backward and twice as layers are computed again."""
    row = small(width=1024, heads=16, sequence=1024)
    parts = parts_of(row)
    reduced = [k for i in scheduled_row(row)[0].issued for k in [i] if i.step.nbytes == 32 * 1024 * 1024 * 2]
    each_s = max(i.seconds for i in reduced)
    assert collective_s(parts.work["layers", "forward"]) == pytest.approx(2 * each_s, rel=0.1)
    assert collective_s(parts.work["layers", "backward"]) == pytest.approx(3 * each_s, rel=0.4)
    products = {p: sum(k.seconds for k in parts.work[p, "forward"]) for p in PLACES}
    assert products["first"] < products["layers"]
    assert sum(k.seconds for k in parts.work["layers", "backward"]) > 2 * products["layers"]
    wide = parts_of(small(vocabulary=51200))
    assert wide.work["first", "forward"] != parts.work["first", "forward"]
    assert sum(k.seconds for k in wide.work["last", "forward"]) > 5 * sum(k.seconds for k in wide.work["layers", "forward"])
    assert wide.data_s["first"] == pytest.approx(wide.data_s["last"], rel=0.2), "both stages hold the tied table"


def test_weights_are_cast_once_a_step_where_the_optimizer_casts_them() -> None:
    cast, whole = (parts_of(small(width=1024, heads=16, dtype=dtype)) for dtype in ("float16", "float32"))
    counts = {q: [sum(k.launches for k in parts.work["layers", q]) for parts in (cast, whole)] for q in PASSES}
    assert counts["update"][0] - counts["update"][1] == 4, "a layer has four matrices"
    assert counts["forward"][0] == counts["forward"][1]


def test_a_kernel_waits_for_the_host_and_for_the_one_before_it() -> None:
    work = (Kernel(5.0, 1.0, False), Kernel(1.0, 1.0, True), Kernel(0.5, 3.0, False), Kernel(1.0, 0.0, False))
    assert launched_s(work, 0.0) == 7.5
    assert launched_s(work, 1.0) == 1.0 + 5.0 + 1.0 + 0.5 + 1.0
    assert launched_s(work, 2.0) == 10.0 + 0.5 + 1.0
    assert launched_s(work[1:], 10.0) == 40.0 + 0.5 + 1.0
    assert collective_s(work) == 1.0


def test_the_launch_that_made_the_seconds_comes_back() -> None:
    row, parts = pipeline(16, 4, 4, 8), even(1e-6, 2e-6)
    parts = replace(parts, work={key: tuple(k._replace(launches=10.0) for k in own) for key, own in parts.work.items()})
    measured_s = step_of(row, parts, 42e-6).seconds
    assert fit([(replace(row, stage=replace(row.stage, measured_s=measured_s)), parts)]) == pytest.approx(42e-6)


def test_the_fastest_number_of_microbatches_is_the_prediction() -> None:
    made = [(pipeline(16, 4, 4, count), even(8 / count, 16 / count)) for count in (4, 8, 64)]
    (result,) = predicted(made, 0.0)
    assert result.pipeline.counts == (64,)
